"""Pointwise loop kernels: every access pattern against NumPy, on every ISA, on one and two threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.weights import NUMPY_DTYPES


def op(result: str, name: str, dtype: str, *args: str, **extra: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **extra)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """`accesses`: (dtype, offset, coefficients) per operand, outputs last. `reference` maps input grids to outputs."""

    name: str
    extents: tuple[Dim, ...]
    accesses: tuple[tuple[DType, Dim, tuple[Dim, ...]], ...]
    ops: tuple[ScalarOp, ...]
    yields: tuple[str, ...]
    reference: Callable[..., Any]
    symbols: tuple[tuple[str, int], ...] = ()
    exact: bool = True
    absolute: float = 1e-7

    @property
    def spec(self) -> KernelSpec:
        count = len(self.accesses) - len(self.yields)
        operands = tuple(
            Operand(
                name=f"x{i}" if i < count else f"y{i - count}", dtype=dtype, access="r" if i < count else "w", shape=()
            )
            for i, (dtype, _, _) in enumerate(self.accesses)
        )
        names = tuple((f"in{i}", dtype) for i, (dtype, _, _) in enumerate(self.accesses))
        body = LoopKernel(
            extents=self.extents,
            iterators=("parallel",) * len(self.extents),
            accesses=tuple(AffineAccess(offset=o, coefficients=c) for _, o, c in self.accesses),
            body=ScalarProgram(inputs=names, ops=self.ops, yields=self.yields),
        )
        return KernelSpec(name=self.name, symbols=tuple(s for s, _ in self.symbols), operands=operands, body=body)

    def value(self, d: Dim) -> int:
        return dim(d).evaluate(dict(self.symbols))

    def view(self, i: int, flat: np.ndarray) -> np.ndarray:
        """Operand `i` over the whole iteration space."""
        _, offset, steps = self.accesses[i]
        shape = [self.value(e) for e in self.extents]
        strides = [self.value(s) * flat.itemsize for s in steps]
        return np.lib.stride_tricks.as_strided(flat[self.value(offset) :], shape, strides)

    def memory(self, i: int, rng: np.random.Generator) -> np.ndarray:
        dtype, offset, steps = self.accesses[i]
        reach = sum((self.value(e) - 1) * self.value(s) for e, s in zip(self.extents, steps, strict=True))
        size = self.value(offset) + max(reach, 0) + 1
        kept = NUMPY_DTYPES[dtype]
        if dtype == "i1":
            return rng.random(size) > 0.5
        if dtype in ("f32", "f64", "bf16", "f16"):
            return (rng.normal(size=size) * 2).astype(kept)
        info = np.iinfo(kept)
        return rng.integers(max(info.min, -1000), min(info.max, 1000), size, kept, endpoint=True)


F32 = "f32"
ADD = (op("s", "arith.addf", F32, "in0", "in1"),)
ROUND = np.float32
BF16 = NUMPY_DTYPES["bf16"]


def bf16_add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x.astype(ROUND) + y.astype(ROUND)).astype(BF16)


def pointwise(name: str, dtype: DType, ops: Sequence[ScalarOp], result: str, reference: Any, **kw: Any) -> Case:
    """One contiguous loop of 1000 elements over as many inputs as the ops name."""
    count = 1 + max(int(a[2:]) for o in ops for a in o.args if a.startswith("in"))
    out: DType = kw.pop("out", dtype)
    accesses = [(dtype, 0, (1,))] * count + [(out, 0, (1,))]
    return Case(name, (1000,), tuple(accesses), tuple(ops), (result,), reference, **kw)


CASES = [
    Case("add_1d", (1003,), ((F32, 0, (1,)),) * 3, ADD, ("s",), lambda x, y: x + y),
    Case("add_long", (70001,), ((F32, 0, (1,)),) * 3, ADD, ("s",), lambda x, y: x + y),
    Case("add_symbolic", ("b", "s", 48), ((F32, 0, ("48*s", 48, 1)),) * 3, ADD, ("s",), lambda x, y: x + y,
         symbols=(("b", 3), ("s", 37))),
    Case("add_nothing", ("b", "s", 37), ((F32, 0, (5000, 40, 1)),) * 3, ADD, ("s",), lambda x, y: x + y,
         symbols=(("b", 3), ("s", 0))),
    Case("add_row_broadcast", ("r", 37), ((F32, 0, (37, 1)), (F32, 0, (0, 1)), (F32, 0, (37, 1))), ADD, ("s",),
         lambda x, y: x + y, symbols=(("r", 61),)),
    Case("add_column_broadcast", (41, 37), ((F32, 0, (37, 1)), (F32, 0, (1, 0)), (F32, 0, (37, 1))), ADD, ("s",),
         lambda x, y: x + y),
    Case("add_scalar", (41, 37), ((F32, 0, (37, 1)), (F32, 0, (0, 0)), (F32, 0, (37, 1))), ADD, ("s",),
         lambda x, y: x + y),
    Case("add_transposed", (45, 53), ((F32, 0, (1, 45)), (F32, 0, (53, 1)), (F32, 0, (53, 1))), ADD, ("s",),
         lambda x, y: x + y),
    Case("transpose_out", (45, 53), ((F32, 0, (53, 1)), (F32, 0, (1, 45))), (), ("in0",), lambda x: x),
    Case("transpose_bf16", (33, 2, 50), (("bf16", 0, (1, 1650, 33)), ("bf16", 0, (100, 50, 1))), (), ("in0",),
         lambda x: x),
    Case("transpose_i64", (33, 50), (("i64", 0, (1, 33)), ("i64", 0, (50, 1))), (), ("in0",), lambda x: x),
    Case("heads_to_rows", (2, 7, 3, 20), ((F32, 0, (420, 20, 140, 1)), (F32, 0, (420, 60, 20, 1))), (), ("in0",),
         lambda x: x),
    Case("slice_into_concat", (6, 19), ((F32, 5, (40, 1)), (F32, 21, (57, 1))), (), ("in0",), lambda x: x),
    Case("stride_two", (301,), ((F32, 1, (2,)), (F32, 0, (1,))), (), ("in0",), lambda x: x),
    Case("reversed", (301,), ((F32, 300, (-1,)), (F32, 0, (1,))), (), ("in0",), lambda x: x),
    Case("scatter_stride", (301,), ((F32, 0, (1,)), (F32, 0, (3,))), (), ("in0",), lambda x: x),
    Case("no_loops", (), ((F32, 0, ()),) * 3, ADD, ("s",), lambda x, y: x + y),
    Case("ones", (1, 1, 5), ((F32, 0, (9, 9, 1)),) * 3, ADD, ("s",), lambda x, y: x + y),
    Case("empty", ("z", 5), ((F32, 0, (5, 1)),) * 3, ADD, ("s",), lambda x, y: x + y, symbols=(("z", 0),)),
    Case("constant_fill", (7, 33), ((F32, 0, (33, 1)),), (op("c", "arith.constant", F32, value="inf"),), ("c",),
         lambda: np.full((7, 33), np.inf)),
    Case("two_outputs", (999,), ((F32, 0, (1,)), (F32, 0, (1,)), (F32, 0, (1,)), ("i1", 0, (1,))),
         (*ADD, op("c", "arith.cmpf", "i1", "in0", "in1", predicate="olt")), ("s", "c"), lambda x, y: (x + y, x < y)),
    Case("index_mask", (13, 29), (("i1", 0, (29, 1)),),
         (op("i", "linalg.index", "index", axis=0), op("j", "linalg.index", "index", axis=1),
          op("c", "arith.cmpi", "i1", "j", "i", predicate="sle")), ("c",), lambda: np.tril(np.ones((13, 29), bool))),
    Case("index_of_unit_axis", (1, 40), (("i64", 0, (40, 1)),),
         (op("i", "linalg.index", "index", axis=0), op("j", "linalg.index", "index", axis=1),
          op("k", "arith.addi", "index", "i", "j"), op("l", "arith.index_cast", "i64", "k")), ("l",),
         lambda: np.arange(40)[None]),
    pointwise("bf16_sum", "bf16", [op("a", "arith.extf", F32, "in0"), op("b", "arith.extf", F32, "in1"),
              op("c", "arith.addf", F32, "a", "b"), op("d", "arith.truncf", "bf16", "c")], "d", bf16_add),
    pointwise("bf16_direct", "bf16", [op("c", "arith.addf", "bf16", "in0", "in1")], "c", bf16_add),
    pointwise("gelu", F32, [
        op("h", "arith.constant", F32, value=(0.5).hex()), op("r", "arith.constant", F32, value=(0.5**0.5).hex()),
        op("o", "arith.constant", F32, value="0x1p+0"), op("a", "arith.mulf", F32, "in0", "r"),
        op("b", "math.erf", F32, "a"), op("c", "arith.addf", F32, "b", "o"), op("d", "arith.mulf", F32, "in0", "h"),
        op("e", "arith.mulf", F32, "d", "c")], "e",
        lambda x: np.vectorize(lambda v: v * 0.5 * (1 + __import__("math").erf(v * 0.5**0.5)))(x.astype(np.float64)),
        exact=False, absolute=3e-7),  # 1 + erf loses what is far below 1; torch's own gelu is off by up to 1.1e-6
    pointwise("mask_to_bias", "i1", [op("z", "arith.constant", F32, value="0x0p+0"),
              op("m", "arith.constant", F32, value="-inf"), op("s", "arith.select", F32, "in0", "z", "m")], "s",
              lambda x: np.where(x, 0, -np.inf), out=F32),
    pointwise("i64_to_f32", "i64", [op("a", "arith.sitofp", F32, "in0")], "a", lambda x: x.astype(ROUND), out=F32),
    pointwise("i32_arithmetic", "i32", [op("a", "arith.muli", "i32", "in0", "in1"),
              op("b", "arith.maxsi", "i32", "a", "in0")], "b", lambda x, y: np.maximum(x * y, x)),
    pointwise("i8_to_f32", "i8", [op("a", "arith.sitofp", F32, "in0")], "a", lambda x: x.astype(ROUND), out=F32),
    pointwise("u8_to_f32", "ui8", [op("a", "arith.uitofp", F32, "in0")], "a", lambda x: x.astype(ROUND), out=F32),
    pointwise("f64_sum", "f64", [op("a", "arith.addf", "f64", "in0", "in1")], "a", lambda x, y: x + y),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([case.spec for case in CASES], isa)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_loop_matches_numpy(kernels: Any, case: Case) -> None:
    rng = np.random.default_rng(7)
    count = len(case.accesses) - len(case.yields)
    inputs = [case.memory(i, rng) for i in range(count)]
    blank = [np.zeros_like(case.memory(i, rng)) for i in range(count, len(case.accesses))]
    done = kernels.run_both(case.name, lambda: [*inputs, *(b.copy() for b in blank)], [v for _, v in case.symbols])
    want = case.reference(*(case.view(i, x) for i, x in enumerate(inputs)))
    for i, expected in enumerate(want if isinstance(want, tuple) else (want,), start=count):
        expectation = blank[i - count].copy()
        case.view(i, expectation)[...] = expected
        if case.exact:
            assert done[i].tobytes() == expectation.tobytes()
        else:
            np.testing.assert_allclose(done[i], expectation, rtol=2e-6, atol=case.absolute)


def test_pointwise_kernel_may_run_in_place(kernels: Any) -> None:
    x, y = (np.random.default_rng(i).normal(size=1003).astype(np.float32) for i in range(2))
    want = x + y
    kernels.run("add_1d", [x, y, x], threads=2)
    assert x.tobytes() == want.tobytes()


def test_long_loops_are_split_into_tasks(kernels: Any) -> None:
    """What makes the comparisons of one and two threads mean something."""
    x = np.ones(70001, np.float32)
    kernels.run("add_long", [x, x, x.copy()], threads=2)
    assert ctypes.c_int64.in_dll(kernels.library, "test_tasks").value > 4


def test_unknown_op_is_an_error_that_names_it() -> None:
    case = pointwise("strange", F32, [op("a", "math.tgamma", F32, "in0")], "a", None)
    with pytest.raises(KernelSelectionError, match=r"math\.tgamma"):
        emit_kernel(case.spec, "x86-64-v4")


def test_adjacent_loops_are_collapsed() -> None:
    """(b, s, 48) with strides (48 s, 48, 1) everywhere is one loop."""
    case = next(c for c in CASES if c.name == "add_symbolic")
    text = emit_kernel(case.spec, "x86-64-v4")
    assert "i0_end" in text
    assert "i1_end" not in text


def test_transposed_input_goes_through_tiles() -> None:
    case = next(c for c in CASES if c.name == "transpose_out")
    assert "vtranspose" in emit_kernel(case.spec, "x86-64-v4")
