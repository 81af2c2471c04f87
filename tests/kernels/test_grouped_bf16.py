"""Products with chosen experts whose factors are rounded to bf16 (grouped_bf16.h): against float64, for every way
through the codes, every number of rows of an expert, and processors without the instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bf16_linears import ROUNDED, WEIGHTS
from grouped_cases import Case, make_case

from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.isa import cpuinfo_flags

EXPERTS = 3
SHAPES = {text: WEIGHTS[text] for text in WEIGHTS if text != "plain"} | {
    "panels": (51, 1077), "rows": (35, 61), "columns": (5, 33),
}  # fmt: skip
"""A format or how plain numbers lie: the rows of an expert, most of which begin inside a panel, and K."""
FEW = ("nf4:block=64", "q4_K", "q6_K", "int8", "int8:symmetric=False", "fp8_e4m3", "panels", "rows")
COUNTS = ((1, 0, 0), (2, 1, 0), (3, 4, 5), (8, 9, 14), (40, 0, 65), (131, 2, 1))
"""Rows of each expert."""


def case_of(text: str, x: DType = "f32", repeat: int = 1) -> Case:
    return make_case(text, EXPERTS, *SHAPES[text], dtype=x, factors="bf16", repeat=repeat)


def routed(counts: Sequence[int]) -> list[int]:
    """Experts by pair, mixed."""
    chosen = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return [int(e) for e in np.random.default_rng(sum(counts)).permutation(chosen)]


def operands_of(case: Case, chosen: Sequence[int], rows: Any = None) -> list[Any]:
    """x with numbers beside its columns that are none, the weight, the index, and where the result goes."""
    body, (x, _, index, _) = case.body, case.spec.operands
    given = np.full((len(chosen) // body.repeat, body.k + 5), np.nan, NUMPY_DTYPES[x.dtype])
    drawn = np.random.default_rng(len(chosen)).standard_normal((len(given), body.k)) if rows is None else rows
    given[:, : body.k] = drawn.astype(given.dtype)
    out = np.full((len(chosen), body.n + 1), 7, given.dtype)
    return [given, case.weight, np.array(chosen, NUMPY_DTYPES[index.dtype]), out]


def dots(isa: str) -> bool:
    """Whether this processor multiplies numbers of bf16 in a program for `isa`."""
    return isa == "x86-64-v4" and "avx512_bf16" in (cpuinfo_flags(Path("/proc/cpuinfo")) or ())


def check(kernels: Any, case: Case, counts: Sequence[int], *, rounded: float = ROUNDED) -> None:
    """`rounded`: how far the rounding of a weight's elements may move a product; 0 where they stay in fp32."""
    body, chosen = case.body, routed(counts)
    chosen = [expert for expert in chosen for _ in range(body.repeat)]
    operands = operands_of(case, chosen)
    out = kernels.run_both(case.spec.name, lambda: [each.copy() for each in operands], (len(operands[0]),))[-1]
    assert (out[:, body.n] == 7).all(), "wrote beside its columns"
    rows = operands[0][:, : body.k].astype(NUMPY_DTYPES["bf16"]).astype(np.float64)
    narrow = 2.0**-8 if out.dtype != np.float32 else 0.0  # a result in 16 bits is rounded once more
    for pair, expert in enumerate(chosen):
        row, w = rows[pair // body.repeat], case.values[expert]
        wanted, terms = w @ row, np.abs(w) @ np.abs(row)
        error = np.abs(out[pair, : body.n].astype(np.float64) - wanted)
        assert (error <= terms * (rounded + (body.k + 2) * 2.0**-24) + narrow * np.abs(wanted)).all(), (counts, pair)
        # rounding is random: what is off by more than the typical error has another cause
        typical = np.sqrt((w**2) @ (row**2)) * max(rounded, 2.0**-18) + narrow * np.abs(wanted)
        assert np.sqrt(np.mean((error / typical) ** 2)) < 1, (case.spec.operands[1].format, counts, pair)


@pytest.mark.parametrize("text", [t if t in FEW else pytest.param(t, marks=pytest.mark.slow) for t in SHAPES])
def test_products_are_those_of_factors_in_bf16(build: Callable[..., Any], isa: str, text: str) -> None:
    cases = [case_of(text), case_of(text, repeat=2), case_of(text, "bf16")]
    kernels = build([case.spec for case in cases], isa)
    for counts in COUNTS:
        for case in cases:
            check(kernels, case, counts, rounded=ROUNDED if dots(isa) else 0.0)
    nothing = np.full((1, cases[0].body.n + 1), 7, np.float32)
    kernels.run(cases[0].spec.name, [nothing, cases[0].weight, np.zeros(1, np.int64), nothing], (0,))
    assert (nothing == 7).all()


def test_many_columns_leave_few_rows_at_a_time(build: Callable[..., Any], isa: str) -> None:
    """Rows of a task are at most 1.5 MiB: 32 of these."""
    case = make_case("q4_K", 2, 19, 94 * 256, factors="bf16")
    kernels = build([case.spec], isa)
    for counts in ((70, 33), (3, 129)):
        check(kernels, case, counts, rounded=ROUNDED if dots(isa) else 0.0)


@pytest.mark.parametrize(
    "text", ["q4_K", *(pytest.param(text, marks=pytest.mark.slow) for text in ("int8", "fp8_e4m3", "rows"))]
)
def test_a_processor_without_the_instruction_multiplies_the_same_rows(
    build: Callable[..., Any], isa: str, build_folder: Path, text: str
) -> None:
    case = case_of(text)
    kernels = build([case.spec], isa)
    harness = sys.modules[type(kernels).__module__]
    source = "#define QB_NO_BF16 1\n" + kernels.source + harness.PARALLEL
    kernels.library = harness.compile_source(source, isa, build_folder)
    for counts in ((2, 1, 0), (8, 9, 14), (40, 0, 65)):
        check(kernels, case, counts, rounded=0.0)


@pytest.mark.parametrize("text", ["nf4:block=64", "q4_K", "q6_K", "fp8_e4m3"])
def test_equal_rows_of_an_expert_give_equal_bits(build: Callable[..., Any], isa: str, text: str) -> None:
    """Whichever rows of other experts lie between them, and wherever an expert's rows are cut: 131 are two chunks."""
    case = case_of(text)
    kernels = build([case.spec], isa)
    for counts in ((131, 3, 2), (9, 8, 0)):
        chosen = routed(counts)
        rows = np.repeat(np.random.default_rng(0).standard_normal((1, case.body.k)), len(chosen), 0)
        operands = operands_of(case, chosen, rows)
        kernels.run(case.spec.name, operands, (len(chosen),))
        first = operands[-1][np.array(chosen) == 0]
        assert (first == first[0]).all()


@pytest.mark.parametrize("text", ["q4_K", "panels"])
def test_numbers_that_are_none_stay_in_their_rows(build: Callable[..., Any], isa: str, text: str) -> None:
    case = case_of(text)
    kernels, chosen = build([case.spec], isa), routed((5, 12, 0))
    rows = np.random.default_rng(1).standard_normal((len(chosen), case.body.k))
    plain = operands_of(case, chosen, rows)
    kernels.run(case.spec.name, plain, (len(chosen),))
    rows[3, 7] = np.nan
    out = operands_of(case, chosen, rows)
    kernels.run(case.spec.name, out, (len(chosen),))
    assert np.isnan(out[-1][3, : case.body.n]).all()
    others = np.arange(len(chosen)) != 3
    assert out[-1][others].tobytes() == plain[-1][others].tobytes()


def test_the_instruction_is_used_where_weights_decode_to_bf16() -> None:
    case = case_of("nf4:block=64")
    assert "qm_run_bf16<" in emit_kernel(case.spec, "x86-64-v4")
    assert "qm_run_bf16" not in emit_kernel(case.spec, "x86-64-v3")
    assert "qm_round_rows<float>" in emit_kernel(case.spec, "x86-64-v3"), "x is rounded there, too"
    assert "qm_run_bf16" not in emit_kernel(make_case("nf4:block=64", 3, 19, 704).spec, "x86-64-v4")


def test_experts_that_do_not_exist_are_reported(build: Callable[..., Any], isa: str) -> None:
    case = case_of("q4_K")
    kernels = build([case.spec], isa)
    chosen = [0, 2, EXPERTS, 1, -1]
    operands = operands_of(case, chosen)
    context = kernels.run(case.spec.name, operands, (len(chosen),), threads=2)
    assert (context.error_code, context.error_limit) == (1, EXPERTS)
    assert (operands[-1][[2, 4], :-1] == 0).all() and (operands[-1][[0, 1, 3], :-1] != 0).any(axis=1).all()
