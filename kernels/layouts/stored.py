"""Canonical bytes as entries: the source of a layout, and what it converts back to.

    stored = StoredEntries(fmt, rows, cols, canonical)     # a view, nothing is copied
    stored.read(field)                                     # every entry
    stored.read(field, 16, 32)                             # those of some rows
    stored.write(field, entries, 16, 32)                   # the inverse

Entries are unsigned integers of their width in bytes: a float's bits, or uint8 for entries of less than a byte. Moving
them keeps every bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import LayoutError
from qcompiler.formats.base import Bytes, Field, Format
from qcompiler.formats.codebook import Vectors
from qcompiler.formats.packing import Pieces

Entries = npt.NDArray[Any]

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def bits_dtype(field: Field) -> np.dtype[Any]:
    """The unsigned type that holds the bits of one entry; uint8 for entries of less than a byte."""
    return _UNSIGNED[field.dtype.itemsize]


def keeps_every_byte(field: Field) -> bool:
    """Whether entries reproduce any bytes they are read from, not only those an encoder writes.

    This excludes bits of a record that belong to other fields: see `StoredEntries.check_records`.
    """
    if field.packing is None:
        return True
    return isinstance(field.packing, Pieces | Vectors) and (field.offset is not None or field.others is None)


class StoredEntries:
    """The entries of a (rows, cols) tensor, over its canonical bytes."""

    def __init__(self, fmt: Format, rows: int, cols: int, canonical: Bytes) -> None:
        self.fmt, self.rows, self.cols = fmt, rows, cols
        self.flat = fmt.declaration.blocking == "flat"
        self.sections: dict[str, Bytes] = {}
        for s in fmt.sections(rows, cols):
            data = canonical[s.offset : s.offset + s.nbytes]
            self.sections[s.name] = data.reshape((*s.shape[:-1], s.shape[-1] * s.dtype.itemsize))

    def per_row(self, field: Field) -> int:
        """Entries of a field per row, for rows that hold whole entries."""
        return -(-self.cols // field.covers) if isinstance(field.covers, int) else 1

    def by_rows(self, field: Field) -> bool:
        """Whether `read` and `write` accept part of the rows, starting at a multiple of 16.

        In flat storage, sixteen rows of codes are whole bytes, but a block of packed entries may be split between two
        rows.
        """
        if field.rows > 1 or field.covers == "tensor":
            return False
        apart = field.offset is None and field.packing is None and (field.bits >= 8 or field.covers == 1)
        return apart or not self.flat

    def read(self, field: Field, first: int = 0, last: int | None = None) -> Entries:
        """Entries of the rows [first, last): (rows, per row), or (n,) for flat storage in which rows share entries.

        LayoutError if the bytes are not ones an encoder writes and the entries would not reproduce them.
        """
        last = self.rows if last is None else last
        raw = np.ascontiguousarray(self._part(field, first, last)).reshape(-1)
        entries = field.unpack(raw)
        if not keeps_every_byte(field) and not np.array_equal(field.pack(entries), raw):
            how = "" if field.packing is None else f" ({field.packing.describe()})"
            raise LayoutError(
                f"'{field.name}' of {self.fmt} holds bytes{how} in rows {first}…{last - 1} that no encoder writes, and "
                "that a layout would not give back; decode the tensor and encode it again"
            )
        bits = entries.view(bits_dtype(field))
        if self.flat or field.covers == "tensor":
            count = self._count(field, first, last)
            aligned = field.covers != "tensor" and self.cols % int(field.covers) == 0
            return bits[:count].reshape(last - first, -1) if aligned else bits[:count]
        return bits.reshape(-(-(last - first) // field.rows), -1)[:, : self.per_row(field)]

    def write(self, field: Field, entries: Entries, first: int = 0, last: int | None = None) -> None:
        """Stores the entries of the rows [first, last), in the form that `read` returns, into zero bytes.

        Codes that belong to no element become `pad_code`.
        """
        last = self.rows if last is None else last
        part = self._part(field, first, last)
        if self.flat or field.covers == "tensor":
            whole = part.size * 8 // field.bits
            if field.packing is not None:
                whole = part.size // field.packing.nbytes * field.packing.entries
            values = np.ascontiguousarray(entries).reshape(-1)
            if values.size < whole:
                padded = np.full(whole, self.fmt.declaration.pad_code if field.covers == 1 else 0, values.dtype)
                padded[: values.size] = values
                values = padded
        else:
            per_row = entries.shape[1]
            whole = -(-per_row // field.packing.entries) * field.packing.entries if field.packing else per_row
            values = entries
            if whole > per_row:
                values = np.zeros((len(entries), whole), entries.dtype)
                values[:, :per_row] = entries
            values = np.ascontiguousarray(values).reshape(-1)
        part |= field.pack(values.view(field.dtype)).reshape(part.shape)  # fields of a record may share bytes

    def check_records(self) -> None:
        """LayoutError if a record's bit that belongs to no field is not zero."""
        d = self.fmt.declaration
        free = np.full(d.record_bytes, 0xFF, np.uint8)
        for f in d.fields:
            assert f.offset is not None
            place = free[f.offset : f.offset + f.nbytes(d.entries_per_block(f, self.cols))]
            place &= np.uint8(0) if f.others is None else f.others
        if free.any() and (self.sections["blocks"] & free).any():
            raise LayoutError(f"a record of {self.fmt} has nonzero bits outside its fields")

    def _part(self, field: Field, first: int, last: int) -> Bytes:
        """A view of the bytes that hold the entries of rows [first, last)."""
        if field.offset is not None:
            d = self.fmt.declaration
            size = field.nbytes(d.entries_per_block(field, self.cols))
            records = self.sections["blocks"]
            records = records if self.flat else records[first:last]
            return records[..., field.offset : field.offset + size]
        stored = self.sections[field.name]
        if field.covers == "tensor":
            return stored
        if not self.flat:
            return stored[first // field.rows : -(-last // field.rows)]
        if not self.by_rows(field):
            return stored
        covers = int(field.covers)
        begin, end = first * self.cols // covers, -(-last * self.cols // covers)
        return stored[field.nbytes(begin) : field.nbytes(end)]

    def _count(self, field: Field, first: int, last: int) -> int:
        """Entries of the rows [first, last) in flat storage."""
        if field.covers == "tensor":
            return 1
        covers = int(field.covers)
        return -(-last * self.cols // covers) - first * self.cols // covers
