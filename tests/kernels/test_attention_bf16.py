"""Attention whose factors may be rounded to bf16: every case of test_attention.py against float64 of rounded factors.

A processor without AVX512-BF16 runs the same kernel in fp32; a definition makes any processor do so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_cases import BY_NAME, CASES, Case, inputs, reference, run
from bf16_attention import EPSILON, check

from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.isa import host_isa

BF16_CASES = [replace(case, name=f"{case.name}_in_bf16", compute="bf16") for case in CASES]
SHORT = (
    "odd_dims", "grouped", "causal", "decode", "decode_pieces", "last_window", "cache_decode_pieces", "ring_cache",
    "cache_int4", "decode_pieces_masked", "key_mask", "sinks_last", "decode_sinks_pieces",
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([case.spec for case in BF16_CASES], isa)


@pytest.mark.parametrize("name", SHORT)
def test_factors_and_weights_are_rounded_and_nothing_else(build: Callable[..., Any], name: str) -> None:
    isa = host_isa()  # for the others the text is that of exact kernels, and `slow` tests run it
    kernels = build([case.spec for case in BF16_CASES if case.name.removesuffix("_in_bf16") in SHORT], isa)
    _check_rounding(kernels, isa, next(case for case in BF16_CASES if case.name == f"{name}_in_bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16_CASES, ids=lambda c: c.name)
def test_every_case_rounds_factors_and_weights_and_nothing_else(kernels: Any, isa: str, case: Case) -> None:
    _check_rounding(kernels, isa, case)


def has_instruction(isa: str) -> bool:
    flags = Path("/proc/cpuinfo")
    return isa == "x86-64-v4" and flags.exists() and " avx512_bf16 " in flags.read_text()


def _check_rounding(kernels: Any, isa: str, case: Case) -> None:
    if has_instruction(isa):
        check(kernels, case)
        return
    arrays = inputs(case)
    error = np.abs(run(kernels, case, arrays).astype(np.float64) - reference(case, arrays))
    assert (error <= np.abs(reference(case, arrays)) * EPSILON[case.dtype] * 4 + 6e-6).all()


@pytest.mark.slow
def test_a_processor_without_the_instruction_computes_what_exact_attention_does(
    build: Callable[..., Any], isa: str, build_folder: Path
) -> None:
    names = ("plain", "decode", "cache_decode_grouped", "last")
    made = [replace(BY_NAME[name], name=f"{name}_plain", compute="bf16") for name in names]
    kernels = build([case.spec for case in (*made, *(BY_NAME[name] for name in names))], isa)
    harness = sys.modules[type(kernels).__module__]
    kernels.library = harness.compile_source(
        "#define QB_NO_BF16 1\n" + kernels.source + harness.PARALLEL, isa, build_folder
    )
    for case, name in zip(made, names, strict=True):
        arrays = inputs(case)
        assert run(kernels, case, arrays).tobytes() == run(kernels, BY_NAME[name], arrays).tobytes()


def test_only_kernels_that_may_round_hold_the_instruction() -> None:
    for name in ("plain", "decode"):
        assert "avx512bf16" not in emit_kernel(BY_NAME[name].spec, "x86-64-v4")
        spec = replace(BY_NAME[name], compute="bf16").spec
        assert "avx512bf16" in emit_kernel(spec, "x86-64-v4")
        assert "avx512bf16" not in emit_kernel(spec, "x86-64-v3")


@pytest.mark.slow
def test_a_query_that_sees_no_key_gives_zeros(build: Callable[..., Any], isa: str) -> None:
    case = replace(BY_NAME["bool_mask"], name="no_key_in_bf16", compute="bf16")
    arrays = inputs(case)
    arrays[3][0] = False
    out = run(build([case.spec], isa), case, arrays)
    assert not out[0].any()
    assert out[1].astype(np.float32).any()


@pytest.mark.slow
def test_scores_that_are_no_numbers_reach_the_queries_that_see_them(build: Callable[..., Any], isa: str) -> None:
    case = replace(BY_NAME["causal"], name="nan_in_bf16", compute="bf16")
    arrays = inputs(case)
    arrays[1][0, 100] = np.nan
    out = run(build([case.spec], isa), case, arrays)
    assert np.isnan(out[0, 100:]).all()
    assert not np.isnan(out[0, :100]).any()
    assert out.dtype == NUMPY_DTYPES[case.dtype]
