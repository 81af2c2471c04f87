"""Everything that follows from a declaration: sections, byte counts, bits per weight, the decoder, the encoding loop.

A format is declared as data (declaration.py): how elements are grouped into blocks, the fields of a block with their
numbers of bits, and the equation that turns them into values.  This module derives everything else, once for every
format; only encoders are code of their own.  **The decoder is the definition** of a format's meaning: kernels are
compared with it.

Canonical bytes are the sections in declared order, each starting at a multiple of its item size (gap bytes are zero).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatShapeError, FormatValueError, UnknownFormatError
from qcompiler.formats.declaration import Bytes, Declaration, Field, Kind, Numerics, Section, place_sections
from qcompiler.formats.equation import Entries, Float32
from qcompiler.formats.made import MadeMatrix

__all__ = [
    "Bytes", "Declaration", "Encoding", "Field", "Format", "Kind", "Numerics", "PackedTensor", "ParamValue",
    "Parameter", "Section", "Weights", "absmax_of_all", "float32_tiles", "place_sections", "refuse_nonfinite",
]  # fmt: skip

Weights = npt.NDArray[Any]  # float32, float16, float64 or ml_dtypes.bfloat16
ParamValue = int | bool | str

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WEIGHT_DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64))

THREAD_SHARE = 1 << 21
"""From this many elements on, another thread pays for its start."""

TILE = 1 << 16
"""Elements that an encoder or decoder handles at a time: 256 KiB of fp32, so that a tile stays in a core's L2 cache."""


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
    """A parameter of a format: its default, every value it may take, and what it means.

    `later` marks a parameter that was added after programs had been saved.  At its default it is left out of
    `Format.params`, of names and of files, so that these do not change.  `shown` marks a parameter that changes the
    stored data: each of its values is documented below docs/formats/ and is a case of the tests.  Booleans always are.
    """

    name: str
    default: ParamValue
    choices: tuple[ParamValue, ...]
    meaning: str
    later: bool = False
    shown: bool = False


@dataclass(frozen=True, eq=False)
class Encoding:
    """A matrix that is being encoded: the data that all tiles share.

    `weights` is the C-contiguous matrix (rows, cols), `packed` receives the bytes.  `importance` are fp32 weights
    (cols,) of the squared error of each column, or None.  `notes` holds results of `_begin` that `_encode_tile` or
    `_end` needs.  `tiles` are another implementation's tiles, or None.
    """

    weights: Weights
    packed: PackedTensor
    importance: Float32 | None = None
    notes: dict[str, Any] = dataclass_field(default_factory=dict)
    tiles: TileEncoder | None = None


TileEncoder = Callable[[Encoding, int, Float32], bool]
"""Another implementation of `Format._encode_tile` with the same bytes: (job, start, tile). It returns False for a tile
that it leaves to `_encode_tile`, such as one with an element that no format stores."""


# --- formats ---------------------------------------------------------------------------------------------------------


class Format(ABC):
    """A storage format with its parameters fixed. Equal name and params means equal format.

    Subclasses define `name`, `parameters`, `declare` and `_encode_tile`; `qcompiler.formats.get` makes instances.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    @property
    def takes_importance(self) -> bool:
        """Whether the encoder searches for scales, and so can weight the error of each column."""
        return False

    def __init__(self, /, **params: ParamValue) -> None:
        """Takes any of `parameters`; the rest get their defaults. UnknownFormatError for an unlisted name or value."""
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
        self._settings: dict[str, ParamValue] = {p.name: params.get(p.name, p.default) for p in self.parameters}
        self.params: dict[str, ParamValue] = {
            name: value
            for name, value in self._settings.items()
            if not (known[name].later and value == known[name].default)
        }
        self.declaration = self.declare()

    def setting(self, name: str) -> ParamValue:
        """The value of a parameter, including one that `params` leaves out at its default."""
        return self._settings[name]

    @abstractmethod
    def declare(self) -> Declaration:
        """The format's declaration, for its settings."""

    def _begin(self, job: Encoding) -> None:  # noqa: B027 - most formats have nothing to do here
        """Runs before the first tile: computes what depends on the whole matrix."""

    @abstractmethod
    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        """Encodes the elements [start, start + tile.size) of the flattened matrix into their place in `job.packed`.

        `tile` holds their fp32 values.  A tile begins at the start of a block (of whole blocks of rows, where an entry
        serves several rows); only the last tile of the matrix may end inside a block.  Tiles are encoded in any order
        and concurrently.
        """

    def _end(self, job: Encoding) -> None:  # noqa: B027 - most formats have nothing to do here
        """Runs after the last tile: computes what depends on all of them."""

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
        """The sections of a tensor of (rows, cols) in storage order. FormatShapeError if the shape does not fit."""
        self.check_shape(rows, cols)
        d = self.declaration
        elements, block = rows * cols, d.block_size(cols)
        blocks = -(-elements // block)
        if d.interleaved:
            shape: tuple[int, ...] = (rows, cols // block) if d.blocking == "row" else (blocks,)
            return place_sections([("blocks", np.dtype("u1"), (*shape, d.record_bytes))], 1)
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for f in d.fields:
            shape = (1,) if f.covers == "tensor" else self._shape_of(f, rows, cols)
            parts.append((f.name, f.dtype, (*shape[:-1], f.nbytes(shape[-1]) // f.dtype.itemsize)))
        return place_sections(parts, 1)

    def _shape_of(self, f: Field, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of a field's entries: (rows of entries, …) where rows are cut into blocks, else one dimension."""
        if f.covers == "row":
            return (-(-rows // f.rows), 1)
        covers = int(f.covers)
        if self.declaration.blocking == "flat":
            return (-(-rows * cols // covers),)
        return (-(-rows // f.rows), -(-cols // covers))

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a tensor of (rows, cols), all sections and gaps included."""
        last = self.sections(rows, cols)[-1]
        return last.offset + last.nbytes

    def bits_per_weight(self, rows: int, cols: int) -> float:
        """All stored bits divided by the number of elements."""
        return 8 * self.nbytes(rows, cols) / (rows * cols)

    # --- encode and decode ---

    def encode(
        self,
        weights: Weights,
        *,
        out: Bytes | None = None,
        threads: int = 1,
        importance: npt.ArrayLike | None = None,
        tiles: TileEncoder | None = None,
    ) -> PackedTensor:
        """Quantises a matrix (rows, cols) of float32, float16, bfloat16 or float64 (rounded to float32 first).

        `out` are zeroed bytes to write into (uint8, `nbytes(rows, cols)` of them), for instance of a mapped file.
        In addition to the result this takes a few tiles of memory per thread, and a copy of weights that are not
        C-contiguous.  The bytes do not depend on `threads`.  `importance` (cols,) weights the squared error of each
        column in formats that search for their scales (`takes_importance`); the mean square of a layer's inputs is the
        usual choice.  `tiles` are compiled tiles (from `qcompiler.runtime.encoder.encode`), with the same bytes and
        errors.

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
        job = Encoding(np.ascontiguousarray(weights), packed, self._checked_importance(importance, cols), tiles=tiles)
        self._begin(job)
        self._encode_tiles(job, threads)
        self._end(job)
        return packed

    def encode_made(
        self,
        weights: MadeMatrix,
        *,
        out: Bytes | None = None,
        importance: npt.ArrayLike | None = None,
        tiles: TileEncoder | None = None,
    ) -> PackedTensor:
        """Quantises a matrix that is computed piece by piece: the bytes and errors of `encode`, with little memory.

        Formats with statistics of the whole tensor read it twice.
        """
        rows, cols = weights.shape
        packed = self.allocate(rows, cols) if out is None else PackedTensor(self, rows, cols, out)
        job = Encoding(cast("Weights", weights), packed, self._checked_importance(importance, cols), tiles=tiles)
        self._begin(job)
        multiple = self.tile_multiple(cols)
        step = multiple * max(1, weights.piece // multiple)
        for start in range(0, weights.size, step):
            elements = weights.reshape(-1)[start : start + step]
            self._encode_range(job, elements, start)
        self._end(job)
        return packed

    def _checked_importance(self, importance: npt.ArrayLike | None, cols: int) -> Float32 | None:
        if importance is None:
            return None
        if not self.takes_importance:
            raise FormatError(f"{self} does not search for its scales, so that an importance of columns means nothing")
        found = np.ascontiguousarray(importance, np.float32)
        if found.shape != (cols,) or not np.isfinite(found).all() or (found < 0).any():
            raise FormatValueError(f"the importance of {cols} columns is {cols} finite numbers >= 0; got {found.shape}")
        return found

    def tile_multiple(self, cols: int) -> int:
        """A tile's size is a multiple of this: a block, a row with one entry, or the rows that share an entry."""
        d = self.declaration
        rows = max(f.rows for f in d.fields)
        whole_rows = rows > 1 or any(f.covers == "row" for f in d.fields)
        return rows * cols if whole_rows else d.block_size(cols)

    def _encode_tiles(self, job: Encoding, threads: int) -> None:
        flat, multiple = job.weights.reshape(-1), self.tile_multiple(job.packed.cols)
        count = min(threads, -(-flat.size // THREAD_SHARE))
        if count < 2:
            self._encode_range(job, flat, 0)
            return
        share = -(-flat.size // (count * multiple)) * multiple
        with ThreadPoolExecutor(count) as pool:  # NumPy releases the interpreter lock in its loops
            work = [
                pool.submit(self._encode_range, job, flat[first : first + share], first)
                for first in range(0, flat.size, share)
            ]
        for each in work:
            each.result()  # raises the error that comes first in the matrix

    def _encode_range(self, job: Encoding, elements: Weights, first: int) -> None:
        """Encodes consecutive elements of the flattened matrix; the first is at position `first`."""
        for start, tile in float32_tiles(elements, self.tile_multiple(job.packed.cols)):
            if job.tiles is None or not job.tiles(job, first + start, tile):
                self._encode_tile(job, first + start, tile)

    def allocate(self, rows: int, cols: int) -> PackedTensor:
        """A tensor of zero bytes, to be filled section by section."""
        return PackedTensor(self, rows, cols, np.zeros(self.nbytes(rows, cols), np.uint8))

    def decode(self, packed: PackedTensor) -> Float32:
        """The values, float32 (rows, cols), by the declared equation. This is the definition of the format."""
        if packed.format != self:
            raise FormatError(f"{self} cannot decode a tensor of format {packed.format}")
        return self.decode_rows(packed, 0, packed.rows)

    def decode_rows(self, packed: PackedTensor, first: int, stop: int) -> Float32:
        """The values of the rows [first, stop), float32 (stop - first, cols): the same bits as `decode`'s."""
        d, cols = self.declaration, packed.cols
        if not 0 <= first <= stop <= packed.rows:
            raise FormatShapeError(f"a tensor of {packed.rows} rows has no rows {first}…{stop}")
        out = np.empty((stop - first, cols), np.float32)
        if d.blocking == "row":  # whole rows at a time
            step = max(1, TILE // cols)
            step = -(-step // 8) * 8 if packed.rows > step else step
            for begin in range(first, stop, step):
                end = min(begin + step, stop)
                entries = self.entries_of_rows(packed, begin, end)
                out[begin - first : end - first] = d.decode.evaluate(entries, d.table_arrays)
            return out
        flat, skip = out.reshape(-1), first * cols
        aligned = skip - skip % 8  # a multiple of 8 elements starts at a whole byte in every field
        for begin in range(aligned, stop * cols, 8 * -(-TILE // 8)):
            end = min(begin + 8 * -(-TILE // 8), stop * cols)
            entries = {f.name: self._flat_entries(packed, f, begin, end) for f in d.fields}
            flat[max(begin - skip, 0) : end - skip] = d.decode.evaluate(entries, d.table_arrays)[max(skip - begin, 0) :]
        return out

    def entries(self, packed: PackedTensor, name: str) -> Entries:
        """All stored entries of a field, (rows of entries, per row) or (n,): integer codes, scales in their dtype."""
        f = next((f for f in self.declaration.fields if f.name == name), None)
        if f is None:
            raise FormatError(
                f"{self} has no field {name!r}; it has {', '.join(f.name for f in self.declaration.fields)}"
            )
        if f.covers == "tensor":
            return packed.section(name)
        shape = self._shape_of(f, packed.rows, packed.cols)
        if len(shape) == 1:
            return f.unpack(packed.section(name).reshape(-1).view(np.uint8))[: shape[0]]
        return self._stored_rows(packed, f, 0, shape[0])

    def entries_of_rows(self, packed: PackedTensor, first: int, stop: int) -> dict[str, Entries]:
        """Every field's entries for the rows [first, stop), by name, shaped so that they broadcast to
        (stop - first, cols). The codes of a trellis become windows, as the decode equation takes them.

        Blocks must lie in rows: by declaration, or since the rows are whole blocks.
        """
        d, cols = self.declaration, packed.cols
        if d.blocking == "row":
            return {f.name: self._row_entries(packed, f, first, stop) for f in d.fields}
        if cols % d.block_size(cols):
            raise FormatShapeError(f"rows of {cols} elements are not whole blocks of {self}")
        found = {f.name: self._flat_entries(packed, f, first * cols, stop * cols) for f in d.fields}
        return {name: each if each.size == 1 else each.reshape(stop - first, cols) for name, each in found.items()}

    def _flat_entries(self, packed: PackedTensor, f: Field, first: int, stop: int) -> Entries:
        """The entry of each of the elements [first, stop), or one entry for all."""
        if f.covers == "tensor":
            return packed.section(f.name)
        covers = int(f.covers)
        low, high = first // covers, -(-stop // covers)
        stored = packed.section(f.name).reshape(-1).view(np.uint8)
        begin = low * f.bits // 8  # `first` is a multiple of 8 elements, and wider entries are of whole bytes
        entries = f.unpack(stored[begin : begin + -(-(high - low) * f.bits // 8)])[: high - low]
        return entries if covers == 1 else np.repeat(entries, covers)[first - low * covers : stop - low * covers]

    def _row_entries(self, packed: PackedTensor, f: Field, first: int, stop: int) -> Entries:
        """The entries of rows [first, stop), shaped (rows, cols) or broadcastable to it."""
        if f.covers == "tensor":
            return packed.section(f.name).reshape(1, 1)
        entries = self._stored_rows(packed, f, first // f.rows, -(-stop // f.rows))
        if f.rows > 1:
            entries = np.repeat(entries, f.rows, axis=0)[first % f.rows :][: stop - first]
        if isinstance(f.covers, int) and f.covers > 1:
            entries = np.repeat(entries, f.covers, axis=1)
        entries = entries[:, : packed.cols]
        trellis = self.declaration.trellis
        return trellis.windows(entries) if trellis is not None and f.covers == 1 else entries

    def _stored_rows(self, packed: PackedTensor, f: Field, first: int, stop: int) -> Entries:
        """Rows [first, stop) of a field's entries, as stored."""
        if f.offset is not None:
            records = packed.section("blocks")[first:stop]
            size = f.nbytes(self.declaration.entries_per_block(f, packed.cols))
            raw = np.ascontiguousarray(records[:, :, f.offset : f.offset + size])
        else:
            stored = packed.section(f.name)
            raw = stored.reshape(-1).view(np.uint8).reshape(len(stored), -1)[first:stop]
        entries = f.unpack(raw.reshape(-1)).reshape(stop - first, -1)
        return entries[:, : self._shape_of(f, packed.rows, packed.cols)[-1]]

    def store(self, packed: PackedTensor, first_block: int, entries: Mapping[str, Entries]) -> None:
        """Writes fields of consecutive blocks, counted row by row: each array is (blocks, entries per block).

        For encoders of formats whose rows are cut into whole blocks.  Bits of other fields do not change.
        """
        for f in self.declaration.fields:
            if f.name not in entries:
                continue
            given = entries[f.name]
            raw = f.pack(np.ascontiguousarray(given).reshape(-1)).reshape(len(given), -1)
            if f.offset is not None:
                records = packed.data.reshape(-1, self.declaration.record_bytes)
                place = records[first_block : first_block + len(given), f.offset : f.offset + raw.shape[1]]
                place[:] = raw if f.others is None else place & f.others | raw
            else:
                stored = packed.section(f.name).reshape(-1).view(np.uint8)
                stored[first_block * raw.shape[1] : (first_block + len(given)) * raw.shape[1]] = raw.reshape(-1)


# --- helpers of encoders ---------------------------------------------------------------------------------------------


def float32_tiles(elements: Weights, multiple: int) -> Iterator[tuple[int, Float32]]:
    """Tiles of a 1-D array as (start, fp32 values), each about `TILE` elements and a multiple of `multiple` long.

    The last tile may be shorter.  float32 input is not copied; float64 beyond fp32's range becomes infinite.
    """
    step = multiple * max(1, TILE // multiple)
    for start in range(0, elements.size, step):
        tile = elements[start : start + step]
        if tile.dtype == _BFLOAT16:  # widening the bits is several times as fast as a cast
            wide = tile.view(np.uint16).astype(np.uint32)
            wide <<= np.uint32(16)
            yield start, wide.view(np.float32)
        else:
            with np.errstate(over="ignore"):
                yield start, tile.astype(np.float32, copy=False)


def absmax_of_all(fmt: Format, weights: Weights) -> np.float32:
    """The largest magnitude of a matrix, as fp32; FormatValueError naming the first element that is not finite."""
    found = np.float32(0)
    for start, tile in float32_tiles(weights.reshape(-1), 1):
        largest = np.maximum(tile.max(), -tile.min())
        if not np.isfinite(largest):
            refuse_nonfinite(fmt, weights, tile, start)
        found = np.maximum(found, largest)
    return found


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
