"""Common parts of the formats with small floats: saturating casts, and powers of two as scales (E8M0).

    type     exponent  mantissa  largest  smallest normal  step below it
    e2m1     2         1         6        1                0.5
    e4m3     4         3         448      2^-6             2^-9           no infinity, NaN 0x7f
    e5m2     5         2         57344    2^-14            2^-16          infinity 0x7c, NaN 0x7d…0x7f

Sources: OCP 8-bit Floating Point Specification 1.0, OCP Microscaling Formats Specification 1.0 (sections 5 and 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Encoding
from qcompiler.formats.equation import Float32

FLOAT32_MAX = np.finfo(np.float32).max
E8M0_BIAS = 127


@dataclass(frozen=True)
class MiniFloat:
    """A small float type: its largest value, the exponent of that value, its mantissa's bits, its NumPy dtype."""

    name: str
    largest: float
    exponent: int
    mantissa: int
    dtype: np.dtype[Any]

    def saturate(self, values: Float32) -> npt.NDArray[Any]:
        """Casts to the nearest value, ties to even; values beyond the largest become the largest. NaN is not allowed.

        `values` is overwritten.  The clip comes first, since casts treat large numbers differently: to e4m3, ml_dtypes
        gives NaN and torch (since 2.12) the largest value; to e5m2 both give infinity.
        """
        np.clip(values, -self.largest, self.largest, out=values)
        return values.astype(self.dtype)

    @property
    def largest_scale(self) -> np.float32:
        """One step below fp32's maximum / largest, so that the largest value never decodes to infinity."""
        return np.float32(np.nextafter(FLOAT32_MAX / np.float32(self.largest), np.float32(0)))


E2M1 = MiniFloat("e2m1", 6.0, 2, 1, np.dtype(ml_dtypes.float4_e2m1fn))
E4M3 = MiniFloat("e4m3", 448.0, 8, 3, np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = MiniFloat("e5m2", 57344.0, 15, 2, np.dtype(ml_dtypes.float8_e5m2))

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code of e2m1: bit 3 is the sign."""

EXPONENT_RULES = ("floor", "ceil", "even", "rceil")


def absmax(rows: Float32, axis: int | None = None) -> Float32:
    """The largest magnitude along an axis, never -0.0; NaN and infinity are kept."""
    # Two reductions have half the traffic of max(abs(rows)). Adding 0 turns the -0.0 of a zero block into 0.0, whose
    # bits the exponent rules read.
    largest: Float32 = np.maximum(rows.max(axis=axis), -rows.min(axis=axis)) + np.float32(0)
    return largest


def e8m0_codes(largest: Float32, element: MiniFloat, rule: str) -> npt.NDArray[np.uint8]:
    """The stored exponents (E8M0) of blocks with these absolute maxima (finite, fp32, not -0.0).

    With e = floor(log2(absmax)) and emax the exponent of the element type's largest value, the scale is

        floor   2^(e - emax): the rule of OCP MX 1.0, section 6.3.  Maxima above `largest` * scale saturate
        ceil    2^(ceil(log2(absmax)) - emax)
        even    floor, after adding half a step of the element's mantissa to absmax (AMD Quark, compressed-tensors)
        rceil   2^ceil(log2(absmax / largest)): the smallest without saturation (NVIDIA's cvt.rp.ue8m0)

    The exponent is clamped to -127 … 127 - emax, above which the largest element would decode to infinity.
    """
    if rule == "rceil":
        # In fp32, as the instruction computes it.
        power = _log2(largest / np.float32(element.largest), up=True)
    elif rule == "even":
        half_step = np.int32(1 << (23 - element.mantissa - 1))
        power = ((largest.view(np.int32) + half_step) >> 23) - E8M0_BIAS - element.exponent
    else:
        power = _log2(largest, up=rule == "ceil") - element.exponent
    clamped = np.clip(power, -E8M0_BIAS, E8M0_BIAS - element.exponent)
    return (clamped + E8M0_BIAS).astype(np.uint8)


def _log2(values: Float32, *, up: bool) -> npt.NDArray[np.int32]:
    """floor or ceil of log2 of positive values, exactly; -127 or less is -127 (zero too)."""
    bits = values.view(np.int32)
    power = (bits >> 23) - E8M0_BIAS
    if not up:
        return power
    # A denormal above 2^-127 has an exponent field of 0 and its highest mantissa bit set.
    above = np.where(power == -E8M0_BIAS, bits > 1 << 22, (bits & 0x7FFFFF) != 0)
    return power + above.astype(np.int32)


def e8m0_values(codes: npt.NDArray[np.uint8]) -> Float32:
    """2^(code - 127), as fp32; 255 is NaN."""
    values: Float32 = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return values


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit codes per byte, even index in the low nibble; `codes` is 1-D of even length."""
    packed: npt.NDArray[np.uint8] = codes[0::2] | (codes[1::2] << np.uint8(4))
    return packed


# --- searches for scales ---------------------------------------------------------------------------------------------


def block_importance(job: Encoding, first: int, count: int, size: int) -> Float32 | None:
    """The importance of the elements of `count` blocks of a row-major matrix, from block `first` on; at most 1."""
    if job.importance is None:
        return None
    largest = np.maximum(job.importance.max(), np.finfo(np.float32).tiny)
    of_row = job.importance.reshape(-1, size) / largest
    found: Float32 = of_row[(first + np.arange(count)) % len(of_row)]
    return found


def weighted_error(x: Float32, values: Float32, importance: Float32 | None) -> Float32:
    """The squared error of each row, weighted by `importance`."""
    squares = np.square(x - values)
    if importance is not None:
        squares *= importance
    errors: Float32 = squares.sum(axis=1)
    return errors


def lesser(
    best: Float32, chosen: npt.NDArray[np.uint8], errors: Float32, codes: npt.NDArray[np.uint8]
) -> tuple[Float32, npt.NDArray[np.uint8]]:
    """(the errors, the codes) where the new ones are less, else as they were."""
    less = errors < best
    return np.where(less, errors, best), np.where(less, codes, chosen)
