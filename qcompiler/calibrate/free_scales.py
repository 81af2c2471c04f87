"""Formats whose scales are numbers that anyone may choose: integers, and nf4 and fp4 without nested statistics.

    int4    value = (codes - 8) * scales             symmetric; the value of a code is codes - 8
    int4    value = (codes - zeros) * scales         asymmetric: zeros are whole numbers of 8 bits
    nf4     value = table[codes] * absmax

All are ``value = (of_code[code] - zero) * scale``.  An encoder that chooses scales itself (hqq.py, and the one that
learns them) works on that equation alone and writes its result by `assemble`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate.levels import Codes, choices, why_no_levels, with_codes
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.integers import LARGEST_FP16, IntegerFormat
from qcompiler.formats.nf4 import TableFormat

Float32 = npt.NDArray[np.float32]


def why_no_scales(fmt: Format, cols: int) -> str:
    """Why the scales of a matrix with so many columns cannot be chosen freely: "" if they can."""
    if isinstance(fmt, TableFormat) and fmt.nested:
        return f"the scales of {fmt} are codes themselves"
    if not isinstance(fmt, IntegerFormat | TableFormat):
        return f"{fmt.name} has an encoder of its own; integers, nf4 and fp4 have scales that can be chosen"
    return why_no_levels(fmt, cols)


@dataclass(frozen=True)
class FreeScales:
    """How a format with free scales stores a matrix: `size` elements of a row share a scale, and a zero point.

    `codes` and `of_code` list the codes and their values, ascending; without zero points 0 is among them.  With `zeros`
    each group has a zero point in 0 … `last`.  `dtype` is the type of the stored scales.
    """

    size: int
    codes: Codes
    of_code: Float32
    zeros: bool
    dtype: np.dtype[np.generic]

    @staticmethod
    def of(fmt: Format, cols: int) -> FreeScales:
        """Asserts `why_no_scales(fmt, cols) == ""`."""
        assert not why_no_scales(fmt, cols)
        codes, of_code = choices(fmt)
        fields = {field.name: field for field in fmt.declaration.fields}
        size = fmt.group_size(cols) if isinstance(fmt, IntegerFormat) else fmt.declaration.block_size(cols)
        stored = fields[_scale_name(fmt)].dtype
        return FreeScales(size, codes, of_code.astype(np.float32), "zeros" in fields, stored)

    @property
    def last(self) -> float:
        """The largest zero point, and the largest code."""
        return float(self.of_code[-1])

    def storable(self, scales: Float32) -> Float32:
        """Scales as they are stored, in fp32: rounded once to their type, 1 where they are 0 in it."""
        limit = LARGEST_FP16 if self.dtype == np.float16 else np.finfo(np.float32).max / 256
        with np.errstate(over="ignore", under="ignore"):
            found = np.clip(scales, -limit, limit).astype(self.dtype).astype(np.float32)
        return np.where(found == 0, np.float32(1), found)

    def nearest(self, groups: Float32, scales: Float32, zeros: Float32) -> npt.NDArray[np.intp]:
        """The places in `codes` of the nearest values, for groups (n, size) with `scales` and `zeros` (n,)."""
        wanted = groups / np.where(scales == 0, np.float32(1), scales)[:, None] + zeros[:, None]
        places: npt.NDArray[np.intp]
        if self.whole:
            places = np.clip(np.rint(wanted - self.of_code[0]), 0, len(self.of_code) - 1).astype(np.intp)
        else:
            places = np.searchsorted((self.of_code[1:] + self.of_code[:-1]) / 2, wanted)
        return places

    @property
    def whole(self) -> bool:
        """Whether the values of codes are consecutive whole numbers."""
        return bool((np.diff(self.of_code) == 1).all())


def scales_of(packed: PackedTensor) -> tuple[Float32, Float32]:
    """The stored scales (n,) and zero points (n,) of all groups, in fp32, row by row."""
    scheme = FreeScales.of(packed.format, packed.cols)
    scales = packed.section(_scale_name(packed.format)).reshape(-1).astype(np.float32)
    zeros = packed.section("zeros").reshape(-1).astype(np.float32) if scheme.zeros else np.zeros_like(scales)
    return scales, zeros


def assemble(fmt: Format, rows: int, cols: int, codes: Codes, scales: Float32, zeros: Float32) -> PackedTensor:
    """The matrix with these `codes` (rows, cols), and scales and zero points (n,), which are `storable` already."""
    packed = fmt.allocate(rows, cols)
    packed.section(_scale_name(fmt)).reshape(-1)[:] = scales
    if FreeScales.of(fmt, cols).zeros:
        packed.section("zeros").reshape(-1)[:] = zeros.astype(np.uint8)
    return with_codes(packed, codes)


def _scale_name(fmt: Format) -> str:
    return "scales" if isinstance(fmt, IntegerFormat) else "absmax"


__all__ = ["FreeScales", "assemble", "scales_of", "why_no_scales"]
