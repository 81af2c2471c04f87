"""Layouts in panels of 16 rows: everything but the order of codes and values inside a panel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from qcompiler.errors import LayoutError
from qcompiler.formats.base import Bytes, Field, Format, Section, place_sections
from qcompiler.kernels.layouts.base import ALIGNMENT, CANONICAL, Items, Layout, views, zeros
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

LANES = 16
"""Rows per panel: the fp32 lanes of one AVX-512 register, two of AVX2, four of NEON; the rows of one `mma` operand."""

RUN = 1 << 21
"""Bytes that are rearranged at a time."""

WORD = np.dtype("<u4")


class PanelLayout(Layout):
    """Linear weights (N rows, K cols) in panels of 16 rows; every section is 64-byte aligned.

    codes, values  in an order that the subclass gives
    scales  [panel][K / block][16] in the scale's dtype; zeros likewise (uint8). One block per row for int8.
    absmax_flat  instead of scales where flat blocks straddle rows (K % block != 0): as canonical, entry
            (row * K + k) / block

    Rows past the last one and codes past the last column are zero.
    """

    @abstractmethod
    def _values_shape(self, dtype: DType, panels: int, cols: int) -> tuple[int, ...]:
        """Shape of the section "values", in items of `dtype`."""

    @abstractmethod
    def _codes_shape(self, bits: int, panels: int, cols: int) -> tuple[int, ...]:
        """Shape of the section "codes", in 32-bit words."""

    @abstractmethod
    def _pack_values(self, values: Items, out: Items) -> None:
        """(rows, cols) values into the zeroed section `out`."""

    @abstractmethod
    def _unpack_values(self, packed: Items, rows: int, cols: int) -> Items:
        """(rows, cols) values from their section."""

    @abstractmethod
    def _pack_codes(self, bits: int, row_bytes: Bytes, out: Items) -> None:
        """Bytes (rows, bytes per row), as `bytes_of_codes` gives them, into the zeroed words `out`."""

    @abstractmethod
    def _unpack_codes(self, bits: int, words: Items, rows: int, nbytes: int) -> Bytes:
        """Bytes (rows, nbytes) from the section "codes"."""

    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        panels = -(-rows // LANES)
        if fmt is None:
            if dtype not in ("f32", "bf16", "f16"):
                raise LayoutError(f"layout '{self.name}' holds f32, bf16 and f16 values; got {dtype}")
            return place_sections([("values", NUMPY_DTYPES[dtype], self._values_shape(dtype, panels, cols))], ALIGNMENT)
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for canonical in fmt.sections(rows, cols):
            field = field_of(fmt, canonical.name)
            if field.covers == 1:
                if field.bits not in (4, 8):
                    raise LayoutError(f"layout '{self.name}' holds 4-bit and 8-bit codes; {fmt} has {field.bits}-bit")
                parts.append(("codes", WORD, self._codes_shape(field.bits, panels, cols)))
            elif straddles(fmt, cols):
                parts.append((packed_name(fmt, field, cols), canonical.dtype, canonical.shape))
            else:
                per_row = cols // fmt.declaration.block_size(cols) * fmt.declaration.entries_per_block(field, cols)
                parts.append((packed_name(fmt, field, cols), canonical.dtype, (panels, per_row, LANES)))
        return place_sections(parts, ALIGNMENT)

    def pack_into(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes, out: Bytes) -> None:
        source = views(canonical, CANONICAL.sections(fmt, dtype, rows, cols))
        targets = views(out, self.sections(fmt, dtype, rows, cols))
        if fmt is None:
            values = source["values"]
            for first, last in _runs(rows, values.itemsize * cols):
                part = slice(first // LANES, -(-last // LANES))
                self._pack_values(values[first:last], targets["values"][part])
            return
        for name, items in source.items():
            field = field_of(fmt, name)
            target = targets[packed_name(fmt, field, cols)]
            if field.covers == 1:
                self._pack_rows_of_codes(field, items, rows, cols, target)
            elif straddles(fmt, cols):
                target[...] = items
            else:
                to_panels(items.reshape(rows, -1), target)

    def _pack_rows_of_codes(self, field: Field, codes: Items, rows: int, cols: int, out: Items) -> None:
        """Sixteen rows of codes, or a multiple, fill whole bytes whatever their length."""
        raw = codes.reshape(-1).view(np.uint8)
        for first, last in _runs(rows, cols):
            part = raw[first * cols * field.bits // 8 : -(-last * cols * field.bits // 8)]
            panels = slice(first // LANES, -(-last // LANES))
            self._pack_codes(field.bits, bytes_of_codes(field, part, last - first, cols), out[panels])

    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        source = views(packed, self.sections(fmt, dtype, rows, cols))
        data, out = zeros(CANONICAL.sections(fmt, dtype, rows, cols))
        if fmt is None:
            for first, last in _runs(rows, out["values"].itemsize * cols):
                panels = source["values"][first // LANES : -(-last // LANES)]
                out["values"][first:last] = self._unpack_values(panels, last - first, cols)
            return data
        for name, target in out.items():
            field = field_of(fmt, name)
            items = source[packed_name(fmt, field, cols)]
            if field.covers == 1:
                self._unpack_rows_of_codes(fmt, items, rows, cols, target.reshape(-1).view(np.uint8))
            elif straddles(fmt, cols):
                target[...] = items
            else:
                target[...] = from_panels(items, rows).reshape(target.shape)
        return data

    def _unpack_rows_of_codes(self, fmt: Format, words: Items, rows: int, cols: int, out: Bytes) -> None:
        bits = fmt.declaration.codes.bits
        for first, last in _runs(rows, cols):
            panels = words[first // LANES : -(-last // LANES)]
            row_bytes = self._unpack_codes(bits, panels, last - first, -(-cols * bits // 8))
            place = slice(first * cols * bits // 8, -(-last * cols * bits // 8))
            out[place] = codes_of_bytes(fmt, row_bytes, last - first, cols)


def _runs(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fill whole panels, of about `RUN` bytes: what is made in between stays small."""
    step = LANES * max(1, RUN // (LANES * max(row_bytes, 1)))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def field_of(fmt: Format, section: str) -> Field:
    for f in fmt.declaration.fields:
        if f.name == section:
            return f
    raise LayoutError(f"panels need a section per field; {fmt} interleaves its fields in '{section}'")


def straddles(fmt: Format, cols: int) -> bool:
    """Whether blocks run across rows."""
    return cols % fmt.declaration.block_size(cols) != 0


def packed_name(fmt: Format, field: Field, cols: int) -> str:
    if field.covers == 1:
        return "codes"
    if straddles(fmt, cols):
        return f"{field.name}_flat"
    return "scales" if field.kind in ("f16", "f32") else field.name


def to_panels(items: Items, out: Items) -> None:
    """(rows, n) items into the zeroed (panels, n, 16) array `out`."""
    rows, n = items.shape
    full, rest = divmod(rows, LANES)
    out[:full] = items[: full * LANES].reshape(full, LANES, n).transpose(0, 2, 1)
    if rest:
        out[full, :, :rest] = items[full * LANES :].T


def from_panels(panels: Items, rows: int) -> Items:
    """(panels, n, 16) items to (rows, n), row-major."""
    count, n, _ = panels.shape
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(count * LANES, n)[:rows]


def bytes_of_codes(field: Field, codes: Items, rows: int, cols: int) -> Bytes:
    """Canonical codes to bytes (rows, bytes per row): LSB first, each row from a byte of its own, zero at its end."""
    raw = codes.reshape(-1).view(np.uint8)
    if field.bits == 8:
        return raw.reshape(rows, cols)
    if cols % 2 == 0:
        row_bytes = raw.reshape(rows, cols // 2)
        return _pair(row_bytes >> np.uint8(4), row_bytes) if field.order == "high_first" else row_bytes
    # Rows start in the middle of a byte.
    nibbles = np.zeros((rows, cols + 1), np.uint8)
    nibbles[:, :cols] = field.unpack(raw)[: rows * cols].reshape(rows, cols)
    return _pair(nibbles[:, 0::2], nibbles[:, 1::2])


def codes_of_bytes(fmt: Format, row_bytes: Bytes, rows: int, cols: int) -> Bytes:
    """The inverse of `bytes_of_codes`: bytes of the canonical codes, with the format's padding code at the end."""
    field = fmt.declaration.codes
    if field.bits == 8:
        return np.ascontiguousarray(row_bytes).reshape(-1)
    if cols % 2 == 0:
        flat = np.ascontiguousarray(row_bytes).reshape(-1)
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
