"""What a storage format declares, and everything that follows from the declaration.

A format is a page of data (`Declaration`): how elements are grouped into blocks, which fields a block stores with how
many bits, and the equation that turns them into values.  Sections, byte counts, bits per weight and the decoder are
derived here, once, for every format; only encoders are code of their own.  **The decoder is the definition** of a
format's meaning: kernels are compared with it.

Canonical bytes are the sections in declared order, each starting at a multiple of its item size (gap bytes are zero).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatShapeError, FormatValueError, UnknownFormatError
from qcompiler.formats.equation import Entries, Equation, Float32

Bytes = npt.NDArray[np.uint8]
Weights = npt.NDArray[Any]  # float32, float16, float64 or ml_dtypes.bfloat16
ParamValue = int | bool | str
Kind = Literal["uint", "int", "f16", "f32"]

_DTYPES: dict[tuple[Kind, int], np.dtype[Any]] = {
    ("uint", 8): np.dtype("u1"), ("int", 8): np.dtype("i1"), ("f16", 16): np.dtype("<f2"), ("f32", 32): np.dtype("<f4"),
}  # fmt: skip
_WEIGHT_DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64))

THREAD_SHARE = 1 << 21
"""Elements from which on another thread is worth its start."""

TILE = 1 << 16
"""Elements that an encoder or decoder handles at a time: 256 KiB of fp32, so that a tile stays in a core's L2 cache."""


# --- the declaration -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One bit field of a block: entries of `bits` bits, each shared by `covers` consecutive elements.

    `covers=1` are the codes; a larger `covers` is a level in the hierarchy of scales ("row": one entry per row).
    `order` says which end of a byte holds the entry with the lower index, for entries of less than 8 bits.  `offset` is
    the field's byte offset inside a block's record when a format interleaves its fields (GGUF's blocks); None gives
    the field a section of its own.
    """

    name: str
    kind: Kind
    bits: int
    covers: int | Literal["row"] = 1
    order: Literal["low_first", "high_first"] = "low_first"
    offset: int | None = None

    def __post_init__(self) -> None:
        if (self.kind, self.bits) not in _DTYPES and not (self.kind == "uint" and self.bits in (1, 2, 4)):
            raise ValueError(f"field {self.name!r}: no {self.bits}-bit {self.kind} entries")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of stored items: uint8 for entries packed into bytes."""
        return _DTYPES.get((self.kind, self.bits), np.dtype("u1"))

    def unpack(self, raw: Bytes) -> Entries:
        """Entries (1-D) from packed bytes (1-D); the last byte's unused entries are included."""
        if self.bits >= 8:
            return raw.view(self.dtype)
        per_byte = 8 // self.bits
        entries = np.empty((raw.size, per_byte), np.uint8)
        for i in range(per_byte):
            place = i if self.order == "low_first" else per_byte - 1 - i
            np.right_shift(raw, place * self.bits, out=entries[:, i])
        entries &= (1 << self.bits) - 1
        return entries.reshape(-1)


@dataclass(frozen=True)
class Numerics:
    """The choices in which systems that "support the same format" differ, a sentence each, for docs/formats.md."""

    ties: str
    zero_block: str
    scale_clamp: str
    zero_point: str
    reciprocal: str


@dataclass(frozen=True)
class Declaration:
    """A format as data.

    `blocking` is "flat" when blocks run over the row-major stream of elements across rows, "row" when every row is cut
    into whole blocks.  `tail` says what happens to a remainder: "short" stores a last block with fewer elements,
    "refuse" makes the shape an error.  `pad_code` fills the unused entries of the last byte of codes.
    `decode` gives the value of an element from its fields.
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
    pad_code: int = 0

    def __post_init__(self) -> None:
        if sum(f.covers == 1 for f in self.fields) != 1:
            raise ValueError("a format has exactly one field of codes")
        if self.decode.fields != {f.name for f in self.fields} or self.decode.uses_table != (self.table is not None):
            raise ValueError(f"the decode equation '{self.decode.text}' does not read exactly what the format declares")
        if len({f.offset is None for f in self.fields}) != 1:
            raise ValueError("either every field has an offset in the block's record, or none has")
        for f in self.fields:
            self._check_field(f)

    def _check_field(self, f: Field) -> None:
        if self.block == "row":
            if f.bits < 8 or f.covers not in (1, "row") or f.offset is not None:
                raise ValueError(f"field {f.name!r}: with one block per row, entries are whole bytes, one or K per row")
        elif f.covers == "row" or self.block % f.covers or (self.block // f.covers * f.bits) % 8:
            raise ValueError(f"field {f.name!r}: its entries do not fill whole bytes in a block of {self.block}")

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

    def block_size(self, cols: int) -> int:
        """Elements per block, for rows of `cols` elements."""
        return cols if self.block == "row" else self.block

    def entries_per_block(self, f: Field, cols: int) -> int:
        block = self.block_size(cols)
        return 1 if f.covers == "row" else block // f.covers

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record, for an interleaved format."""
        ends = (f.offset + self.entries_per_block(f, 0) * f.bits // 8 for f in self.fields if f.offset is not None)
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
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        sections.append(Section(name, dtype, shape, offset, nbytes))
        end = offset + nbytes
    return tuple(sections)


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantised matrix of (rows, cols) elements: codes, scales and zero points in one buffer of canonical bytes."""

    format: Format
    rows: int
    cols: int
    data: Bytes = dataclass_field(repr=False)

    def __post_init__(self) -> None:
        expected = self.format.nbytes(self.rows, self.cols)
        if self.data.dtype != np.uint8 or self.data.shape != (expected,):
            raise FormatError(
                f"a {self.format} tensor of {self.rows} x {self.cols} has {expected} bytes (uint8, one dimension); "
                f"got {self.data.dtype} of shape {self.data.shape}"
            )

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        return self.data.tobytes()

    def section(self, name: str) -> Entries:
        """A view of one section, with the section's dtype and shape."""
        for s in self.format.sections(self.rows, self.cols):
            if s.name == name:
                return self.data[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape)
        known = ", ".join(s.name for s in self.format.sections(self.rows, self.cols))
        raise FormatError(f"{self.format} has no section {name!r}; it has {known}")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a format: its default, every value it may take, and what it means."""

    name: str
    default: ParamValue
    choices: tuple[ParamValue, ...]
    meaning: str


# --- formats ---------------------------------------------------------------------------------------------------------


class Format(ABC):
    """A storage format with its parameters fixed. Equal name and params means equal format.

    Subclasses give `name`, `parameters`, `declare` and `_encode_tile`; instances come from `qcompiler.formats.get`.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]

    def __init__(self, **params: ParamValue) -> None:
        """Takes any of `parameters`; the rest get their defaults. UnknownFormatError for a name or value not listed."""
        known = {p.name: p for p in self.parameters}
        for key, value in params.items():
            if key not in known:
                raise UnknownFormatError(
                    f"format '{self.name}' has no parameter {key!r}; it takes: {', '.join(known) or 'none'}"
                )
            # True == 1 in Python, so the type is compared too: symmetric=1 and block=True are mistakes.
            if (type(value), value) not in [(type(c), c) for c in known[key].choices]:
                choices = ", ".join(map(repr, known[key].choices))
                raise UnknownFormatError(f"format '{self.name}': {key}={value!r} is not one of {choices}")
        self.params: dict[str, ParamValue] = {p.name: params.get(p.name, p.default) for p in self.parameters}
        self.declaration = self.declare()

    @abstractmethod
    def declare(self) -> Declaration:
        """The format's page of data, for `self.params`."""

    @abstractmethod
    def _encode_tile(self, weights: Weights, packed: PackedTensor, start: int, tile: Float32) -> None:
        """Encodes the elements [start, start + tile.size) of the flattened matrix into their place in `packed`.

        `tile` holds their fp32 values.  A tile begins with a block; only the matrix's last one may end inside of one.
        Tiles are encoded in any order and at the same time; `weights`, the C-contiguous matrix, is for messages.
        """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and (self.name, self.params) == (other.name, other.params)

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.params.items())))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.params.items())})"

    # --- sizes ---

    def check_shape(self, rows: int, cols: int) -> None:
        """FormatShapeError unless the format can store a matrix of (rows, cols)."""
        if rows < 1 or cols < 1:
            raise FormatShapeError(f"{self} cannot store an empty matrix ({rows} x {cols})")
        if self.declaration.tail == "refuse" and cols % self.declaration.block_size(cols):
            raise FormatShapeError(self._shape_message(cols))

    def _shape_message(self, cols: int) -> str:
        return f"{self} stores rows of whole blocks of {self.declaration.block}, and K = {cols} is not a multiple of it"

    def sections(self, rows: int, cols: int) -> tuple[Section, ...]:
        """The sections of a tensor of (rows, cols) in storage order. FormatShapeError where the shape does not fit."""
        self.check_shape(rows, cols)
        d = self.declaration
        elements, block = rows * cols, d.block_size(cols)
        blocks = -(-elements // block)
        if d.interleaved:
            shape = (rows, cols // block) if d.blocking == "row" else (blocks,)
            return place_sections([("blocks", np.dtype("u1"), (*shape, d.record_bytes))], 1)
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for f in d.fields:
            if d.blocking == "row":
                per_row = (cols // block) * d.entries_per_block(f, cols)
                parts.append((f.name, f.dtype, (rows, -(-per_row * f.bits // 8) // f.dtype.itemsize)))
            else:
                entries = -(-elements // (block // d.entries_per_block(f, cols)))
                parts.append((f.name, f.dtype, (-(-entries * f.bits // 8) // f.dtype.itemsize,)))
        return place_sections(parts, 1)

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a tensor of (rows, cols), all sections and gaps included."""
        last = self.sections(rows, cols)[-1]
        return last.offset + last.nbytes

    def bits_per_weight(self, rows: int, cols: int) -> float:
        """All stored bits divided by the number of elements."""
        return 8 * self.nbytes(rows, cols) / (rows * cols)

    # --- encode and decode ---

    def encode(self, weights: Weights, *, out: Bytes | None = None, threads: int = 1) -> PackedTensor:
        """Quantises a matrix (rows, cols) of float32, float16, bfloat16 or float64 (rounded to float32 first).

        `out` are zeroed bytes to write into (uint8, `nbytes(rows, cols)` of them), of a mapped file for instance.
        Beside the result this takes a few tiles of memory per thread, and a copy of weights that are not C-contiguous.
        The bytes do not depend on `threads`.

        FormatShapeError for a shape that does not fit, FormatValueError for another dtype, for NaN and infinity, and
        for a scale that its storage cannot hold; the message names the row and the column.
        """
        weights = np.asarray(weights)
        if weights.ndim != 2:
            raise FormatShapeError(f"{self} stores matrices (rows, cols); got an array of shape {weights.shape}")
        if weights.dtype not in _WEIGHT_DTYPES:
            names = ", ".join(t.name for t in _WEIGHT_DTYPES)
            raise FormatValueError(f"{self} encodes weights of {names}; got {weights.dtype}")
        rows, cols = weights.shape
        packed = self.allocate(rows, cols) if out is None else PackedTensor(self, rows, cols, out)
        weights = np.ascontiguousarray(weights)
        flat, block = weights.reshape(-1), self.declaration.block_size(cols)
        count = min(threads, -(-flat.size // THREAD_SHARE))
        if count < 2:
            self._encode_range(weights, packed, flat, 0, flat.size)
            return packed
        share = -(-flat.size // (count * block)) * block
        with ThreadPoolExecutor(count) as pool:  # NumPy lets go of the interpreter lock in its loops
            work = [
                pool.submit(self._encode_range, weights, packed, flat, first, min(first + share, flat.size))
                for first in range(0, flat.size, share)
            ]
        for each in work:
            each.result()  # of several errors the one that is met first in the matrix
        return packed

    def _encode_range(self, weights: Weights, packed: PackedTensor, flat: Weights, first: int, end: int) -> None:
        for start, tile in float32_tiles(flat[first:end], self.declaration.block_size(packed.cols)):
            self._encode_tile(weights, packed, first + start, tile)

    def allocate(self, rows: int, cols: int) -> PackedTensor:
        """A tensor of zero bytes, to be filled section by section."""
        return PackedTensor(self, rows, cols, np.zeros(self.nbytes(rows, cols), np.uint8))

    def decode(self, packed: PackedTensor) -> Float32:
        """The values, float32 (rows, cols), by the declared equation. This is the definition of the format."""
        if packed.format != self:
            raise FormatError(f"{self} cannot decode a tensor of format {packed.format}")
        d = self.declaration
        elements, block = packed.rows * packed.cols, d.block_size(packed.cols)
        blocks = -(-elements // block)
        step = 8 * -(-TILE // (8 * block))  # a multiple of 8 blocks starts at a whole byte in every field
        out = np.empty(elements, np.float32)
        for first in range(0, blocks, step):
            stop = min(first + step, blocks)
            entries = {f.name: self._entries(packed, f, first, stop) for f in d.fields}
            values = d.decode.evaluate(entries, d.table_array).reshape(-1)
            end = min(stop * block, elements)
            out[first * block : end] = values[: end - first * block]
        return out.reshape(packed.rows, packed.cols)

    def _entries(self, packed: PackedTensor, f: Field, first: int, stop: int) -> Entries:
        """Entries of blocks [first, stop), shaped (blocks, block) or (blocks, 1); a short last block is zero-filled."""
        d = self.declaration
        per_block = d.entries_per_block(f, packed.cols)
        count = (stop - first) * per_block
        if f.offset is not None:
            records = packed.data.reshape(-1, d.record_bytes)[first:stop]
            raw = np.ascontiguousarray(records[:, f.offset : f.offset + per_block * f.bits // 8]).reshape(-1)
        else:
            stored = packed.section(f.name).reshape(-1).view(np.uint8)
            raw = stored[first * per_block * f.bits // 8 : -(-stop * per_block * f.bits // 8)]
        entries = f.unpack(raw)[:count]
        if entries.size < count:
            entries = np.concatenate([entries, np.zeros(count - entries.size, entries.dtype)])
        entries = entries.reshape(stop - first, per_block)
        block = d.block_size(packed.cols)
        return entries if per_block in (1, block) else np.repeat(entries, block // per_block, axis=1)


# --- what encoders share ---------------------------------------------------------------------------------------------


def float32_tiles(elements: Weights, multiple: int) -> Iterator[tuple[int, Float32]]:
    """Tiles of a 1-D array as (start, fp32 values), each about `TILE` elements and a multiple of `multiple` long.

    The last tile may be shorter.  float32 input is not copied; float64 beyond fp32's range becomes infinite.
    """
    step = multiple * max(1, TILE // multiple)
    for start in range(0, elements.size, step):
        with np.errstate(over="ignore"):
            yield start, elements[start : start + step].astype(np.float32, copy=False)


def refuse_nonfinite(fmt: Format, weights: Weights, tile: Float32, start: int) -> None:
    """Raises FormatValueError naming the first element of `tile` (at flat position `start`) that is not finite."""
    position = start + int(np.flatnonzero(~np.isfinite(tile))[0])
    row, col = divmod(position, weights.shape[1])
    value = weights[row, col]
    why = "exceeds the range of fp32" if np.isfinite(value) else "is not a finite number"
    raise FormatValueError(
        f"the weight at row {row}, column {col} is {value}, which {why}; {fmt} cannot store it. "
        "Repair the checkpoint, or leave this parameter unquantised"
    )
