"""Activations in int8: every row is one run of bytes, its codes followed by the data that kernels need.

    codes   int8, K of them, then zeros up to a multiple of 64
    scale   fp32, then 12 zero bytes
    sums    int16, of the codes of each 32 columns, then zeros up to a multiple of 16 bytes

A row's value is code * scale.  All data of a row is in the row itself.  So rows are cut, copied and moved like the rows
of any matrix, here one of int8 with `row_bytes(K)` columns, whose number of rows may be symbolic.

How codes are made (`quantise`), in fp32, codes rounded to even and clipped to +-127:

    "token"     scale = max|x| / 127, or 1 where that is 0; code = x / scale: the codes of the format int8
    "tensor"    scale = fp32(clip / 127), code = x * fp32(127 / clip), with the clip from calibration
    "outliers"  scale = max|x| / 127 over values below the threshold; code = x * (127 / max|x|), and 0 in `columns`,
                which another product computes: LLM.int8 (formats/llm_int8.py)
    "image"     as "token", with the largest magnitude of all rows of an image in place of the row's own

The rows of an image (B, …, C) are its pixels, so that a convolution reads them in any window: `windows` puts the codes
of a window's taps into one row, which has the scale of its image. Taps outside of the image have codes 0.

A row with a NaN (or an infinity that is no outlier) has codes 0 and the scale NaN, so products with it are NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32
from qcompiler.formats.llm_int8 import SMALLEST_ABSMAX

RUN = 32
"""Columns in one of the sums."""

ALIGNMENT = 64
CODE = np.float32(127)
Kind = Literal["token", "tensor", "outliers", "image"]
KINDS: tuple[Kind, ...] = ("token", "tensor", "outliers", "image")

Int8 = npt.NDArray[np.int8]


def padded(cols: int) -> int:
    """Codes of a row with the padding zeros; the scale follows them."""
    return -(-cols // ALIGNMENT) * ALIGNMENT


def row_bytes(cols: int) -> int:
    """Bytes of a row of `cols` columns."""
    return padded(cols) + 16 + -(-padded(cols) // RUN * 2 // 16) * 16


def clip_factors(clip: float) -> tuple[np.float32, np.float32]:
    """(factor for x, scale) of kind "tensor": zeros if calibration saw only 0."""
    return np.float32(127 / clip if clip else 0.0), np.float32(clip / 127)


def quantise(
    x: npt.NDArray[Any],
    kind: Kind,
    value: float,
    columns: npt.NDArray[np.bool_] | None,
    of_images: Float32 | None = None,
) -> Int8:
    """Rows of int8 (…, row_bytes(K)) of x (…, K). `value` is the clip or the threshold; `columns` (…, K) are bools
    that broadcast, for kind "outliers". `of_images` (B,) are the largest magnitudes of x (B, …, K), for kind "image":
    NaN where an image has one."""
    x = x.astype(np.float32)
    magnitude = np.abs(x)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if kind == "outliers":
            outlier = magnitude >= np.float32(value)
            x, magnitude = np.where(outlier, np.float32(0), x), np.where(outlier, np.float32(0), magnitude)
        largest = magnitude.max(axis=-1, keepdims=True, initial=0)
        if kind == "image":
            assert of_images is not None
            largest = np.broadcast_to(of_images.reshape(-1, *[1] * (x.ndim - 1)), largest.shape)
        if kind in ("token", "image"):
            exact = largest / CODE
            scale = np.where(exact > 0, exact, np.float32(1))
            codes = x / scale
        elif kind == "tensor":
            factor, fixed = clip_factors(value)
            scale = np.full_like(largest, fixed)
            codes = x * factor
        else:
            scale = largest / CODE
            codes = x * np.where(largest < SMALLEST_ABSMAX, np.float32(0), CODE / largest)
            assert columns is not None
            codes = np.where(columns, np.float32(0), codes)
        finite = np.isfinite(largest)
        scale = np.where(finite, scale, np.float32(np.nan))
        codes = np.where(finite, np.clip(np.rint(codes), -CODE, CODE), np.float32(0))
    return _rows(codes.astype(np.int8), scale)


def _rows(codes: Int8, scale: Float32) -> Int8:
    cols = codes.shape[-1]
    end = padded(cols)
    rows = np.zeros((*codes.shape[:-1], row_bytes(cols)), np.int8)
    rows[..., :cols] = codes
    rows[..., end : end + 4] = scale.astype("<f4").view(np.int8)
    runs = rows[..., :end].reshape(*codes.shape[:-1], -1, RUN).sum(axis=-1, dtype=np.int16)
    rows[..., end + 16 : end + 16 + 2 * runs.shape[-1]] = np.ascontiguousarray(runs.astype("<i2")).view(np.int8)
    return rows


def windows(
    rows: Int8,
    cols: int,
    *,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
) -> Int8:
    """im2col: rows (B, H', W', row_bytes(kh * kw * C)) of the windows of images (B, H, W, row_bytes(C)) of C columns.

    `padding` is [top, left, bottom, right]. The scale of a window is that of the first pixel of its image.
    """
    (kh, kw), (sh, sw), (dh, dw), (top, left, bottom, right) = kernel, strides, dilation, padding
    image = np.pad(codes_of(rows, cols), ((0, 0), (top, bottom), (left, right), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(image, (dh * (kh - 1) + 1, dw * (kw - 1) + 1), axis=(1, 2))
    seen = seen[:, ::sh, ::sw, :, ::dh, ::dw].transpose(0, 1, 2, 4, 5, 3)  # (B, H', W', kh, kw, C)
    codes = seen.reshape(*seen.shape[:3], -1)
    scale = scales_of(rows, cols)[:, :1, :1, None]
    return _rows(codes, np.broadcast_to(scale, (*codes.shape[:-1], 1)))


def codes_of(rows: Int8, cols: int) -> Int8:
    """The codes (…, cols)."""
    return rows[..., :cols]


def scales_of(rows: Int8, cols: int) -> Float32:
    """The scales (…)."""
    end = padded(cols)
    return np.ascontiguousarray(rows[..., end : end + 4]).view("<f4")[..., 0]


def dequantise(rows: Int8, cols: int) -> Float32:
    """code * scale, fp32 (…, cols)."""
    return codes_of(rows, cols).astype(np.float32) * scales_of(rows, cols)[..., None]
