"""Rows of keys and values, and specs of the kernels that make and read the rows of a cache."""

from __future__ import annotations

import numpy as np

from qcompiler.formats import cache_rows
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel
from qcompiler.plan.weights import NUMPY_DTYPES

COLUMNS = (1, 4, 27, 64, 128, 200)
TYPES: tuple[DType, ...] = ("f32", "bf16", "f16")
HEADS, TOKENS = 3, 5


def maker(cols: int, dtype: DType, kind: cache_rows.Kind) -> KernelSpec:
    """Heads lie within tokens, as a linear writes them; the rows lie head by head."""
    x = Operand(
        name="x", dtype=dtype, access="r", shape=(1, HEADS, "t", cols), strides=(0, cols, HEADS * cols, 1)
    )  # fmt: skip
    width = cache_rows.row_bytes(cols, kind)
    out = Operand(
        name="out", dtype="i8", access="w", shape=(1, HEADS, "t", width), strides=(0, f"t*{width}", width, 1)
    )  # fmt: skip
    body = QuantizeCacheKernel(outer=1, middle=HEADS, inner="t", cols=cols, kind=kind)
    return KernelSpec(name=f"make_{kind}_{cols}_{dtype}", symbols=("t",), operands=(x, out), body=body)


def reader(cols: int, dtype: DType, kind: cache_rows.Kind) -> KernelSpec:
    """The other way round."""
    width = cache_rows.row_bytes(cols, kind)
    rows = Operand(
        name="rows", dtype="i8", access="r", shape=(1, HEADS, "t", width), strides=(0, f"t*{width}", width, 1)
    )  # fmt: skip
    out = Operand(
        name="out", dtype=dtype, access="w", shape=(1, HEADS, "t", cols), strides=(0, cols, HEADS * cols, 1)
    )  # fmt: skip
    body = DequantizeCacheKernel(outer=1, middle=HEADS, inner="t", cols=cols, kind=kind)
    return KernelSpec(name=f"read_{kind}_{cols}_{dtype}", symbols=("t",), operands=(rows, out), body=body)


SPECS = [
    make(cols, dtype, kind)
    for make in (maker, reader) for cols in COLUMNS for dtype in TYPES for kind in cache_rows.KINDS
]  # fmt: skip


def numbers(cols: int, dtype: DType) -> np.ndarray:
    """(tokens, heads, columns): usual rows, zeros, tiny and huge numbers, half codes, a NaN and an infinity."""
    x = np.random.default_rng(cols).normal(size=(TOKENS, HEADS, cols)) * 3
    x[0, 1] = 0
    x[1, 0] *= 1e-40 if dtype != "f16" else 1e-8
    x[1, 1] *= 1e37 if dtype != "f16" else 1e4
    x[2, 0] = (np.arange(cols) % 255 - 127) / 2  # the largest is 63.5: codes end in .0
    x[2, 1] = np.arange(cols) % 127 + 0.5
    x[2, 1, 0] = 127
    x[4, 0] = np.exp2(np.arange(cols) % 20 - 10) * (
        1.0625 + np.arange(cols) % 3 / 16
    )  # between codes of fp8, and below
    x[4, 0, 0] = -448
    x[3, 0, cols // 2] = np.nan
    x[3, 1, cols - 1] = -np.inf
    with np.errstate(over="ignore"):
        return x.astype(NUMPY_DTYPES[dtype])
