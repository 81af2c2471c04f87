"""Keys and values of a cache in 8 bits: every row, one head of one token, is one run of bytes.

    codes   one byte for each of K columns, then zeros up to a multiple of 4
    scale   fp32, then zeros up to a multiple of 16 bytes

A row's value is code * scale.  The scale is in the row itself, so that a cache is a state like any other: rows are
written in place, copied and moved as the rows of a matrix of int8 with `row_bytes(K)` columns.  A head of 128 takes 144
bytes (256 in fp16), one of 64 takes 80 (128).

    kind   scale                                 code
    int8   max|x| / 127, or 1 where that is 0    an integer: x / scale, rounded to even
    fp8    max|x| / 448, or 1 where that is 0    a float of 8 bits, e4m3 (OCP 8-bit floating point, 2023): x / scale,
                                                 rounded to even, at most 448

Each row has its own scale, because attention multiplies one number for each key anyway: the scale of a key multiplies
its score, the scale of a value its weight.  A scale for several positions would have to be known before the first of
them is written.

A row with a NaN or an infinity has codes 0 and the scale NaN.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError

Kind = Literal["int8", "fp8"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MOST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
"""The largest code."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ALIGNMENT = 16

Rows = npt.NDArray[np.int8]
Float32 = npt.NDArray[np.float32]


def kind_of(text: str) -> Kind:
    """The kind of that name. ArgumentError if there is none."""
    for kind in KINDS:
        if kind == text:
            return kind
    raise ArgumentError(f"a cache has rows of {', '.join(KINDS)}, not of {text!r}")


def scale_at(cols: int) -> int:
    """Where a row of `cols` columns has its scale, in bytes."""
    return -(-cols // 4) * 4


def row_bytes(cols: int) -> int:
    """Bytes of a row of `cols` columns."""
    return -(-(scale_at(cols) + 4) // ALIGNMENT) * ALIGNMENT


def quantise(x: npt.NDArray[Any], kind: Kind) -> Rows:
    """Rows (…, row_bytes(K)) of x (…, K), computed in fp32."""
    x, most = x.astype(np.float32), np.float32(MOST[kind])
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    finite = np.isfinite(largest)
    with np.errstate(invalid="ignore"):
        exact = largest / most
        scale = np.where(exact > 0, exact, np.float32(1))
        parts = np.where(finite, np.clip(x / scale, -most, most), np.float32(0))
    codes = np.rint(parts).astype(np.int8) if kind == "int8" else parts.astype(E4M3).view(np.int8)
    cols = x.shape[-1]
    rows = np.zeros((*x.shape[:-1], row_bytes(cols)), np.int8)
    rows[..., :cols] = codes
    at = scale_at(cols)
    rows[..., at : at + 4] = np.where(finite, scale, np.float32(np.nan)).astype("<f4").view(np.int8)
    return rows


def scales_of(rows: Rows, cols: int) -> Float32:
    """The scales (…, 1)."""
    at = scale_at(cols)
    scales: Float32 = np.ascontiguousarray(rows[..., at : at + 4]).view("<f4")
    return scales


def steps_of(rows: Rows, cols: int, kind: Kind) -> Float32:
    """The distance from each code to its neighbours, the larger one, times the scale: fp32 (…, 1 or cols)."""
    scales = scales_of(rows, cols)
    if kind == "int8":
        return scales
    size = np.maximum(np.abs(_codes(rows, cols, kind)), np.float32(2**-6))  # below, neighbours are 2^-9 apart
    _, exponent = np.frexp(np.nan_to_num(size, nan=MOST[kind]))
    steps: Float32 = np.ldexp(np.float32(1), exponent - 4) * scales
    return steps


def dequantise(rows: Rows, cols: int, kind: Kind) -> Float32:
    """code * scale, fp32 (…, cols)."""
    return _codes(rows, cols, kind) * scales_of(rows, cols)


def _codes(rows: Rows, cols: int, kind: Kind) -> Float32:
    codes = np.ascontiguousarray(rows[..., :cols])
    return (codes if kind == "int8" else codes.view(E4M3)).astype(np.float32)
