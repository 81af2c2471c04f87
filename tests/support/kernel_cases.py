"""What tests of the CPU's and of CUDA's kernels need alike: stored weights, epilogues, and specs of small kernels."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.plan.dims import contiguous_strides
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
PLAIN = ("layout", "rows", "wide", "columns")
"""How a weight that is not packed lies: in the engine's layout, row-major, rows of three more elements, transposed."""
PORTABLE_ISAS: tuple[Any, ...] = (
    ("generic", pytest.param("x86-64", marks=pytest.mark.slow), "x86-64-v3")
    if platform.machine() == "x86_64"
    else ("generic",)
)
"""Instruction sets for kernels that have no wide form of their own; the narrow vectors wait for the full run."""


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal bits, any NaN for a NaN."""
    nan = np.isnan(a.astype(np.float64))
    return bool((nan == np.isnan(b.astype(np.float64))).all() and a[~nan].tobytes() == b[~nan].tobytes())


def row_major(name: str, dtype: DType, access: Any, *shape: Any, strides: tuple[Any, ...] | None = None) -> Operand:
    return Operand(
        name=name,
        dtype=dtype,
        access=access,
        shape=shape,
        strides=contiguous_strides(shape) if strides is None else strides,
    )


def aligned(data: Array) -> Array:
    """A copy of the bytes that starts at a multiple of 64, as weights do in an arena."""
    raw = data.reshape(-1).view(np.uint8)
    buffer = np.zeros(raw.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + raw.size] = raw
    return buffer[start : start + raw.size]


# --- weights ---------------------------------------------------------------------------------------------------------


def stored_weight(
    w: Array, kind: str | FormatRef, dtype: DType, layout: str, name: str = "w"
) -> tuple[Operand, Array, Array]:
    """(operand, what the kernel is given, the values that it multiplies with: of `dtype`, but packed ones on a CPU in
    fp32).

    `kind` is a format, which is packed into `layout`, or one of PLAIN. A plain weight in `layout` and a packed one are
    given as bytes; `wide` and `columns` as the array that holds all elements in order of memory.
    """
    n, k = w.shape
    if isinstance(kind, FormatRef):
        fmt = formats.get(kind.name, **kind.params)
        packed = fmt.encode(w)
        data = layouts.get(layout).pack(fmt, dtype, n, k, packed.data)
        operand = Operand(name=name, dtype=dtype, access="r", shape=(n, k), format=kind, layout=layout)
        values = fmt.decode(packed)
        return operand, data, values if layout.startswith("cpu") else values.astype(NUMPY_DTYPES[dtype])
    plain = w.astype(NUMPY_DTYPES[dtype])
    match kind:
        case "layout":
            data = layouts.get(layout).pack(None, dtype, n, k, plain.view(np.uint8).reshape(-1))
            strides = (k, 1) if layout == "canonical" else ()
            operand = Operand(name=name, dtype=dtype, access="r", shape=(n, k), strides=strides, layout=layout)
            return operand, data, plain
        case "rows":
            return row_major(name, dtype, "r", n, k), plain, plain
        case "wide":
            wide = np.zeros((n, k + 3), plain.dtype)
            wide[:, :k] = plain
            return row_major(name, dtype, "r", n, k, strides=(k + 3, 1)), wide, plain
        case "columns":
            return row_major(name, dtype, "r", n, k, strides=(1, n)), np.ascontiguousarray(plain.T), plain
        case _:
            raise AssertionError(kind)


# --- epilogues -------------------------------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return y


def constant(name: str, value: float) -> ScalarOp:
    return ScalarOp(result=name, op="arith.constant", dtype="f32", value=value.hex())


def op(result: str, name: str, *args: str, dtype: Any = "f32") -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args)


def program(inputs: Sequence[tuple[str, Any]], ops: Iterable[ScalarOp], out: str) -> ScalarProgram:
    """Yields `y`, rounded to `out`."""
    ends = [] if out == "f32" else [op("z", "arith.truncf", "y", dtype=out)]
    return ScalarProgram(inputs=tuple(inputs), ops=(*ops, *ends), yields=("y" if out == "f32" else "z",))


def gelu_program(out: str) -> ScalarProgram:
    ops = [
        constant("c", math.sqrt(0.5)), op("a", "arith.mulf", "acc", "c"), op("e", "math.erf", "a"),
        constant("one", 1.0), op("p", "arith.addf", "e", "one"), constant("half", 0.5),
        op("h", "arith.mulf", "acc", "half"), op("y", "arith.mulf", "h", "p"),
    ]  # fmt: skip
    return program([("acc", "f32")], ops, out)


def residual_program(out: str) -> ScalarProgram:
    """acc + r * s, where r is a full matrix and s broadcasts along a dim."""
    wide = [] if out == "f32" else [op("rf", "arith.extf", "r"), op("sf", "arith.extf", "s")]
    r, s = ("r", "s") if out == "f32" else ("rf", "sf")
    ops = [*wide, op("p", "arith.mulf", r, s), op("y", "arith.addf", "acc", "p")]
    return program([("acc", "f32"), ("r", out), ("s", out)], ops, out)


# --- lookups ---------------------------------------------------------------------------------------------------------

ROWS = 37
TABLES: dict[str, tuple[str | FormatRef, int]] = {
    "plain": ("layout", 53),
    "nf4": (FormatRef(name="nf4", params={"block": 64}), 128),
    "nf4_flat": (FormatRef(name="nf4", params={"block": 64}), 83),
    "nf4_flat_even": (FormatRef(name="nf4", params={"block": 256}), 50),
    "int8": (FormatRef(name="int8", params={}), 45),
    "int4": (FormatRef(name="int4", params={"group": 32}), 96),
    "int4_zeros": (FormatRef(name="int4", params={"group": 32, "symmetric": False}), 64),
}
"""Tables of embeddings: the format, or "layout" for a plain one, and the columns."""


def table(kind: str, dtype: DType, layout: str) -> tuple[Operand, Array, Array]:
    """(operand, its bytes, values of `dtype`) of one of TABLES, with ROWS rows."""
    how, cols = TABLES[kind]
    w = np.random.default_rng(3).standard_normal((ROWS, cols)).astype(np.float32)
    return stored_weight(w, how, dtype, layout, "table")


def embedding(name: str, table: Operand, ids: DType = "i64", unused: tuple[str, ...] = ()) -> KernelSpec:
    """Of b*s ids; the rows of the result are one element apart."""
    rows, cols = (int(d) for d in table.shape)
    operands = (
        row_major("ids", ids, "r", "b*s"),
        table,
        row_major("out", table.dtype, "w", "b*s", cols, strides=(cols + 1, 1)),
    )
    body = EmbeddingKernel(count="b*s", rows=rows, cols=cols)
    return KernelSpec(name=name, symbols=("b", "s", *unused), operands=operands, body=body, serves="embeddings")


O, L, C, I = 3, 11, 7, 29  # outer, length, count, inner  # noqa: E741


def gather(name: str, mode: str, dtype: DType, index_dtype: DType = "i64") -> KernelSpec:
    """Of x (O, L, I) along L: C places for all ("take"), or for each element ("along")."""
    index = row_major("index", index_dtype, "r", *((C,) if mode == "take" else (O, C, I)))
    operands = (row_major("x", dtype, "r", O, L, I), index, row_major("out", dtype, "w", O, C, I))
    body = GatherKernel(mode=mode, outer=O, length=L, count=C, inner=I)  # type: ignore[arg-type]
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)
