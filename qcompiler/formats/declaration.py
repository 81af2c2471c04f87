"""The declaration of a storage format: blocks of elements, the fields of a block, and how they give values."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Entries, Equation, Float32, Split
from qcompiler.formats.packing import Packing
from qcompiler.formats.trellis import BLOCK as TRELLIS_BLOCK
from qcompiler.formats.trellis import Trellis

Bytes = npt.NDArray[np.uint8]
Kind = Literal["uint", "int", "f16", "bf16", "f32", "e4m3", "e5m2", "e8m0"]

_DTYPES: dict[tuple[Kind, int], np.dtype[Any]] = {
    ("uint", 8): np.dtype("u1"), ("int", 8): np.dtype("i1"), ("f16", 16): np.dtype("<f2"), ("f32", 32): np.dtype("<f4"),
    ("bf16", 16): np.dtype(ml_dtypes.bfloat16), ("e4m3", 8): np.dtype(ml_dtypes.float8_e4m3fn),
    ("e5m2", 8): np.dtype(ml_dtypes.float8_e5m2), ("e8m0", 8): np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One field: entries of `bits` bits, each shared by `covers` consecutive elements.

    `covers=1` are the codes; a larger `covers` is a level in the hierarchy of scales ("row": one entry per row,
    "tensor": one for the whole matrix).  With `rows` > 1 an entry serves that many consecutive rows as well.

    Entries of less than 8 bits are stored in order.  `order` says which end of a byte holds the lower index.  `packing`
    replaces this order; a block's entries then take `packing.nbytes` bytes.  `offset` is the field's byte offset
    inside a block's record when a format interleaves its fields (GGUF's blocks); None gives the field a section of its
    own.
    """

    name: str
    kind: Kind
    bits: int
    covers: int | Literal["row", "tensor"] = 1
    order: Literal["low_first", "high_first"] = "low_first"
    offset: int | None = None
    rows: int = 1
    packing: Packing | None = None

    def __post_init__(self) -> None:
        plain = (self.kind, self.bits) in _DTYPES or (self.kind == "uint" and self.bits in (1, 2, 4))
        if not plain and not (self.packing is not None and self.kind == "uint" and 1 <= self.bits <= 8):
            raise ValueError(f"field {self.name!r}: no {self.bits}-bit {self.kind} entries")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an entry: uint8 for entries of less than a byte."""
        return _DTYPES.get((self.kind, self.bits), np.dtype("u1"))

    @functools.cached_property
    def others(self) -> Bytes | None:
        """A mask of the bits in a block's bytes of this field that belong to other fields; None if there are none."""
        if self.packing is None:
            return None
        rest = ~self.packing.used()
        return rest if rest.any() else None

    def nbytes(self, entries: int) -> int:
        """Bytes of this many entries; with a packing, the entries must fill whole blocks."""
        if self.packing is not None:
            return -(-entries // self.packing.entries) * self.packing.nbytes
        return -(-entries * self.bits // 8)

    def unpack(self, raw: Bytes) -> Entries:
        """Entries (1-D) from stored bytes (1-D; whole blocks with a packing).

        Entries packed into bytes become uint8, others keep their dtype; unused entries of a last byte are included.
        """
        if self.packing is not None:
            return self.packing.unpack(raw.reshape(-1, self.packing.nbytes)).reshape(-1).view(self.dtype)
        if self.bits >= 8:
            return raw.view(self.dtype)
        per_byte = 8 // self.bits
        entries = np.empty((raw.size, per_byte), np.uint8)
        for i in range(per_byte):
            place = i if self.order == "low_first" else per_byte - 1 - i
            np.right_shift(raw, place * self.bits, out=entries[:, i])
        entries &= (1 << self.bits) - 1
        return entries.reshape(-1)

    def pack(self, entries: Entries) -> Bytes:
        """The inverse of `unpack`: stored bytes (1-D) of entries (1-D) that fill whole bytes, or whole blocks."""
        if self.packing is not None:
            bits = np.ascontiguousarray(entries.astype(self.dtype, copy=False)).view(f"u{self.dtype.itemsize}")
            return self.packing.pack(bits.reshape(-1, self.packing.entries)).reshape(-1)
        if self.bits >= 8:
            return np.ascontiguousarray(entries.astype(self.dtype, copy=False)).reshape(-1).view(np.uint8)
        per_byte = 8 // self.bits
        # A word has as many bytes as entries. Each entry is shifted into its place in the lowest byte; all other
        # entries then lie outside that byte, because each fills only `bits` bits of its own.
        words = np.ascontiguousarray(entries.astype(np.uint8, copy=False)).reshape(-1).view(f"<u{per_byte}")
        raw = np.zeros(len(words), words.dtype)
        for i in range(per_byte):
            place = i if self.order == "low_first" else per_byte - 1 - i
            shift = 8 * i - place * self.bits
            raw |= words >> np.uint8(shift) if shift >= 0 else words << np.uint8(-shift)
        return raw.astype(np.uint8)


@dataclass(frozen=True)
class Numerics:
    """Choices in which systems that "support the same format" differ, one sentence each, for docs/formats.md."""

    ties: str
    zero_block: str
    scale_clamp: str
    zero_point: str
    reciprocal: str


@dataclass(frozen=True)
class Declaration:
    """A format as data.

    `blocking` is "flat" when blocks run over the row-major stream of elements across rows, and "row" when every row is
    cut into blocks.  `tail` is the treatment of a remainder: "short" stores a last block with fewer elements, "refuse"
    makes the shape an error.  `pad_code` fills the unused entries of the last byte of codes.
    `decode` gives the value of an element from its fields; `table` and `tables` are its lookup tables.  With a
    `trellis`, the equation's codes are windows of codes, and `table` has the value of each window.
    """

    summary: str
    block: int | Literal["row"]
    blocking: Literal["flat", "row"]
    tail: Literal["short", "refuse"]
    fields: tuple[Field, ...]
    decode: Equation
    numerics: Numerics
    reference: str
    table: tuple[float, ...] | None = None
    tables: Mapping[str, tuple[float, ...]] = dataclass_field(default_factory=dict)
    pad_code: int = 0
    trellis: Trellis | None = None

    def __post_init__(self) -> None:
        if self.trellis is not None and (self.block, self.blocking, self.tail) != (TRELLIS_BLOCK, "row", "refuse"):
            raise ValueError(f"sequences of a trellis lie in whole blocks of {TRELLIS_BLOCK} elements of a row")
        if sum(f.covers == 1 for f in self.fields) != 1:
            raise ValueError("a format has exactly one field of codes")
        declared = {*self.tables, *(["table"] if self.table is not None else [])}
        if self.decode.fields != {f.name for f in self.fields} or self.decode.tables != declared:
            raise ValueError(f"the decode equation '{self.decode.text}' does not read exactly what the format declares")
        if len({f.offset is None for f in self.fields}) != 1:
            raise ValueError("either every field has an offset in the block's record, or none has")
        for f in self.fields:
            self._check_field(f)

    def _check_field(self, f: Field) -> None:
        where = f"field {f.name!r}"
        if f.offset is not None and (f.rows != 1 or not isinstance(f.covers, int)):
            raise ValueError(f"{where}: entries for several blocks do not stand in a block's record")
        if self.blocking == "flat" and f.rows != 1:
            raise ValueError(f"{where}: blocks that run across rows do not serve several rows")
        if self.block == "row":
            if f.bits < 8 or f.covers not in (1, "row", "tensor") or f.offset is not None:
                raise ValueError(f"{where}: with one block per row, entries are whole bytes, one or K per row")
            return
        if f.covers == "tensor":
            return
        if f.covers == "row":
            if self.blocking == "flat":
                raise ValueError(f"{where}: its entries do not fill whole bytes in a block of {self.block}")
            return
        if self.blocking == "flat" and f.covers > self.block:
            if f.covers % self.block or f.bits < 8:
                raise ValueError(f"{where}: an entry for several blocks is of whole bytes, and covers whole blocks")
            return
        if self.block % f.covers or self.block // f.covers * f.bits % 8:
            raise ValueError(f"{where}: its entries do not fill whole bytes in a block of {self.block}")
        if f.packing is not None and f.packing.entries != self.block // f.covers:
            raise ValueError(f"{where}: its packing holds {f.packing.entries} entries, not {self.block // f.covers}")
        if self.blocking == "row" and self.tail == "short" and f.bits < 8:
            raise ValueError(f"{where}: rows that end inside of a block need entries of whole bytes")

    @property
    def codes(self) -> Field:
        """The field with one entry per element."""
        return next(f for f in self.fields if f.covers == 1)

    @property
    def interleaved(self) -> bool:
        """True when fields alternate inside a record per block instead of having sections of their own."""
        return self.fields[0].offset is not None

    @functools.cached_property
    def table_array(self) -> Float32 | None:
        return None if self.table is None else np.array(self.table, np.float32)

    @functools.cached_property
    def table_arrays(self) -> Mapping[str, Float32]:
        """Every table that the equation reads, fp32, by name."""
        every = dict(self.tables) | ({} if self.table is None else {"table": self.table})
        return {name: np.array(values, np.float32) for name, values in every.items()}

    @functools.cached_property
    def split(self) -> Split:
        """The decode equation in parts, for kernels. ValueError if codes occur in two separate parts."""
        return self.decode.split(self.codes.name)

    @functools.cached_property
    def code_values(self) -> Float32:
        """The value of each code before scales and zero points: fp32 (2 ** bits,), by the code's unsigned bits.

        With a trellis, that of each window.
        """
        if self.trellis is not None:
            return self.trellis.values
        codes = np.arange(1 << self.codes.bits, dtype=np.uint8).view(self.codes.dtype)
        return np.asarray(self.split.of_code.evaluate({self.codes.name: codes}, self.table_arrays), np.float32)

    def block_size(self, cols: int) -> int:
        """Elements per block, for rows of `cols` elements."""
        return cols if self.block == "row" else self.block

    def entries_per_block(self, f: Field, cols: int) -> int:
        """Entries of a field in one block; 1 if an entry serves more than a block."""
        if not isinstance(f.covers, int):
            return 1
        return max(1, self.block_size(cols) // f.covers)

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record, for an interleaved format."""
        ends = (f.offset + f.nbytes(self.entries_per_block(f, 0)) for f in self.fields if f.offset is not None)
        return max(ends)


@dataclass(frozen=True)
class Section:
    """A typed range of a packed tensor's bytes. `shape` is in items of `dtype`; `offset` and `nbytes` are bytes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def place_sections(parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]], alignment: int) -> tuple[Section, ...]:
    """Sections one after another, each at a multiple of the larger of `alignment` and its item size (bytes)."""
    sections: list[Section] = []
    end = 0
    for name, dtype, shape in parts:
        step = max(alignment, dtype.itemsize)
        offset = -(-end // step) * step
        nbytes = math.prod(shape) * dtype.itemsize  # exact: the shape may be untrusted, and NumPy's product wraps
        sections.append(Section(name, dtype, shape, offset, nbytes))
        end = offset + nbytes
    return tuple(sections)
