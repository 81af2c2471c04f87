"""Linears that combine pairs of rows have the bits of the plain linear's sums, combined: formats, classes, ISAs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.verify_kernels import check_contract

support = load("tests/support/pair_cases.py")
LAYOUT = "cpu_p16_pairs_v2"
MS = (1, 3, 8, 15, 70)
Build = Callable[[Sequence[KernelSpec], str], Any]


def check(kernels: Any, case: Any) -> None:
    for m in MS if isinstance(case.paired.operands[0].shape[0], str) else (case.paired.operands[0].shape[0],):
        symbols = [m] if case.paired.symbols else []
        paired, plain = case.given(m)
        sums = kernels.run_both(case.plain.name, lambda p=plain: [*p[:-1], p[-1].copy()], symbols)[-1]
        wide = np.zeros((m, case.columns + 3), paired[-1].dtype)
        found = kernels.run_both(case.paired.name, lambda p=paired, w=wide: [*p[:-1], w.copy()], symbols)[-1]
        assert found[:, : case.columns].tobytes() == case.combined(sums, m).tobytes(), (case.paired.name, m)
        assert not found[:, case.columns :].any(), "it writes beside its result"


FORMATS = list(support.FORMATS)


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_pairs_have_the_bits_of_their_sums(build: Build, isa: str, dtype: str) -> None:
    names = FORMATS if dtype == "bf16" else ("plain", "nf4", "q4_K")
    cases = list(support.cases(LAYOUT, [dtype], names, ("1", "2-8", "large")))
    kernels = build([spec for case in cases for spec in (case.paired, case.plain)], isa)
    for case in cases:
        check(kernels, case)


def test_integer_products_of_pairs_have_the_bits_of_their_sums(build: Build, isa: str) -> None:
    cases = [
        support.make(LAYOUT, name, "f32", "large", columns=columns, has_bias=has_bias, codes=True)
        for name, columns, has_bias in (("int8", 37, True), ("int4", 24, False))
    ]
    kernels = build([spec for case in cases for spec in (case.paired, case.plain)], isa)
    for case in cases:
        check(kernels, case)


def test_an_epilogue_without_a_vector_form_is_computed_column_by_column(build: Build, isa: str) -> None:
    """Converted to i64 and back: 64 bits have no 16 lanes."""
    case = support.make(LAYOUT, "nf4", "f32", "2-8", columns=11, has_bias=True)
    program = case.paired.body.epilogue
    op = program.ops[0].__class__
    more = (
        op(result="i", op="arith.fptosi", dtype="i64", args=("y",)),
        op(result="f", op="arith.sitofp", dtype="f32", args=("i",)),
    )
    whole = msgspec.structs.replace(program, ops=(*program.ops, *more), yields=("f",))
    spec = msgspec.structs.replace(case.paired, body=msgspec.structs.replace(case.paired.body, epilogue=whole))
    kernels = build([spec, case.plain], isa)
    for m in (1, 5):
        paired, plain = case.given(m)
        sums = kernels.run_both(case.plain.name, lambda p=plain: [*p[:-1], p[-1].copy()], [m])[-1]
        wide = np.zeros((m, case.columns + 3), np.float32)
        found = kernels.run_both(spec.name, lambda p=paired, w=wide: [*p[:-1], w.copy()], [m])[-1]
        np.testing.assert_array_equal(found[:, : case.columns], np.trunc(case.combined(sums, m)))


def test_a_spec_whose_weight_is_not_in_pairs_is_refused() -> None:
    """And one in pairs whose rows nobody combines: either would multiply the rows of others."""
    case = support.make(LAYOUT, "nf4", "f32", "2-8", columns=16, has_bias=False)
    for spec in (case.paired, case.plain):
        check_contract(spec)
        other = LAYOUT if spec is case.plain else "cpu_p16_v2"
        weight = msgspec.structs.replace(spec.operands[1], layout=other)
        wrong = msgspec.structs.replace(spec, operands=(spec.operands[0], weight, *spec.operands[2:]))
        with pytest.raises(PlanError, match="pairs of rows"):
            check_contract(wrong)
        with pytest.raises(KernelSelectionError, match="pairs of rows"):
            emit_kernel(wrong, "x86-64-v3")
    body = case.paired.body
    assert isinstance(body, LinearKernel)
    for change in ({"n": 31}, {"epilogue": None}):
        with pytest.raises(PlanError):
            check_contract(msgspec.structs.replace(case.paired, body=msgspec.structs.replace(body, **change)))


def test_the_other_target_says_which_layout_it_reads() -> None:
    case = support.make("cuda_t16_pairs_v1", "nf4", "f32", "2-8", columns=16, has_bias=False)
    with pytest.raises(KernelSelectionError, match="cpu_p16_v2"):
        emit_kernel(case.paired, "x86-64-v3")
