"""Keys and values of a cache in 8 or 4 bits: every row, one head of one token, is one run of bytes.

    kind         codes                                    scales
    int8, fp8    one byte for each of K columns, then     fp32, one for the row
                 zeros up to a multiple of 4
    int4         half a byte for each column, the first   a step and a least number in bf16 for each 32 columns
                 in the low bits; 16 bytes for each 32

and then zeros up to a multiple of 16 bytes.  The scales are in the row itself, so that a cache is a state like any
other: rows are written in place, copied and moved as the rows of a matrix of int8 with `row_bytes(K, kind)` columns.

    bytes of a head    64    128
    fp16              128    256
    int8, fp8          80    144
    int4               48     80

    kind   scale                                 code                                              value
    int8   max|x| / 127, or 1 where that is 0    an integer: x / scale, rounded to even            code * scale
    fp8    max|x| / 448, or 1 where that is 0    a float of 8 bits, e4m3 (OCP 8-bit floating       code * scale
                                                 point, 2023): x / scale, rounded to even
    int4   least: min x, rounded down;           an integer of 0 to 15: (x - least) / step,        code * step + least
           step: (max x - least) / 15,           rounded to even, or 0 where step is 0
           rounded up

int8 and fp8 have one scale for each row, because attention multiplies one number for each key anyway: the scale of a
key multiplies its score, the scale of a value its weight.  Four bits are too few for that (docs/language-models.md has
the figures); their steps belong to 32 columns.  A scale for several positions would have to be known before the first
of them is written.

A row of int8 or fp8 with a NaN or an infinity has codes 0 and the scale NaN.  Of a row of int4, the 32 columns around
such a number have codes 0, the step 0 and a NaN as their least number; numbers beyond 1e38 count as 1e38.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError

Kind = Literal["int8", "fp8", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MOST: dict[str, float] = {"int8": 127.0, "fp8": 448.0}
"""The largest code of the kinds that have a scale for each row."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
ALIGNMENT = 16

GROUP = 32
"""Columns of int4 that share a step."""
LEVELS = 15
LARGEST = 1e38

Rows = npt.NDArray[np.int8]
Float32 = npt.NDArray[np.float32]


def kind_of(text: str) -> Kind:
    """The kind of that name. ArgumentError if there is none."""
    for kind in KINDS:
        if kind == text:
            return kind
    raise ArgumentError(f"a cache has rows of {', '.join(KINDS)}, not of {text!r}")


def groups_of(cols: int) -> int:
    """Groups of columns in a row of int4."""
    return -(-cols // GROUP)


def scale_at(cols: int, kind: Kind) -> int:
    """Where a row of `cols` columns has its scales, in bytes."""
    return groups_of(cols) * GROUP // 2 if kind == "int4" else -(-cols // 4) * 4


def row_bytes(cols: int, kind: Kind) -> int:
    """Bytes of a row of `cols` columns."""
    scales = 4 * groups_of(cols) if kind == "int4" else 4
    return -(-(scale_at(cols, kind) + scales) // ALIGNMENT) * ALIGNMENT


def quantise(x: npt.NDArray[Any], kind: Kind) -> Rows:
    """Rows (…, row_bytes(K, kind)) of x (…, K), computed in fp32."""
    x = x.astype(np.float32)
    return _quantise_groups(x) if kind == "int4" else _quantise_bytes(x, kind)


def steps_of(rows: Rows, cols: int, kind: Kind) -> Float32:
    """The distance from each value to its neighbours, the larger one: fp32 (…, 1 or cols).

    For int4 it is a sixteenth more: a number that moves by a rounding may take its least number to the next bf16, and
    with it the step.
    """
    if kind == "int4":
        steps, _ = _group_scales(rows, cols)
        return _in_columns(steps, cols) * np.float32(1 + 1 / 16)
    scales = _row_scales(rows, cols, kind)
    if kind == "int8":
        return scales
    size = np.maximum(np.abs(_bytes(rows, cols, kind)), np.float32(2**-6))  # below, neighbours are 2^-9 apart
    _, exponent = np.frexp(np.nan_to_num(size, nan=MOST[kind]))
    found: Float32 = np.ldexp(np.float32(1), exponent - 4) * scales
    return found


def dequantise(rows: Rows, cols: int, kind: Kind) -> Float32:
    """What the rows mean, fp32 (…, cols)."""
    if kind != "int4":
        return _bytes(rows, cols, kind) * _row_scales(rows, cols, kind)
    pairs = rows[..., : scale_at(cols, kind)].view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*rows.shape[:-1], -1)[..., :cols]
    steps, least = (_in_columns(each, cols) for each in _group_scales(rows, cols))
    return codes.astype(np.float32) * steps + least


# --- a scale for each row --------------------------------------------------------------------------------------------


def _quantise_bytes(x: Float32, kind: Kind) -> Rows:
    most = np.float32(MOST[kind])
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    finite = np.isfinite(largest)
    with np.errstate(invalid="ignore"):
        exact = largest / most
        scale = np.where(exact > 0, exact, np.float32(1))
        parts = np.where(finite, np.clip(x / scale, -most, most), np.float32(0))
    codes = np.rint(parts).astype(np.int8) if kind == "int8" else parts.astype(E4M3).view(np.int8)
    cols = x.shape[-1]
    rows = np.zeros((*x.shape[:-1], row_bytes(cols, kind)), np.int8)
    rows[..., :cols] = codes
    at = scale_at(cols, kind)
    rows[..., at : at + 4] = np.where(finite, scale, np.float32(np.nan)).astype("<f4").view(np.int8)
    return rows


def _row_scales(rows: Rows, cols: int, kind: Kind) -> Float32:
    """(…, 1)."""
    at = scale_at(cols, kind)
    scales: Float32 = np.ascontiguousarray(rows[..., at : at + 4]).view("<f4")
    return scales


def _bytes(rows: Rows, cols: int, kind: Kind) -> Float32:
    codes = np.ascontiguousarray(rows[..., :cols])
    return (codes if kind == "int8" else codes.view(E4M3)).astype(np.float32)


# --- steps of groups -------------------------------------------------------------------------------------------------


def _quantise_groups(x: Float32) -> Rows:
    cols, groups = x.shape[-1], groups_of(x.shape[-1])
    short = groups * GROUP - cols
    numbers = np.clip(x, -np.float32(LARGEST), np.float32(LARGEST))
    ends = [(0, 0)] * (x.ndim - 1)
    padded = np.pad(numbers, [*ends, (0, short)], mode="edge")  # which changes neither end of the last group
    shape = (*x.shape[:-1], groups, GROUP)
    padded = padded.reshape(shape)
    finite = np.isfinite(np.pad(x, [*ends, (0, short)]).reshape(shape)).all(axis=-1)
    least = _bf16_down(padded.min(axis=-1) + np.float32(0))  # -0 becomes 0
    step = (padded.max(axis=-1) - least) / np.float32(LEVELS)
    step = _bf16_up(np.where(step > 0, step, np.float32(0)))
    step, least = np.where(finite, step, np.float32(0)), np.where(finite, least, np.float32(np.nan))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        codes = np.rint(np.minimum((padded - least[..., None]) / step[..., None], np.float32(LEVELS)))
    codes = np.where((step > 0)[..., None], codes, np.float32(0)).astype(np.uint8).reshape(*x.shape[:-1], -1)
    codes[..., cols:] = 0
    rows = np.zeros((*x.shape[:-1], row_bytes(cols, "int4")), np.int8)
    at = scale_at(cols, "int4")
    rows[..., :at] = (codes[..., 0::2] | codes[..., 1::2] << 4).view(np.int8)
    scales = np.stack([step, least], axis=-1).astype(BF16)
    rows[..., at : at + 4 * groups] = scales.reshape(*x.shape[:-1], 2 * groups).view(np.int8)
    return rows


def _group_scales(rows: Rows, cols: int) -> tuple[Float32, Float32]:
    """The steps and the least numbers, (…, groups)."""
    at = scale_at(cols, "int4")
    scales = np.ascontiguousarray(rows[..., at : at + 4 * groups_of(cols)]).view(BF16).astype(np.float32)
    return scales[..., 0::2], scales[..., 1::2]


def _in_columns(each: Float32, cols: int) -> Float32:
    return np.repeat(each, GROUP, axis=-1)[..., :cols]


def _bf16_down(x: Float32) -> Float32:
    """The largest bf16 that is not above x."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    found: Float32 = ((bits + np.where(x < 0, 0xFFFF, 0).astype(np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)
    return found


def _bf16_up(x: Float32) -> Float32:
    """The smallest bf16 that is not below x, which is not negative."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    found: Float32 = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return found
