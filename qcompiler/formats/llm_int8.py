"""LLM.int8 (Dettmers et al. 2022): int8 weights with the absmax of each row, and the product with outliers.

NumPy code defines the product here, with shapes that do not depend on data, so it can be captured in a CUDA graph.
bitsandbytes takes the columns of x that hold an outlier out of the matrix, so their number becomes a shape, which the
host reads.  Here those columns stay: they are zeros in the int8 product, and a second, masked product reads them alone:

    mask    = any over rows of |x| >= threshold                            (K,) booleans, on the device
    qx, ax  = rint(x * (127 / ax)), ax = max |x| of a row without outliers; qx is 0 in the mask's columns
    y       = int32(qx @ codes.T) * (ax * absmax) * fp32(1 / 127²) + bias
    y      += (x where mask else 0) @ decode(w).T

Every step is elementwise, a reduction along a row or a column, or a product of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatValueError
from qcompiler.formats.base import Declaration, Encoding, Field, Format, Numerics, PackedTensor, refuse_nonfinite
from qcompiler.formats.equation import Equation, Float32

DECODE_SCALE = 7.874015718698502e-3
"""fp32 1 / 127."""

OUTPUT_SCALE = np.float32(1 / 127**2)
"""6.2000124e-05, as in bitsandbytes' CUDA kernel; its CPU path has 6.200124e-05, relatively larger by 1.8e-5."""

LARGEST_ABSMAX = np.float32(np.finfo(np.float32).max / np.float32(127))
"""Above this, ``127 * absmax``, the decoder's first product, may be infinite."""

SMALLEST_ABSMAX = np.float32(3.8e-37)
"""Below this, ``127 / absmax`` is infinite in fp32."""


class LLMInt8(Format):
    """Codes and absmax are bit for bit those of bitsandbytes 0.50's `int8_vectorwise_quant` on CPU, row by row."""

    name: ClassVar[str] = "llm_int8"

    def declare(self) -> Declaration:
        return Declaration(
            summary="signed 8-bit codes, one fp32 absmax per row (LLM.int8)",
            block="row",
            blocking="row",
            tail="short",
            fields=(Field("codes", "int", 8), Field("absmax", "f32", 32, covers="row")),
            decode=Equation(f"codes * absmax * {DECODE_SCALE!r}"),
            numerics=Numerics(
                ties="to even: code = rint(w * (127 / absmax))",
                zero_block="codes 0, absmax 0 (bitsandbytes converts NaN to an integer, which gives 0 on x86)",
                scale_clamp="none; an absmax beyond fp32's maximum / 127 is an error. Codes lie within ±127",
                zero_point="none (symmetric)",
                reciprocal="multiplies by fp32 127 / absmax; rows with an absmax below 3.8e-37, where that is "
                "infinite, take rint(w / absmax * 127)",
            ),
            reference="bitsandbytes 0.50, int8_vectorwise_quant and int8_vectorwise_dequant on CPU",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        cols = job.packed.cols
        rows, first = tile.reshape(-1, cols), start // cols
        absmax = np.abs(np.maximum(rows.max(axis=1), -rows.min(axis=1)))  # +0 for a row of zeros
        if not np.isfinite(absmax).all():
            refuse_nonfinite(self, job.weights, tile, start)
        if (absmax > LARGEST_ABSMAX).any():
            row = int(np.argmax(absmax > LARGEST_ABSMAX))
            raise FormatValueError(
                f"row {first + row}: its largest weight is {absmax[row]:g}, and {self} decodes at most "
                f"{LARGEST_ABSMAX:g} without overflow; int8 and nf4 take any fp32 weight"
            )
        small = absmax < SMALLEST_ABSMAX
        inverse = np.divide(np.float32(127), absmax, out=np.zeros_like(absmax), where=~small)
        codes = rows * inverse[:, None]
        if small.any():
            divisor = np.maximum(absmax[small], np.finfo(np.float32).smallest_subnormal)
            codes[small] = rows[small] / divisor[:, None] * np.float32(127)
        np.rint(codes, out=codes)
        job.packed.section("codes")[first : first + len(rows)] = codes.astype(np.int8)
        job.packed.section("absmax")[first : first + len(rows), 0] = absmax


# --- the product -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantisedRows:
    """Activations (M, K) in int8: `codes` int8 (M, K), `absmax` fp32 (M, 1), `outliers` bool (K,)."""

    codes: npt.NDArray[np.int8]
    absmax: Float32
    outliers: npt.NDArray[np.bool_]


def quantise_rows(x: Float32, threshold: float) -> QuantisedRows:
    """Activations fp32 (M, K) in int8, without the columns that hold a value of magnitude >= `threshold` (> 0).

    The bits are those of bitsandbytes 0.50's `int8_vectorwise_quant(x, threshold)` on CPU: a row's absmax is over its
    values below the threshold, including those in columns that are left out.  Rows whose absmax is below 3.8e-37 count
    as 0.
    """
    outlier = np.abs(x) >= np.float32(threshold)
    columns: npt.NDArray[np.bool_] = np.logical_or.reduce(outlier, axis=0)
    kept = np.where(outlier, np.float32(0), x)
    absmax = np.abs(kept).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(absmax < SMALLEST_ABSMAX, np.float32(0), np.float32(127) / absmax)
    codes = np.where(columns, np.float32(0), np.rint(kept * inverse))
    return QuantisedRows(codes.astype(np.int8), absmax, columns)


def scale_output(
    sums: npt.NDArray[np.int32], x_absmax: Float32, w_absmax: Float32, scale: np.float32 = OUTPUT_SCALE
) -> Float32:
    """``sums * (x_absmax * w_absmax) * scale``: int32 (M, N), fp32 (M, 1), fp32 (N,), in bitsandbytes' CPU order."""
    scaled: Float32 = sums.astype(np.float32) * (x_absmax * w_absmax.reshape(1, -1)) * scale
    return scaled


def linear(x: Float32, weight: PackedTensor, *, threshold: float = 6.0, bias: Float32 | None = None) -> Float32:
    """``x @ decode(weight).T + bias`` as LLM.int8 computes it: fp32 (M, K) by (N, K) gives fp32 (M, N).

    It differs from bitsandbytes' CPU path only by `OUTPUT_SCALE` (and by the order of sums in the outliers' product),
    and from its layer `Linear8bitLt` also in that x is not first rounded to fp16.
    """
    rows = quantise_rows(x, threshold)
    sums = rows.codes.astype(np.int32) @ weight.section("codes").astype(np.int32).T
    y = scale_output(sums, rows.absmax, weight.section("absmax"))
    if bias is not None:
        y += bias
    alone: Float32 = np.where(rows.outliers, x, np.float32(0))
    y += alone @ weight.format.decode(weight).T
    return y
