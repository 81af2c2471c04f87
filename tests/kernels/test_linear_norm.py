"""Linears that begin with a norm: the bits of the norm's kernel and the linear's, formats, types, classes and ISAs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.kernels.cpu.emit import emit_kernel, scratch_bytes
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import MOST_NORMALISED, RowCodes
from qcompiler.plan.verify_kernels import check_contract

support = load("tests/support/norm_prologue_cases.py")
LAYOUT = "cpu_p16_v2"
BOUNDS = {"f32": 2e-6, "bf16": 2e-2, "f16": 2e-3}
"""Relative L2 error: fp32 sums, and two roundings to the type."""
Build = Callable[[Sequence[KernelSpec], str], Any]


def copied(array: Any) -> Any:
    """The same with the same gaps between its rows."""
    return array.copy() if array.base is None else array.base.copy()[:, : array.shape[1]]


def check(kernels: Any, case: Any) -> None:
    operands = case.given(case.body.m)

    def run_all(spec: KernelSpec, given: Sequence[Any], written: int = 1) -> Any:
        return kernels.run_both(spec.name, lambda: [*given[:-written], *map(copied, given[-written:])])

    found = run_all(case.fused, operands, case.written)[-case.written :]
    apart = case.apart(lambda spec, given: run_all(spec, given)[-1], operands)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in apart], case.fused.name
    expected = case.expected(operands)
    error = np.linalg.norm(found[-1].astype(np.float64) - expected) / (np.linalg.norm(expected) + 1e-30)
    assert error <= BOUNDS[case.fused.operands[0].dtype], (case.fused.name, error)


def check_all(build: Build, isa: str, cases: Sequence[Any]) -> None:
    kernels = build([spec for case in cases for spec in case.specs], isa)
    for case in cases:
        check(kernels, case)


FEW_FORMATS = ("plain", "nf4", "nf4_across_rows", "int8")


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("f32", FEW_FORMATS),
        ("bf16", FEW_FORMATS[:2]),
        pytest.param("f32", tuple(set(support.FORMATS) - set(FEW_FORMATS)), marks=pytest.mark.slow),
        pytest.param("bf16", tuple(support.FORMATS), marks=pytest.mark.slow),
        pytest.param("f16", tuple(support.FORMATS), marks=pytest.mark.slow),
    ],
)
def test_a_linear_with_a_norm_has_the_bits_of_both_kernels(
    build: Build, isa: str, dtype: str, names: tuple[str, ...]
) -> None:
    check_all(build, isa, list(support.cases(LAYOUT, [dtype], sorted(names))))


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("f32", ("nf4", "plain")),
        ("bf16", ("nf4_across_rows", "plain")),
        pytest.param("f16", ("int8", "q4_K", "plain"), marks=pytest.mark.slow),
        pytest.param("bf16", tuple(support.FORMATS), marks=pytest.mark.slow),
    ],
)
def test_a_norm_that_is_added_to_a_residual_and_a_norm_of_the_sum(
    build: Build, isa: str, dtype: str, names: tuple[str, ...]
) -> None:
    made = list(support.added_cases(LAYOUT, [dtype], names))
    made += [
        support.make(LAYOUT, "plain", dtype, "layer", 3, "2-8", rows=18, cols=cols, added="rms", keeps=True)
        for cols in (1, 64, 1023)
    ]
    made.append(support.make(LAYOUT, "nf4", dtype, "rms", 17, "large", cols=64, keeps=True, added="rms"))
    check_all(build, isa, made)


def test_rows_of_one_column_of_powers_of_two_and_around_them(build: Build, isa: str) -> None:
    made = [
        support.make(LAYOUT, "plain", "f32", norm, m, "1" if m == 1 else "2-8", rows=18, cols=cols)
        for cols in (1, 2, 15, 16, 63, 64, 65, 256, 1023)
        for norm, m in (("rms", 1), ("layer", 3))
    ]
    made += [
        support.make(LAYOUT, "plain", "bf16", norm, 3, "2-8", rows=18, cols=cols, keeps=True)
        for cols, norm in ((1, "layer"), (64, "rms"), (1023, "layer"))
    ]
    check_all(build, isa, made)


def test_decoded_panels_and_many_rows(build: Build, isa: str) -> None:
    """Class "large" with rows known: the rows of a picture, also where panels are decoded in blocks of columns."""
    made = [
        support.make(LAYOUT, fmt, dtype, norm, m, "large", cols=cols, has_bias=True)
        for fmt, dtype, norm, m, cols in (
            ("nf4", "f32", "layer", 17, 64), ("plain", "f32", "rms", 25, 1219), ("nf4", "bf16", "rms", 13, 640),
        )
    ]  # fmt: skip
    made.append(support.make(LAYOUT, "nf4", "f32", "layer", 17, "large", cols=64, keeps=True))
    check_all(build, isa, made)


def test_tasks_of_several_threads_read_the_rows_of_the_first(build: Build, isa: str) -> None:
    """Wide enough for several tasks; `check` runs on one thread and on two."""
    case = support.make(LAYOUT, "nf4", "f32", "rms", 1, "1", rows=2048, cols=1024)
    check_all(build, isa, [case])


def test_a_row_without_spread_or_with_infinities_is_what_the_norm_makes_of_it(build: Build, isa: str) -> None:
    made = [support.make(LAYOUT, "plain", "f32", norm, 2, "2-8", cols=37) for norm in ("rms", "layer")]
    kernels = build([spec for case in made for spec in case.specs], isa)

    def run(spec: KernelSpec, given: Sequence[Any]) -> Any:
        return kernels.run_both(spec.name, lambda: [*given[:-1], given[-1].copy()])[-1]

    for case in made:
        for value in (0.0, 7.0, np.inf):
            operands = case.given(1)
            operands[0][0, :] = value
            found, (apart,) = run(case.fused, operands), case.apart(run, operands)
            np.testing.assert_array_equal(found, apart)  # NaN where NaN is
            assert np.isfinite(found[1]).all()


def test_the_rows_lie_behind_the_scratch_of_tasks() -> None:
    case = support.make(LAYOUT, "nf4", "bf16", "layer", 8, "2-8")
    room = 8 * 192 * 2
    assert scratch_bytes(case.fused, "x86-64-v3") - scratch_bytes(case.plain, "x86-64-v3") in range(room, room + 64)
    kept = support.make(LAYOUT, "nf4", "bf16", "layer", 8, "2-8", keeps=True)
    assert scratch_bytes(kept.fused, "x86-64-v3") - scratch_bytes(kept.plain, "x86-64-v3") in range(64)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_of_int8_of_x_and_of_a_norm_have_the_bits_of_their_kernels(build: Build, isa: str, dtype: str) -> None:
    """Both kinds, with and without a norm, one row and several, a row that is not finite, columns that fill no run;
    kept for other readers, with gaps between them, or not."""
    made = [
        support.make_codes(LAYOUT, fmt, dtype, norm, m, kind, cols=cols, keeps=keeps)
        for keeps in (False, True)
        for fmt, norm, m, kind, cols in (
            ("int8", "rms", 1, "token", 101), ("int8", None, 7, "token", 64), ("int4", "layer", 3, "tensor", 96),
            ("int4", None, 1, "tensor", 1024), ("int8", "layer_bare", 15, "token", 333), ("int8", "rms", 2, "token", 1),
        )
    ]  # fmt: skip
    kernels = build(list({spec.name: spec for case in made for spec in (case.fused, *case.steps)}.values()), isa)

    def run(spec: KernelSpec, given: Sequence[Any], written: int = 1) -> Any:
        return kernels.run_both(spec.name, lambda: [*given[:-written], *map(copied, given[-written:])])

    for case in made:
        operands = case.given(case.m)
        for value in (1.0, np.nan):
            operands[0][0, 0] *= value
            found = run(case.fused, operands, case.written)[-case.written :]
            apart = case.apart(lambda spec, given: run(spec, given)[-1], operands)
            for ours, theirs in zip(found, apart, strict=True):
                np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


KEPT = msgspec.structs.replace(support.NORMS["rms"], keeps=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"m": "m"}, "must be known"),
        ({"m": MOST_NORMALISED // 192 + 1}, "1 to 32768 elements"),
        ({"codes": True}, "floats, not of int8"),
        ({"rows": RowCodes(kind="token")}, "to multiply codes"),
        ({"added": support.NORMS["rms"]}, "adds one norm to a residual"),
        ({"codes": True, "rows": RowCodes(kind="tensor", value=float("inf"))}, "with the value inf"),
        (
            {"codes": True, "rows": RowCodes(kind="token", keeps=True), "norm": KEPT},
            "the rows of its norm or the codes that it makes, not both",
        ),
    ],
)
def test_what_cannot_be_normalised_is_refused(change: dict[str, Any], said: str) -> None:
    case = support.make(LAYOUT, "nf4", "f32", "rms", 2, "2-8")
    check_contract(case.fused)
    wrong = msgspec.structs.replace(case.fused, body=msgspec.structs.replace(case.fused.body, **change))
    with pytest.raises(PlanError, match=said):
        check_contract(wrong)
    with pytest.raises(KernelSelectionError, match=said):
        emit_kernel(wrong, "x86-64-v3")


def test_a_norm_without_its_weight_is_refused() -> None:
    case = support.make(LAYOUT, "nf4", "f32", "layer", 2, "2-8")
    short = msgspec.structs.replace(case.fused, operands=(*case.fused.operands[:-2], case.fused.operands[-1]))
    with pytest.raises(PlanError):
        check_contract(short)
