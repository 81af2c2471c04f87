"""FP4 of bitsandbytes: sign, two bits of exponent, one of fraction, in its own order of codes; blocks as in NF4."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32
from qcompiler.formats.nf4 import TableFormat, midpoints

_MAGNITUDES = (0.0625, 8, 12, 4, 6, 2, 3)
_POSITIVE = tuple(float(np.float32(magnitude / 12)) for magnitude in _MAGNITUDES)
TABLE: tuple[float, ...] = (0.0, *_POSITIVE, 0.0, *(-value for value in _POSITIVE))
"""Magnitudes divided by the largest, in fp32. Code 8 + c is the negative of code c; code 8 is +0 in the library."""

CODES_BY_RANK = np.array([11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3], np.uint8)
"""Codes in ascending order of their values; of the two zeros, code 0 comes before code 8."""


class FP4(TableFormat):
    """Codes and statistics of `quantize_4bit(quant_type="fp4")`."""

    name: ClassVar[str] = "fp4"
    table: ClassVar[tuple[float, ...]] = TABLE
    thresholds: ClassVar[Float32] = midpoints([TABLE[code] for code in CODES_BY_RANK])
    codes_by_rank: ClassVar[npt.NDArray[np.uint8] | None] = CODES_BY_RANK
    zero_code: ClassVar[int] = 0
    about: ClassVar[str] = "0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1 and their negatives"
    notes: ClassVar[dict[str, str]] = {
        "ties": "; a positive weight below 1/384 of absmax takes code 8, a negative one code 0 (both are zero)",
        "zero_point": "none; codes 0 and 8 are exactly 0",
        "reference": "; its CUDA kernel has the same thresholds written with 6 to 8 digits, and code 8 below zero",
    }
