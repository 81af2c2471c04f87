"""A kernel of four parts, of different sizes and types, and what it writes: for both targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.parts import Part, PartsKernel

LENGTH = 9


def operand(name: str, shape: Sequence[Dim], access: Any = "r", dtype: Any = "f32", strides: Any = None) -> Operand:
    steps = contiguous_strides(tuple(shape)) if strides is None else strides
    return Operand(name=name, dtype=dtype, access=access, shape=tuple(shape), strides=steps)


def loop(extents: Sequence[Dim], read: Sequence[Dim], written: Sequence[Dim], op: str = "", dtype: Any = "f32") -> Any:
    """The op applied to the one input; without one, a copy."""
    args = ("a", "a") if op == "arith.addf" else ("a",)
    ops = (ScalarOp(result="r", op=op, dtype=dtype, args=args),) if op else ()
    return LoopKernel(
        extents=tuple(extents),
        iterators=("parallel",) * len(extents),
        accesses=tuple(AffineAccess(offset=0, coefficients=tuple(each)) for each in (read, written)),
        body=ScalarProgram(inputs=(("a", dtype), ("b", dtype)), ops=ops, yields=("r" if op else "a",)),
    )


def case(index: Any = "i64") -> KernelSpec:
    """b = a + a (n rows); the row of x = -c; the row of z = d, read across; e = exp(f), one element."""
    operands = (
        operand("a", ("n", 24)), operand("c", (3, 40)), operand("d", (5, 7), dtype="bf16", strides=(1, 5)),
        operand("f", (1,)), operand("at", (1,), dtype=index), operand("b", ("n", 24), "w"),
        operand("x", (3, LENGTH, 40), "rw"), operand("z", (5, LENGTH, 7), "rw", "bf16"), operand("e", (1,), "w"),
    )  # fmt: skip
    parts = (
        Part(operands=(0, 5), loop=loop(("n", 24), (24, 1), (24, 1), "arith.addf")),
        Part(operands=(1, 6), loop=loop((3, 40), (40, 1), (LENGTH * 40, 1), "arith.negf"), index=4),
        Part(operands=(2, 7), loop=loop((5, 7), (1, 5), (LENGTH * 7, 1), dtype="bf16"), index=4),
        Part(operands=(3, 8), loop=loop((1,), (1,), (1,), "math.exp")),
    )
    return KernelSpec(name="parts", symbols=("n",), operands=operands, body=PartsKernel(parts=parts))


def arrays(rows: int, at: int, index: Any = np.int64) -> list[np.ndarray]:
    """Values for the operands, the written ones included; d is given as it lies."""
    rng = np.random.default_rng(rows)
    shapes = ((rows, 24), (3, 40), (7, 5), (1,), (1,), (rows, 24), (3, LENGTH, 40), (5, LENGTH, 7), (1,))
    found = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    found[2], found[7] = (found[n].astype(ml_dtypes.bfloat16) for n in (2, 7))
    found[4] = np.array([at], index)
    return found


def expected(given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the written operands become where the row number is in range."""
    a, c, d, f, at, _, x, z, _ = (each.copy() for each in given)
    x[:, int(at[0])], z[:, int(at[0])] = -c, d.T
    return [a + a, x, z, np.exp(f)]
