"""Layouts in panels of 16 rows. Subclasses define the order of codes and values inside a panel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from qcompiler.errors import LayoutError
from qcompiler.formats.base import Bytes, Field, Format, Section, place_sections
from qcompiler.kernels.layouts.base import ALIGNMENT, CANONICAL, Items, Layout, views, zeros
from qcompiler.kernels.layouts.stored import StoredEntries, bits_dtype
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

LANES = 16
"""Rows per panel: the fp32 lanes of one AVX-512, two AVX2 or four NEON registers, and the rows of one `mma` operand."""

RUN = 1 << 21
"""Bytes that are rearranged at a time."""

WORD = np.dtype("<u4")

Plane = tuple[int, int]
"""Lowest bit and number of bits."""

RowRange = tuple[int, int]
"""The first row, and the one behind the last."""

Place = Literal["codes", "panels", "joined", "flat", "row_blocks", "once"]
"""How a layout in panels orders a field: see `PanelLayout`."""


class PanelLayout(Layout):
    """Linear weights (N rows, K cols) in panels of 16 rows. Every section is 64-byte aligned.

    values  plain values, in the order that the subclass defines
    codes   codes in planes of 8, 4, 2 and 1 bits (`planes`), in the subclass's order.  A plane is a section of 32-bit
            words.  The plane of the lowest bits is called "codes", one that starts at bit s "codes_s"
    <field> the entries of any other field, in their own type (uint8 for entries of less than a byte):
            [panel][per row][16]
            [panel][bytes per row][16] if entries share bytes (`JOINS`)
            [rows / field.rows][per row] if an entry serves several rows; one entry if it serves the tensor
    <field>_flat  if entries serve elements of two rows (flat blocks, K % covers != 0): as canonical, entry
            (row * K + k) / covers

    Rows past the last one and codes past the last column are zero.

    The codes of a trellis take the words that planes of their bits would take, in an order of their own: codes of one
    sequence are neighbours.
    """

    WIDTHS: ClassVar[frozenset[int]]
    """Plane widths in bits that the layout supports."""

    JOINS: ClassVar[frozenset[int]] = frozenset()
    """Widths in bits of which entries, not only codes, share bytes: `join_entries`."""

    def place_of(self, fmt: Format, field: Field, cols: int) -> Place:
        """Which of the orders listed above a field has, in rows of `cols` elements."""
        place = place_of(fmt, field, cols)
        return "joined" if place == "panels" and field.bits in self.JOINS else place

    def stored_rows(self, rows: int) -> int:
        """Rows in the order of the panels, those that are zero included where they do not stand at the end."""
        return rows

    def check_rows(self, fmt: Format | None, rows: int, cols: int) -> None:
        """LayoutError if the layout cannot hold so many rows of a format."""

    def _ranges(self, rows: int, first: int, last: int, *, by_rows: bool) -> tuple[RowRange, ...]:
        """The ranges of rows that the stored rows [first, last) are, in the order in which `_join` takes them.

        Where rows cannot be read separately (not `by_rows`), one range of all of them.
        """
        del rows, by_rows
        return ((first, last),)

    def _join(self, parts: Sequence[Items], count: int) -> Items:
        """So many stored rows, from the rows of their `_ranges`."""
        del count
        return parts[0]

    def _split(self, items: Items, ranges: Sequence[RowRange]) -> list[Items]:
        """The inverse: the rows of each of the ranges."""
        del ranges
        return [items]

    @abstractmethod
    def _values_shape(self, dtype: DType, panels: int, cols: int) -> tuple[int, ...]:
        """Shape of the section "values", in items of `dtype`."""

    @abstractmethod
    def _codes_shape(self, bits: int, panels: int, cols: int) -> tuple[int, ...]:
        """Shape of a plane of codes, in 32-bit words."""

    @abstractmethod
    def _pack_values(self, values: Items, out: Items) -> None:
        """Packs (rows, cols) values into the zeroed section `out`."""

    @abstractmethod
    def _unpack_values(self, packed: Items, rows: int, cols: int) -> Items:
        """Unpacks (rows, cols) values from their section."""

    @abstractmethod
    def _pack_codes(self, bits: int, row_bytes: Bytes, out: Items) -> None:
        """Packs a plane's bytes (rows, bytes per row), from `bytes_of_codes`, into the zeroed words `out`."""

    @abstractmethod
    def _unpack_codes(self, bits: int, words: Items, rows: int, nbytes: int) -> Bytes:
        """Unpacks bytes (rows, nbytes) from a plane's words."""

    @abstractmethod
    def _pack_trellis(self, bits: int, codes: Bytes, out: Sequence[Items]) -> None:
        """Packs the codes (rows, cols) of a trellis into the zeroed words of its planes."""

    @abstractmethod
    def _unpack_trellis(self, bits: int, words: Sequence[Items], rows: int, cols: int) -> Bytes:
        """Unpacks codes (rows, cols) from the words of their planes."""

    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        self.check_rows(fmt, rows, cols)
        panels = -(-self.stored_rows(rows) // LANES)
        if fmt is None:
            if dtype not in ("f32", "bf16", "f16"):
                raise LayoutError(f"layout '{self.name}' holds f32, bf16 and f16 values; got {dtype}")
            return place_sections([("values", NUMPY_DTYPES[dtype], self._values_shape(dtype, panels, cols))], ALIGNMENT)
        fmt.check_shape(rows, cols)
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for field in fmt.declaration.fields:
            place, name = self.place_of(fmt, field, cols), packed_name(fmt, field, cols)
            if place == "codes":
                for shift, bits in planes(field.bits):
                    if bits not in self.WIDTHS:
                        raise LayoutError(f"layout '{self.name}' holds no {field.bits}-bit codes, which {fmt} has")
                    parts.append((plane_name(shift), WORD, self._codes_shape(bits, panels, cols)))
            elif place == "panels":
                parts.append((name, field.dtype, (panels, per_row(field, cols), LANES)))
            elif place == "joined":
                parts.append((name, field.dtype, (panels, joined_bytes(per_row(field, cols), field.bits), LANES)))
            elif place == "row_blocks":
                parts.append((name, field.dtype, (-(-rows // field.rows), per_row(field, cols))))
            else:
                covers = rows * cols if field.covers == "tensor" else int(field.covers)
                parts.append((name, field.dtype, (-(-rows * cols // covers),)))
        return place_sections(parts, ALIGNMENT)

    def pack_into(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes, out: Bytes) -> None:
        source = views(canonical, CANONICAL.sections(fmt, dtype, rows, cols))
        targets = views(out, self.sections(fmt, dtype, rows, cols))
        stored_rows = self.stored_rows(rows)
        if fmt is None:
            values = source["values"]
            for first, last in _runs(stored_rows, values.itemsize * cols):
                part = slice(first // LANES, -(-last // LANES))
                read = [values[a:b] for a, b in self._ranges(rows, first, last, by_rows=True)]
                self._pack_values(self._join(read, last - first), targets["values"][part])
            return
        stored = StoredEntries(fmt, rows, cols, canonical)
        if fmt.declaration.interleaved:
            stored.check_records()
        for field in fmt.declaration.fields:
            place = self.place_of(fmt, field, cols)
            target = targets[packed_name(fmt, field, cols)]
            bits = target.view(bits_dtype(field)) if place != "codes" else target
            if place in ("flat", "once", "row_blocks"):
                bits[...] = stored.read(field)
                continue
            for first, last in _runs_of(stored, field, stored_rows):
                panels = slice(first // LANES, -(-last // LANES))
                ranges = self._ranges(rows, first, last, by_rows=stored.by_rows(field))
                if place in ("panels", "joined"):
                    entries = [stored.read(field, a, b) for a, b in ranges]
                    if place == "joined":
                        entries = [join_entries(each, field.bits) for each in entries]
                    to_panels(self._join(entries, last - first), bits[panels])
                    continue
                if fmt.declaration.trellis is not None:
                    codes = self._join([stored.read(field, a, b) for a, b in ranges], last - first)
                    words = [targets[plane_name(shift)][panels] for shift, _ in planes(field.bits)]
                    self._pack_trellis(field.bits, codes, words)
                    continue
                read_planes = [bytes_of_codes(stored, field, a, b) for a, b in ranges]
                for shift, width in read_planes[0]:
                    row_bytes = self._join([each[shift, width] for each in read_planes], last - first)
                    self._pack_codes(width, row_bytes, targets[plane_name(shift)][panels])

    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        source = views(packed, self.sections(fmt, dtype, rows, cols))
        data, out = zeros(CANONICAL.sections(fmt, dtype, rows, cols))
        stored_rows = self.stored_rows(rows)
        if fmt is None:
            for first, last in _runs(stored_rows, out["values"].itemsize * cols):
                panels = source["values"][first // LANES : -(-last // LANES)]
                ranges = self._ranges(rows, first, last, by_rows=True)
                parts = self._split(self._unpack_values(panels, last - first, cols), ranges)
                for (a, b), values in zip(ranges, parts, strict=True):
                    out["values"][a:b] = values
            return data
        stored = StoredEntries(fmt, rows, cols, data)
        for field in fmt.declaration.fields:
            place = self.place_of(fmt, field, cols)
            items = source[packed_name(fmt, field, cols)]
            bits = items.view(bits_dtype(field)) if place != "codes" else items
            if place in ("flat", "once", "row_blocks"):
                stored.write(field, bits)
                continue
            for first, last in _runs_of(stored, field, stored_rows):
                run = slice(first // LANES, -(-last // LANES))
                ranges = self._ranges(rows, first, last, by_rows=stored.by_rows(field))
                if place in ("panels", "joined"):
                    entries = self._split(from_panels(bits[run], last - first), ranges)
                    for (a, b), part in zip(ranges, entries, strict=True):
                        split = part if place == "panels" else split_entries(part, field.bits, per_row(field, cols))
                        stored.write(field, split, a, b)
                    continue
                if fmt.declaration.trellis is not None:
                    of_planes = [source[plane_name(shift)][run] for shift, _ in planes(field.bits)]
                    codes = self._unpack_trellis(field.bits, of_planes, last - first, cols)
                    for (a, b), part in zip(ranges, self._split(codes, ranges), strict=True):
                        stored.write(field, part, a, b)
                    continue
                planes_of = {}
                for shift, width in planes(field.bits):
                    words, nbytes = source[plane_name(shift)][run], -(-cols * width // 8)
                    planes_of[shift, width] = self._split(
                        self._unpack_codes(width, words, last - first, nbytes), ranges
                    )
                for number, (a, b) in enumerate(ranges):
                    by_plane = {plane: parts[number] for plane, parts in planes_of.items()}
                    store_bytes_of_codes(stored, field, a, b, by_plane)
        return data


# --- where fields are stored ------------------------------------------------------------------------------------------


def planes(bits: int) -> tuple[Plane, ...]:
    """The planes of codes with this many bits, lowest first. Widths are 8, 4, 2 and 1."""
    found, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((shift, width))
            shift += width
    return tuple(found)


def plane_name(shift: int) -> str:
    """The section of the codes' plane that starts at bit `shift`."""
    return f"codes_{shift}" if shift else "codes"


def place_of(fmt: Format, field: Field, cols: int) -> Place:
    """The same for a layout in which no entries share bytes."""
    if field.covers == 1:
        return "codes"
    if field.covers == "tensor":
        return "once"
    if field.rows > 1:
        return "row_blocks"
    if fmt.declaration.blocking == "flat" and cols % int(field.covers):
        return "flat"
    return "panels"


def per_row(field: Field, cols: int) -> int:
    """Entries of a field in a row of `cols` elements."""
    return -(-cols // field.covers) if isinstance(field.covers, int) else 1


def straddles(fmt: Format, cols: int) -> bool:
    """Whether blocks cross row boundaries."""
    return fmt.declaration.blocking == "flat" and cols % fmt.declaration.block_size(cols) != 0


def packed_name(fmt: Format, field: Field, cols: int) -> str:
    """The section of a field; for codes, that of their lowest bits."""
    place = place_of(fmt, field, cols)
    return "codes" if place == "codes" else f"{field.name}_flat" if place == "flat" else field.name


# --- rearranging -----------------------------------------------------------------------------------------------------


def _runs(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fill whole panels, about `RUN` bytes each, so that temporaries stay small."""
    step = LANES * max(1, RUN // (LANES * max(row_bytes, 1)))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _runs_of(stored: StoredEntries, field: Field, rows: int) -> Iterator[tuple[int, int]]:
    """The same for the entries of a field in `rows` stored rows. All at once if they cannot be read separately."""
    if not stored.by_rows(field):
        yield 0, rows
    else:
        yield from _runs(rows, stored.per_row(field) * field.dtype.itemsize)


def to_panels(items: Items, out: Items) -> None:
    """Copies (rows, n) items into the zeroed (panels, n, 16) array `out`."""
    rows, n = items.shape
    full, rest = divmod(rows, LANES)
    out[:full] = items[: full * LANES].reshape(full, LANES, n).transpose(0, 2, 1)
    if rest:
        out[full, :, :rest] = items[full * LANES :].T


def from_panels(panels: Items, rows: int) -> Items:
    """Converts (panels, n, 16) items to (rows, n), row-major."""
    count, n, _ = panels.shape
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(count * LANES, n)[:rows]


def bytes_of_codes(stored: StoredEntries, field: Field, first: int, last: int) -> dict[Plane, Bytes]:
    """The planes of rows of codes as bytes (rows, bytes per row): LSB first, each row starting at a new byte."""
    direct = _in_order(stored, field)
    if direct is not None:
        row_bytes = direct[first:last]
        swapped = field.order == "high_first" and field.bits == 4
        return {(0, field.bits): _pair(row_bytes >> np.uint8(4), row_bytes) if swapped else row_bytes}
    codes = stored.read(field, first, last)
    return {
        (shift, width): join_bits(codes >> np.uint8(shift) & np.uint8((1 << width) - 1), width)
        for shift, width in planes(field.bits)
    }


def store_bytes_of_codes(
    stored: StoredEntries, field: Field, first: int, last: int, by_plane: dict[Plane, Bytes]
) -> None:
    """The inverse: stores rows of codes, given the bytes of their planes."""
    direct = _in_order(stored, field)
    if direct is not None:
        row_bytes = by_plane[0, field.bits]
        swapped = field.order == "high_first" and field.bits == 4
        direct[first:last] = _pair(row_bytes >> np.uint8(4), row_bytes) if swapped else row_bytes
        return
    codes = np.zeros((last - first, stored.cols), np.uint8)
    for (shift, width), row_bytes in by_plane.items():
        codes |= split_bits(row_bytes, width, stored.cols) << np.uint8(shift)
    stored.write(field, codes, first, last)


def _in_order(stored: StoredEntries, field: Field) -> Bytes | None:
    """Bytes (rows, bytes per row) if codes of 4 or 8 bits are stored in order and rows are whole bytes, else None."""
    if field.packing is not None or field.offset is not None or field.bits not in (4, 8):
        return None
    if stored.cols * field.bits % 8:
        return None
    return stored.sections[field.name].reshape(stored.rows, -1)


def join_bits(codes: Items, width: int) -> Bytes:
    """Packs (rows, cols) codes below 2 ** width into bytes (rows, bytes per row), the first code in the lowest bits."""
    if width == 8:
        return codes
    per = 8 // width
    rows, cols = codes.shape
    if cols % per:
        wide = np.zeros((rows, -(-cols // per) * per), np.uint8)
        wide[:, :cols] = codes
        codes = wide
    joined = codes[:, 0::per].copy()
    for i in range(1, per):
        joined |= codes[:, i::per] << np.uint8(i * width)
    return joined


def split_bits(row_bytes: Bytes, width: int, cols: int) -> Bytes:
    """The inverse: returns (rows, cols) codes."""
    if width == 8:
        return row_bytes[:, :cols]
    per = 8 // width
    codes = np.empty((len(row_bytes), row_bytes.shape[1] * per), np.uint8)
    for i in range(per):
        np.right_shift(row_bytes, i * width, out=codes[:, i::per])
    codes &= (1 << width) - 1
    return codes[:, :cols]


def joined_bytes(count: int, bits: int) -> int:
    """Bytes of so many entries of 4 or 6 bits: a byte for two, three for four."""
    return -(-count // 2) if bits == 4 else 3 * -(-count // 4)


def join_entries(entries: Items, bits: int) -> Bytes:
    """Rows of entries (rows, n) of 4 or 6 bits as bytes (rows, `joined_bytes`).

    4 bits: byte i holds entries 2i and 2i + 1, the first one in its low nibble.  6 bits: bytes 3i and 3i + 1 hold the
    low nibbles of entries 4i … 4i + 3 in this way, byte 3i + 2 their two other bits, the first entry's lowest.
    """
    if bits == 4:
        return join_bits(entries, 4)
    rows, count = entries.shape
    quads = np.zeros((rows, -(-count // 4) * 4), np.uint8)
    quads[:, :count] = entries
    joined = np.empty((rows, quads.shape[1] // 4, 3), np.uint8)
    joined[:, :, :2] = join_bits(quads & np.uint8(15), 4).reshape(rows, -1, 2)
    joined[:, :, 2] = join_bits(quads >> np.uint8(4), 2)
    return joined.reshape(rows, -1)


def split_entries(joined: Bytes, bits: int, count: int) -> Items:
    """The inverse: returns (rows, count) entries."""
    if bits == 4:
        return split_bits(joined, 4, count)
    rows = len(joined)
    quads = joined.reshape(rows, -1, 3)
    low = split_bits(quads[:, :, :2].reshape(rows, -1), 4, count)
    high = split_bits(np.ascontiguousarray(quads[:, :, 2]), 2, count)
    return low | high << np.uint8(4)


def _pair(low: Bytes, high: Bytes) -> Bytes:
    """Joins arrays of nibbles to bytes. Bits of `high` above bit 3 are shifted out."""
    paired: Bytes = low | (high << np.uint8(4))
    return paired
