"""Layouts: named, versioned bijections between a weight's canonical bytes and the bytes that kernels read.

    layout = layouts.get("cpu_p16_v1")
    packed = layout.pack(fmt, dtype, rows, cols, canonical)      # uint8 -> uint8
    layout.unpack(fmt, dtype, rows, cols, packed)                # the canonical bytes again

`fmt` is a `Format`, or None for plain values of `dtype` ("f32", "bf16", …; row-major is their canonical form).  A
layout adds zero padding and nothing else.  kernels/cpu/layout_pack.h holds the same bijection in C++.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import LayoutError
from qcompiler.formats.base import Bytes, Field, Format, Section, place_sections
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

LANES = 16
"""Rows per panel: the fp32 lanes of one AVX-512 register, two of AVX2, four of NEON."""

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""

_WORD = np.dtype("<u4")
Items = npt.NDArray[Any]


class Layout(ABC):
    """One bijection. Sizes are bytes; `sections` describes the bytes that `pack` returns."""

    name: ClassVar[str]

    @abstractmethod
    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        """The typed ranges of a tensor of (rows, cols), in storage order."""

    def nbytes(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> int:
        """Bytes of a tensor of (rows, cols), padding included."""
        last = self.sections(fmt, dtype, rows, cols)[-1]
        return last.offset + last.nbytes

    def section(self, fmt: Format | None, dtype: DType, rows: int, cols: int, name: str) -> Section:
        """The section of that name; LayoutError lists those there are."""
        sections = self.sections(fmt, dtype, rows, cols)
        for s in sections:
            if s.name == name:
                return s
        known = ", ".join(s.name for s in sections)
        raise LayoutError(f"{fmt or dtype} in layout '{self.name}' has no section {name!r}; it has {known}")

    @abstractmethod
    def pack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes) -> Bytes:
        """Canonical bytes (uint8, 1-D) to this layout's. LayoutError when their number is wrong."""

    @abstractmethod
    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        """This layout's bytes (uint8, 1-D) to canonical ones. LayoutError when their number is wrong."""


def _views(data: Bytes, sections: tuple[Section, ...]) -> dict[str, Items]:
    """A typed view of each section. LayoutError unless `data` has exactly the bytes that the sections describe."""
    expected = sections[-1].offset + sections[-1].nbytes
    if data.dtype != np.uint8 or data.shape != (expected,):
        described = ", ".join(f"{s.name} {s.dtype.name}{list(s.shape)}" for s in sections)
        raise LayoutError(
            f"a buffer of {expected} bytes (uint8, one dimension) is needed for {described}; "
            f"got {data.dtype} of shape {data.shape}"
        )
    return {s.name: data[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape) for s in sections}


def _zeros(sections: tuple[Section, ...]) -> tuple[Bytes, dict[str, Items]]:
    """Zeroed bytes and the views of their sections, to be filled."""
    data = np.zeros(sections[-1].offset + sections[-1].nbytes, np.uint8)
    return data, _views(data, sections)


# --- canonical -------------------------------------------------------------------------------------------------------


class Canonical(Layout):
    """The format's own bytes; for plain values, section "values" = [rows][cols]."""

    name = "canonical"

    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        if fmt is not None:
            return fmt.sections(rows, cols)
        return place_sections([("values", NUMPY_DTYPES[dtype], (rows, cols))], 1)

    def pack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes) -> Bytes:
        _views(canonical, self.sections(fmt, dtype, rows, cols))
        return canonical

    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        _views(packed, self.sections(fmt, dtype, rows, cols))
        return packed


# --- cpu_p16_v1 ------------------------------------------------------------------------------------------------------


class CpuP16V1(Layout):
    """Panels of 16 rows, one row per lane, for linear weights (N rows, K cols); every section is 64-byte aligned.

    codes   4 bits: uint32 [panel][ceil(K/8)][16], nibble j (bits 4j…4j+3) of group g is k = 8g + j
            8 bits: uint32 [panel][ceil(K/4)][16], byte j of group g is k = 4g + j
    values  plain f32, bf16, f16: [panel][K][16]
    scales  [panel][K / block][16] in the scale's dtype; zeros likewise (uint8). One block per row for int8.
    absmax_flat  instead of scales where flat blocks straddle rows (K % block != 0): as canonical, entry
            (row * K + k) / block

    Lanes past the last row and codes past the last column are zero.
    """

    name = "cpu_p16_v1"

    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        panels = -(-rows // LANES)
        if fmt is None:
            if dtype not in ("f32", "bf16", "f16"):
                raise LayoutError(f"layout '{self.name}' holds f32, bf16 and f16 values; got {dtype}")
            return place_sections([("values", NUMPY_DTYPES[dtype], (panels, cols, LANES))], ALIGNMENT)
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for canonical in fmt.sections(rows, cols):
            field = _field(fmt, canonical.name)
            if field.covers == 1:
                if field.bits not in (4, 8):
                    raise LayoutError(f"layout '{self.name}' holds 4-bit and 8-bit codes; {fmt} has {field.bits}-bit")
                parts.append(("codes", _WORD, (panels, -(-cols * field.bits // 32), LANES)))
            elif _straddles(fmt, cols):
                parts.append((_packed_name(fmt, field, cols), canonical.dtype, canonical.shape))
            else:
                per_row = cols // fmt.declaration.block_size(cols) * fmt.declaration.entries_per_block(field, cols)
                parts.append((_packed_name(fmt, field, cols), canonical.dtype, (panels, per_row, LANES)))
        return place_sections(parts, ALIGNMENT)

    def pack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes) -> Bytes:
        source = _views(canonical, CANONICAL.sections(fmt, dtype, rows, cols))
        data, out = _zeros(self.sections(fmt, dtype, rows, cols))
        if fmt is None:
            _to_panels(source["values"], out["values"])
            return data
        for name, items in source.items():
            field = _field(fmt, name)
            target = out[_packed_name(fmt, field, cols)]
            if field.covers == 1:
                _to_panels(_words_from_codes(field, items, rows, cols), target)
            elif _straddles(fmt, cols):
                target[...] = items
            else:
                _to_panels(items.reshape(rows, -1), target)
        return data

    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        source = _views(packed, self.sections(fmt, dtype, rows, cols))
        data, out = _zeros(CANONICAL.sections(fmt, dtype, rows, cols))
        if fmt is None:
            out["values"][...] = _from_panels(source["values"], rows)
            return data
        for name, target in out.items():
            field = _field(fmt, name)
            items = source[_packed_name(fmt, field, cols)]
            if field.covers == 1:
                words = _from_panels(items, rows)
                target.reshape(-1).view(np.uint8)[...] = _codes_from_words(fmt, words, rows, cols)
            elif _straddles(fmt, cols):
                target[...] = items
            else:
                target[...] = _from_panels(items, rows).reshape(target.shape)
        return data


def _field(fmt: Format, section: str) -> Field:
    for f in fmt.declaration.fields:
        if f.name == section:
            return f
    raise LayoutError(f"layout 'cpu_p16_v1' needs a section per field; {fmt} interleaves its fields in '{section}'")


def _straddles(fmt: Format, cols: int) -> bool:
    """Whether blocks run across rows."""
    return cols % fmt.declaration.block_size(cols) != 0


def _packed_name(fmt: Format, field: Field, cols: int) -> str:
    if field.covers == 1:
        return "codes"
    if _straddles(fmt, cols):
        return f"{field.name}_flat"
    return "scales" if field.kind in ("f16", "f32") else field.name


def _to_panels(items: Items, out: Items) -> None:
    """(rows, n) items into the zeroed (panels, n, 16) array `out`."""
    rows, n = items.shape
    full, rest = divmod(rows, LANES)
    out[:full] = items[: full * LANES].reshape(full, LANES, n).transpose(0, 2, 1)
    if rest:
        out[full, :, :rest] = items[full * LANES :].T


def _from_panels(panels: Items, rows: int) -> Items:
    """(panels, n, 16) items to (rows, n), row-major."""
    count, n, _ = panels.shape
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(count * LANES, n)[:rows]


def _words_from_codes(field: Field, codes: Items, rows: int, cols: int) -> Items:
    """Canonical codes to (rows, words per row) uint32, LSB first, zero past the last column."""
    raw = codes.reshape(-1).view(np.uint8)
    if field.bits == 8:
        row_bytes = raw.reshape(rows, cols)
    elif cols % 2 == 0:
        row_bytes = raw.reshape(rows, cols // 2)
        if field.order == "high_first":
            row_bytes = _pair(row_bytes >> np.uint8(4), row_bytes)
    else:  # rows start in the middle of a byte
        nibbles = np.zeros((rows, cols + 1), np.uint8)
        nibbles[:, :cols] = field.unpack(raw)[: rows * cols].reshape(rows, cols)
        row_bytes = _pair(nibbles[:, 0::2], nibbles[:, 1::2])
    padded = np.zeros((rows, 4 * -(-cols * field.bits // 32)), np.uint8)
    padded[:, : row_bytes.shape[1]] = row_bytes
    return padded.view(_WORD)


def _codes_from_words(fmt: Format, words: Items, rows: int, cols: int) -> Bytes:
    """The inverse of `_words_from_codes`: bytes of the canonical codes, with the format's padding code at the end."""
    field = fmt.declaration.codes
    row_bytes = np.ascontiguousarray(words.view(np.uint8)[:, : -(-cols * field.bits // 8)])
    if field.bits == 8:
        return row_bytes.reshape(-1)
    if cols % 2 == 0:
        flat = row_bytes.reshape(-1)
        return _pair(flat >> np.uint8(4), flat) if field.order == "high_first" else flat
    nibbles = np.full(rows * cols + rows * cols % 2, fmt.declaration.pad_code, np.uint8)
    by_row = nibbles[: rows * cols].reshape(rows, cols)
    by_row[:, 0::2] = row_bytes & 15
    by_row[:, 1::2] = row_bytes[:, : cols // 2] >> 4
    first, second = nibbles[0::2], nibbles[1::2]
    return _pair(second, first) if field.order == "high_first" else _pair(first, second)


def _pair(low: Bytes, high: Bytes) -> Bytes:
    """Bytes from arrays of nibbles; of `high`, whatever stands above bit 3 is shifted out."""
    paired: Bytes = low | (high << np.uint8(4))
    return paired


# --- registry --------------------------------------------------------------------------------------------------------

CANONICAL = Canonical()
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (CANONICAL, CpuP16V1())}


def names() -> tuple[str, ...]:
    """The names of all layouts."""
    return tuple(LAYOUTS)


def get(name: str) -> Layout:
    """The layout of that name; LayoutError lists those there are."""
    if name not in LAYOUTS:
        raise LayoutError(f"no layout is called {name!r}; there are: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
