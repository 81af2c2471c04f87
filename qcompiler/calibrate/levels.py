"""The values that each element of an encoded matrix can take while its scales stay as they are.

    int4     (codes - 8) * scales                    value(code) = slope * of_code[code] + offset
    q4_K     d * scales * codes - dmin * mins        slope = d * scales, offset = -dmin * mins
    nf4      table[codes] * absmax                   of_code = table

Every decode equation is linear in the value of its code (`Declaration.split`), so the nearest code of a number follows
from the slope and the offset of its element, in all formats alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate.float_scales import float_fields
from qcompiler.errors import FormatError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.codebook import Vectors

Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]

_TERNARY = ("tq1_0", "tq2_0")
LEAST_SIGNED = 0x80
"""int8's code -128, which no encoder writes: kernels negate codes."""


def why_no_levels(fmt: Format, cols: int) -> str:
    """Why codes of a matrix with so many columns cannot be chosen one by one: "" if they can."""
    if isinstance(fmt.declaration.codes.packing, Vectors):
        return f"{fmt.name} stores vectors of a codebook"
    if fmt.declaration.trellis is not None:
        return f"{fmt.name} stores paths through a trellis, in which a value depends on the codes before it"
    block = fmt.declaration.block_size(cols)
    if fmt.name in _TERNARY:
        return f"{fmt.name} is for models that were trained with three values"
    return f"its {cols} columns are not whole blocks of {block}" if cols % block else ""


@dataclass(frozen=True)
class Levels:
    """The levels of a matrix (rows, cols): ``slope * of_code[code] + offset``, in fp64.

    `codes` and `of_code` list the codes that may be chosen, in the order of their values; `middles` lie between them.
    `whole` says that these values are consecutive whole numbers.
    """

    slope: Float64
    offset: Float64
    codes: Codes
    of_code: Float64
    middles: Float64
    whole: bool

    @staticmethod
    def of(packed: PackedTensor, first: int = 0, stop: int | None = None, term: str | None = None) -> Levels:
        """Of the rows [first, stop); or what the floating-point field `term` is multiplied with there.

        FormatError for a format without levels (`why_no_levels`).
        """
        fmt, d = packed.format, packed.format.declaration
        why = why_no_levels(fmt, packed.cols)
        if why:
            raise FormatError(f"codes of {fmt} cannot be chosen one by one: {why}")
        codes, of_code = choices(fmt)
        stop = packed.rows if stop is None else stop
        entries = fmt.entries_of_rows(packed, first, stop)
        if term is not None:
            entries |= {each.name: np.full_like(entries[each.name], each.name == term) for each in float_fields(fmt)}
        groups = {name: each.evaluate(entries, d.table_arrays) for name, each in d.split.per_entry.items()}

        def at(code: float) -> Float64:
            value = d.split.per_element.evaluate({**groups, "code": np.float32(code)}, d.table_arrays)  # type: ignore[dict-item]
            return np.broadcast_to(value, (stop - first, packed.cols)).astype(np.float64)

        least, largest = (
            float(of_code[0]),
            float(of_code[-1]),
        )  # far apart: the differences of fp32 values are exact enough
        slope = (at(largest) - at(least)) / (largest - least)
        whole = bool((np.diff(of_code) == 1).all())
        return Levels(slope, at(least) - slope * least, codes, of_code, (of_code[1:] + of_code[:-1]) / 2, whole)

    def columns(self) -> Levels:
        """The same as matrices (cols, rows): a column is contiguous."""
        slope, offset = (np.ascontiguousarray(each.T) for each in (self.slope, self.offset))
        return replace(self, slope=slope, offset=offset)

    def at(self, order: npt.NDArray[np.intp]) -> Levels:
        """Some of the columns of levels that have been put columns first, in another order."""
        return replace(self, slope=self.slope[order], offset=self.offset[order])

    def nearest(self, values: Float64, column: int) -> tuple[Codes, Float64]:
        """The codes nearest to one column's values (rows,), and what they decode to; see `columns`."""
        slope, offset = self.slope[column], self.offset[column]
        wanted = np.divide(values - offset, slope, out=np.zeros_like(values), where=slope != 0)
        if self.whole:
            last = len(self.of_code) - 1
            place = np.clip(np.ceil(wanted - (self.of_code[0] + 0.5)), 0, last).astype(np.intp)
        else:
            place = np.searchsorted(self.middles, wanted)
        return self.codes[place], self.of_code[place] * slope + offset


@functools.cache
def choices(fmt: Format) -> tuple[Codes, Float64]:
    """The codes that may be chosen and their values, ascending."""
    codes = np.arange(1 << fmt.declaration.codes.bits, dtype=np.uint8)
    values = fmt.declaration.code_values.astype(np.float64)
    keep = np.isfinite(values)
    if fmt.declaration.codes.kind == "int":
        keep &= codes != LEAST_SIGNED
    order = np.argsort(values[keep], kind="stable")
    return codes[keep][order], values[keep][order]


def with_codes(packed: PackedTensor, codes: Codes) -> PackedTensor:
    """A copy of an encoded matrix with other codes (rows, cols) and the same scales."""
    d = packed.format.declaration
    made = PackedTensor(packed.format, packed.rows, packed.cols, packed.data.copy())
    blocks = codes.reshape(-1, d.block_size(packed.cols)).view(d.codes.dtype)
    packed.format.store(made, 0, {d.codes.name: blocks})
    return made


__all__ = ["Codes", "Float64", "Levels", "choices", "why_no_levels", "with_codes"]
