"""Reductions: both vector forms and the ordered one, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.dims import contiguous_strides
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.weights import NUMPY_DTYPES


def op(result: str, name: str, dtype: str, *args: str, **extra: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **extra)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """Reduces `axes` of a contiguous input of `shape`; one output per initial value."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    ops: tuple[ScalarOp, ...]
    yields: tuple[str, ...]
    init: tuple[str, ...]
    reference: Callable[[np.ndarray, tuple[int, ...]], Any]
    dtype: DType = "f32"
    out: tuple[DType, ...] = ("f32",)
    tolerance: float = 0.0

    @property
    def kept(self) -> list[int]:
        return [a for a in range(len(self.shape)) if a not in self.axes]

    @property
    def spec(self) -> KernelSpec:
        order = [*self.kept, *self.axes]
        steps = contiguous_strides(self.shape)
        out_steps = contiguous_strides(tuple(self.shape[a] for a in self.kept))
        accesses = [AffineAccess(offset=0, coefficients=tuple(steps[a] for a in order))]
        accesses += [AffineAccess(offset=0, coefficients=(*out_steps, *(0 for _ in self.axes)))] * len(self.out)
        operands = [Operand(name="x", dtype=self.dtype, access="r", shape=self.shape)]
        operands += [Operand(name=f"y{i}", dtype=d, access="w", shape=()) for i, d in enumerate(self.out)]
        inputs = [("in0", self.dtype), *((f"acc{i}", d) for i, d in enumerate(self.out))]
        body = LoopKernel(
            extents=tuple(self.shape[a] for a in order),
            iterators=(*("parallel" for _ in self.kept), *("reduction" for _ in self.axes)),
            accesses=tuple(accesses),
            body=ScalarProgram(inputs=tuple(inputs), ops=self.ops, yields=self.yields),
            init=self.init,
        )
        return KernelSpec(name=self.name, symbols=(), operands=tuple(operands), body=body)


SUM = (op("s", "arith.addf", "f32", "in0", "acc0"),)
MAX = (op("s", "arith.maximumf", "f32", "acc0", "in0"),)
ZERO, LOW = "0x0p+0", "-inf"


def total(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return x.astype(np.float64).sum(axes)


ARGMAX = (
    op("i", "linalg.index", "index", axis=1), op("k", "arith.index_cast", "i64", "i"),
    op("c", "arith.cmpf", "i1", "in0", "acc0", predicate="ogt"),
    op("v", "arith.select", "f32", "c", "in0", "acc0"), op("w", "arith.select", "i64", "c", "k", "acc1"),
)  # fmt: skip
WIDEN = (op("f", "arith.extf", "f32", "in0"), op("s", "arith.addf", "f32", "f", "acc0"))
SQUARES = (
    op("q", "arith.mulf", "f32", "in0", "in0"), op("s", "arith.addf", "f32", "in0", "acc0"),
    op("t", "arith.addf", "f32", "q", "acc1"),
)  # fmt: skip
CASES = [
    Case("rows", (33, 403), (1,), SUM, ("s",), (ZERO,), total, tolerance=2e-5),
    Case("rows_short", (70, 5), (1,), SUM, ("s",), (ZERO,), total, tolerance=2e-6),
    Case("rows_of_64s", (7, 128), (1,), SUM, ("s",), (ZERO,), total, tolerance=5e-6),
    Case("columns", (403, 77), (0,), SUM, ("s",), (ZERO,), total, tolerance=5e-5),
    Case("columns_wide", (31, 700), (0,), SUM, ("s",), (ZERO,), total, tolerance=1e-5),
    Case("middle", (5, 19, 33), (1,), SUM, ("s",), (ZERO,), total, tolerance=1e-5),
    Case("outer_and_last", (5, 19, 33), (0, 2), SUM, ("s",), (ZERO,), total, tolerance=2e-5),
    Case("everything", (40, 1000), (0, 1), SUM, ("s",), (ZERO,), total, tolerance=1e-3),
    Case("from_ten", (9, 37), (1,), SUM, ("s",), ((10.0).hex(),), lambda x, a: total(x, a) + 10, tolerance=5e-6),
    Case("max_rows", (33, 403), (1,), MAX, ("s",), (LOW,), lambda x, a: x.max(a)),
    Case("max_columns", (403, 77), (0,), MAX, ("s",), (LOW,), lambda x, a: x.max(a)),
    Case("bf16_rows", (33, 403), (1,), WIDEN, ("s",), (ZERO,), total, dtype="bf16", tolerance=2e-5),
    Case("sum_and_squares", (33, 101), (1,), SQUARES, ("s", "t"), (ZERO, ZERO),
         lambda x, a: (total(x, a), total(x * x, a)), out=("f32", "f32"), tolerance=2e-5),
    Case("sum_and_squares_columns", (101, 33), (0,), SQUARES, ("s", "t"), (ZERO, ZERO),
         lambda x, a: (total(x, a), total(x * x, a)), out=("f32", "f32"), tolerance=8e-5),
    Case("argmax", (33, 101), (1,), ARGMAX, ("v", "w"), (LOW, "0"), lambda x, a: (x.max(a), x.argmax(a[0])),
         out=("f32", "i64")),
    Case("any", (33, 101), (1,), (op("s", "arith.ori", "i1", "in0", "acc0"),), ("s",), ("0",),
         lambda x, a: x.any(a), dtype="i1", out=("i1",)),
    Case("all_columns", (3, 101), (0,), (op("s", "arith.andi", "i1", "in0", "acc0"),), ("s",), ("true",),
         lambda x, a: x.all(a), dtype="i1", out=("i1",)),
    Case("count_i32", (12, 90), (1,), (op("s", "arith.addi", "i32", "in0", "acc0"),), ("s",), ("0",),
         lambda x, a: x.sum(a), dtype="i32", out=("i32",)),
    Case("sum_i64", (12, 90), (1,), (op("s", "arith.addi", "i64", "in0", "acc0"),), ("s",), ("0",),
         lambda x, a: x.sum(a), dtype="i64", out=("i64",)),
    Case("min_i32", (12, 90), (1,), (op("s", "arith.minsi", "i32", "in0", "acc0"),), ("s",), ("2147483647",),
         lambda x, a: x.min(a), dtype="i32", out=("i32",)),
    Case("sum_f64", (12, 90), (1,), (op("s", "arith.addf", "f64", "in0", "acc0"),), ("s",), (ZERO,), total,
         dtype="f64", out=("f64",), tolerance=1e-12),
    Case("nothing", (6, 0), (1,), SUM, ("s",), ((3.0).hex(),), lambda x, a: np.full(6, 3.0)),
    Case("one_element", (6, 1), (1,), SUM, ("s",), (ZERO,), total),
]  # fmt: skip
FORMS = {
    "rows": "16 partial results", "outer_and_last": "16 partial results", "everything": "16 partial results",
    "columns": "16 outputs at once", "middle": "16 outputs at once", "argmax": "scalar, in order",
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([case.spec for case in CASES], isa)


def values(case: Case) -> np.ndarray:
    rng = np.random.default_rng(8)
    if case.dtype == "i1":
        return rng.random(case.shape) > 0.98 if case.name == "any" else rng.random(case.shape) > 0.2
    if case.dtype in ("i32", "i64"):
        return rng.integers(-1000, 1000, case.shape, NUMPY_DTYPES[case.dtype])
    return rng.normal(size=case.shape).astype(NUMPY_DTYPES[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reduction_matches_numpy(kernels: Any, case: Case) -> None:
    x = values(case)
    shape = [case.shape[a] for a in case.kept]
    done = kernels.run_both(case.name, lambda: [x, *(np.ones(shape, NUMPY_DTYPES[d]) for d in case.out)])
    want = case.reference(x, case.axes)
    for got, expected in zip(done[1:], want if isinstance(want, tuple) else (want,), strict=True):
        if case.tolerance == 0:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_form_of_a_reduction(name: str, form: str) -> None:
    case = next(c for c in CASES if c.name == name)
    assert form in emit_kernel(case.spec, "x86-64-v4")


def test_maximum_keeps_nan(kernels: Any) -> None:
    for name in ("max_rows", "max_columns"):
        case = next(c for c in CASES if c.name == name)
        x = values(case)
        x[17, 30] = np.nan
        y = np.zeros(case.shape[case.kept[0]], np.float32)
        kernels.run(name, [x, y])
        assert np.isnan(y).sum() == 1


def test_output_that_moves_along_a_reduction_is_refused() -> None:
    import msgspec

    spec = CASES[0].spec
    broken = (spec.body.accesses[0], AffineAccess(offset=0, coefficients=(1, 1)))
    body = msgspec.structs.replace(spec.body, accesses=broken)
    with pytest.raises(KernelSelectionError, match="moves along a reduction"):
        emit_kernel(msgspec.structs.replace(spec, body=body), "x86-64-v4")
