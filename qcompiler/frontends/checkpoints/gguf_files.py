"""GGUF files, read as mappings and written tensor by tensor.

    "GGUF"  u32 version  u64 tensors  u64 keys
    each key:     string name, u32 type, value                         string: u64 length, UTF-8; array: u32 type, u64 n
    each tensor:  string name, u32 dims, u64 sizes (innermost first), u32 type, u64 offset from the data's beginning
    then the data, every tensor at a multiple of `general.alignment` (32)

Versions 2 and 3, little-endian.  Quantised tensors are the canonical bytes of our formats of the same name, so a view
of the file is a packed tensor.  Source: ggml's docs/gguf.md; type numbers from gguf-py 0.19, constants.py.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler import formats
from qcompiler.errors import FormatError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign.json_text import open_regular, shown
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.runtime.files import replacing
from qcompiler.runtime.progress import Progress

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 32
MAX_DIMS = 4  # ggml's own limit
MAX_SIZE = 1 << 48
"""Maximum elements of a tensor: no file is as large."""
LONGEST_NAME = 1024
MAX_PARTS = 4096
"""Maximum parts of a model; names of parts have five figures, and each part is mapped."""
MAX_ALIGNMENT = 1 << 20

FLOATS: dict[int, np.dtype[Any]] = {
    0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16), 28: np.dtype(np.float64),
    24: np.dtype(np.int8), 25: np.dtype(np.int16), 26: np.dtype(np.int32), 27: np.dtype(np.int64),
}  # fmt: skip
"""Types of GGUF whose values are stored one by one."""

PACKED: dict[int, Format] = {
    cls.ggml_type: cls() for cls in formats.FORMATS.values() if issubclass(cls, GgmlFormat) and not cls.parameters
}
"""Types of GGUF that are formats here."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Refused types of GGUF, for the message."""

_SCALARS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ARRAYS = {np.dtype(np.int32): 5, np.dtype(np.float32): 6}
"""Types of arrays that are written with a fixed type, since readers require it."""


def type_name(number: int) -> str:
    """The name of a type: our format's, a number type's, or GGUF's own."""
    if number in PACKED:
        return PACKED[number].name
    return FLOATS[number].name if number in FLOATS else OTHER_TYPES.get(number, f"number {number}")


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: `shape` is NumPy's (innermost last), `start` counts bytes from the file's beginning."""

    file: GgufFile
    name: str
    shape: tuple[int, ...]
    type: int
    start: int

    @property
    def format(self) -> Format | None:
        """The format of its codes; None for plain values."""
        return PACKED.get(self.type)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        fmt = self.format
        return (
            fmt.nbytes(self.rows, self.cols) if fmt is not None else math.prod(self.shape) * FLOATS[self.type].itemsize
        )

    def bytes(self) -> Bytes:
        """The stored bytes, in the mapped file."""
        return self.file.mapped()[self.start : self.start + self.nbytes]

    def packed(self) -> PackedTensor:
        """The codes as a matrix of all rows, in the mapped file. FormatError for plain values."""
        fmt = self.format
        if fmt is None:
            raise FormatError(f"'{self.name}' in {self.file.path} is {type_name(self.type)}, not quantised")
        return PackedTensor(fmt, self.rows, self.cols, self.bytes())

    def array(self) -> Array:
        """Plain values, in the mapped file. FormatError for codes."""
        if self.type not in FLOATS:
            raise FormatError(f"'{self.name}' in {self.file.path} is {type_name(self.type)}, not plain numbers")
        return self.bytes().view(FLOATS[self.type]).reshape(self.shape)

    def values(self) -> npt.NDArray[np.float32]:
        """The decoded values."""
        fmt = self.format
        found = self.array() if fmt is None else fmt.decode(self.packed()).reshape(self.shape)
        return found.astype(np.float32, copy=False)

    def identity(self) -> dict[str, Any]:
        """Identifies the bytes: equal only if the file is unchanged."""
        status = self.file.status
        return {
            "file": self.file.path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "name": self.name,
            "type": type_name(self.type), "shape": list(self.shape), "start": self.start,
        }  # fmt: skip

    def release(self) -> None:
        """Releases the touched pages; they are read again at the next touch."""
        self.file.release(self.start, self.nbytes)


@dataclass(frozen=True)
class _Value:
    """A value of the metadata: its type, its elements' type and number (arrays), and the bytes it takes."""

    type: int
    start: int
    end: int


class GgufFile:
    """The parsed header of a file; its data is mapped at the first touch.

    `metadata` decodes a key at each request: lists of a hundred thousand tokens cost nothing until then.
    WeightsError if the file is not GGUF, is truncated, has another version or byte order, or holds a tensor of a type
    that no format here reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mapping: mmap.mmap | None = None
        self._data: Bytes = np.zeros(0, np.uint8)
        try:
            with open_regular(self.path) as file:
                self.status = os.fstat(file.fileno())
                if not self.status.st_size:
                    raise WeightsError(f"{path} is empty: no GGUF file")
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writes do not reach the file
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise WeightsError(f"cannot read the GGUF file {path}: {error}") from error
        self._data = np.frombuffer(self._mapping, np.uint8)
        self._at = 0
        self.metadata: Metadata = Metadata(self)
        self.tensors: dict[str, GgufTensor] = {}
        self._read_header()

    # --- the header ---

    def _read_header(self) -> None:
        if self._take("<4s") != b"GGUF":
            raise WeightsError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        self.version = int(self._take("<I"))
        if self.version & 0xFFFF == 0:
            raise WeightsError(f"{self.path} is a big-endian GGUF file; convert it to little-endian with gguf's tools")
        if self.version not in (2, 3):
            raise WeightsError(f"{self.path} is GGUF version {self.version}; versions 2 and 3 are read")
        tensors, keys = int(self._take("<Q")), int(self._take("<Q"))
        for _ in range(keys):
            self._read_key()
        found = [self._read_tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise WeightsError(f"{self.path} says general.alignment is {shown(alignment)}, which is no power of two")
        self.data_start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            self._place(name, shape, kind, offset, alignment)

    def _take(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        if self._at + size > self._data.size:
            raise self._cut(f"in its header, at byte {self._at}")
        (value,) = struct.unpack_from(layout, self._mapping or b"", self._at)
        self._at += size
        return value

    def _cut(self, where: str) -> WeightsError:
        return WeightsError(f"{self.path} was cut off {where} of {self._data.size}; copy or download the file again")

    def _text(self) -> str:
        start, size = self._at + 8, int(self._take("<Q"))
        if size > self._data.size - start:
            raise self._cut(f"in its header: a text at byte {start} has {size} bytes")
        self._at += size
        try:
            text = bytes(self._data[start : start + min(size, 4 * LONGEST_NAME + 4)]).decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path} holds a name that is no UTF-8, at byte {start}: {shown(error)}") from error
        if len(text) > LONGEST_NAME:
            raise WeightsError(f"{self.path} holds a name of {size} bytes, at byte {start}: {shown(text)}")
        return text

    def _read_key(self) -> None:
        name, kind = self._text(), int(self._take("<I"))
        if name in self.metadata.values_:
            raise WeightsError(f"{self.path} holds the key {shown(name)} twice")
        start = self._at
        self._skip(kind, name)
        self.metadata.values_[name] = _Value(kind, start, self._at)

    def _skip(self, kind: int, name: str) -> None:
        if kind in _SCALARS:
            self._take(_SCALARS[kind])
        elif kind == _STRING:
            size = int(self._take("<Q"))  # this moves `_at`, too
            self._at += size
        elif kind == _ARRAY:
            inner, count = int(self._take("<I")), int(self._take("<Q"))
            if inner in _SCALARS:
                self._at += count * struct.calcsize(_SCALARS[inner])
            elif inner == _ARRAY:
                raise WeightsError(f"{self.path}: the key {shown(name)} is a list of lists, which is not read")
            elif inner == _STRING:
                for _ in range(count):  # each takes at least 8 bytes of the file
                    self._skip(inner, name)
            else:
                raise WeightsError(
                    f"{self.path}: the key {shown(name)} is a list of the type {inner}, which GGUF does not have"
                )
        else:
            raise WeightsError(f"{self.path}: the key {shown(name)} has the type {kind}, which GGUF does not have")
        if self._at > self._data.size:
            raise self._cut(f"in the value of its key {shown(name)}, at byte {self._at}")

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(), int(self._take("<I"))
        if dims > MAX_DIMS:
            raise WeightsError(f"{self.path}: {shown(name)} claims {dims} dimensions; GGUF has at most {MAX_DIMS}")
        sizes = [int(self._take("<Q")) for _ in range(dims)]
        return name, tuple(reversed(sizes)), int(self._take("<I")), int(self._take("<Q"))

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int, alignment: int) -> None:
        if name in self.tensors:
            raise WeightsError(f"{self.path} holds {shown(name)} twice")
        if kind not in FLOATS and kind not in PACKED:
            known = ", ".join(type_name(n) for n in sorted([*FLOATS, *PACKED]))
            raise WeightsError(
                f"{shown(name)} in {self.path} has the type {type_name(kind)}, which is not read; there are: {known}. "
                "Quantise the model again to one of these"
            )
        if offset % alignment:
            raise WeightsError(f"{shown(name)} in {self.path} is at {offset}, no multiple of its alignment {alignment}")
        if not 0 < math.prod(shape) <= MAX_SIZE:  # Python's integers: nothing wraps
            raise WeightsError(f"{shown(name)} in {self.path} has the shape {list(shape)}: no elements, or above 2^48")
        tensor = GgufTensor(self, name, shape, kind, self.data_start + offset)
        try:
            end = tensor.start + tensor.nbytes
        except FormatError as error:
            raise WeightsError(f"{shown(name)} in {self.path} has the shape {list(shape)}: {error}") from error
        if end > self._data.size:
            raise self._cut(f"in its data: {shown(name)} ends at byte {end}")
        self.tensors[name] = tensor

    # --- the data ---

    def mapped(self) -> Bytes:
        """The whole file as a private mapping: writes to it do not reach the file."""
        return self._data

    def release(self, start: int, nbytes: int) -> None:
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # advice only
            self._mapping.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.DOTALL)
"""Names of the parts that llama-gguf-split and publishers of large models write: model-00001-of-00003.gguf."""


def read_gguf(path: str | Path) -> GgufFile:
    """A file, or all parts of a model that was cut into several, of which the first one is named: its keys, and the
    tensors of all parts.

    WeightsError for another part than the first, for parts that are missing or do not belong together, and as for
    `GgufFile`.
    """
    file = GgufFile(path)
    count, number = (_of_split(file, key, usual) for key, usual in (("count", 1), ("no", 0)))
    if count <= 1:
        return file
    name = _PART.fullmatch(file.path.name)
    if number != 0 or name is None or int(name[2]) != 1 or int(name[4]) != count:
        raise WeightsError(
            f"{file.path} is part {number + 1} of {count} of a model; give the first one, which is called "
            f"…-00001-of-{count:05}.gguf, and keep the others beside it"
        )
    for each in range(1, count):
        part = GgufFile(file.path.with_name(f"{name[1]}{each + 1:05}{name[3]}{name[4]}{name[5]}"))
        if (_of_split(part, "count", 1), _of_split(part, "no", 0)) != (count, each):
            raise WeightsError(f"{part.path} is not part {each + 1} of {count}, as its name says")
        twice = sorted(set(part.tensors) & set(file.tensors))
        if twice:
            raise WeightsError(f"{part.path} holds {shown(twice[0])}, which a part before it holds, too")
        file.tensors.update(part.tensors)
    total = _of_split(file, "tensors.count", len(file.tensors))
    if total != len(file.tensors):
        raise WeightsError(f"{file.path} and its parts hold {len(file.tensors)} tensors, and it says {total}")
    return file


def _of_split(file: GgufFile, key: str, usual: int) -> int:
    """A number of the keys `split.*`."""
    value = file.metadata.get(f"split.{key}", usual)
    if type(value) is not int or value < 0 or (key == "count" and value > MAX_PARTS):
        raise WeightsError(f"{file.path}: the key 'split.{key}' is {shown(value)}, no number of parts")
    return value


class Metadata(Mapping[str, Any]):
    """The keys of a file. Values are numbers, texts, booleans or lists of them."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.values_: dict[str, _Value] = {}

    def __getitem__(self, name: str) -> Any:
        value = self.values_[name]
        return _decoded(value.type, memoryview(self.raw(name)[1]), 0, self._file.path)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)

    def raw(self, name: str) -> tuple[int, bytes]:
        """The type's number and the stored bytes of a value, for copying."""
        value = self.values_[name]
        return value.type, self._file.mapped()[value.start : value.end].tobytes()


def _decoded(kind: int, data: memoryview, at: int, path: Path) -> tuple[Any, int]:
    if kind in _SCALARS:
        layout = _SCALARS[kind]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    if kind == _STRING:
        size = struct.unpack_from("<Q", data, at)[0]
        try:
            return bytes(data[at + 8 : at + 8 + size]).decode(), at + 8 + size
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path} holds a text that is no UTF-8: {shown(error)}") from error
    inner, count = struct.unpack_from("<IQ", data, at)
    at, items = at + 12, []
    if inner in _SCALARS:
        layout = f"<{count}{_SCALARS[inner][1]}"
        return list(struct.unpack_from(layout, data, at)), at + struct.calcsize(layout)
    for _ in range(count):
        item, at = _decoded(inner, data, at, path)
        items.append(item)
    return items, at


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: `shape` as in NumPy, and a function that makes its bytes when it is written."""

    shape: tuple[int, ...]
    type: int
    make: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        fmt = PACKED.get(self.type)
        if fmt is None:
            return math.prod(self.shape) * FLOATS[self.type].itemsize
        return fmt.nbytes(math.prod(self.shape[:-1]), self.shape[-1])

    @classmethod
    def of(cls, name: str, value: PackedTensor | Array) -> NewTensor:
        """From a packed matrix of a GGUF format, or plain values. FormatError for anything that GGUF cannot hold."""
        if isinstance(value, PackedTensor):
            if not isinstance(value.format, GgmlFormat):
                known = ", ".join(fmt.name for fmt in PACKED.values())
                raise FormatError(f"'{name}' is {value.format}, which GGUF files do not hold; they hold {known}")
            return cls((value.rows, value.cols), value.format.ggml_type, lambda: value.data)
        array = np.ascontiguousarray(value)
        kinds = [number for number, dtype in FLOATS.items() if dtype == array.dtype]
        if not kinds or array.ndim > MAX_DIMS:
            known = ", ".join(dtype.name for dtype in FLOATS.values())
            raise FormatError(
                f"'{name}' is {array.dtype} with {array.ndim} dimensions; GGUF files hold up to {MAX_DIMS} of {known}"
            )
        return cls(array.shape, kinds[0], lambda: array.reshape(-1).view(np.uint8))


def write_gguf(
    path: str | Path,
    tensors: Mapping[str, PackedTensor | Array | NewTensor],
    metadata: Mapping[str, Any] | Metadata | None = None,
) -> None:
    """Writes a GGUF file, version 3: packed tensors of GGUF formats unchanged, and plain values.

    `metadata` are numbers, texts, booleans and lists of one type each (loaders first read "general.architecture"); the
    metadata of a `GgufFile` is copied byte by byte.  The file gets its name when it is completely on the disk.
    FormatError names what GGUF cannot hold.
    """
    new = {name: t if isinstance(t, NewTensor) else NewTensor.of(name, t) for name, t in tensors.items()}
    keys = _keys(metadata or {})
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(new), len(keys)))
    for name, (kind, raw) in keys.items():
        header += _string(name) + struct.pack("<I", kind) + raw
    offset, places = 0, []
    for name, tensor in new.items():
        sizes = tuple(reversed(tensor.shape))
        header += _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.type, offset)
        places.append(offset)
        offset = _aligned(offset + tensor.nbytes)
    with Progress(f"writing {Path(path).name}", offset) as progress, replacing(path) as file:
        file.write(header + bytes(_aligned(len(header)) - len(header)))
        for tensor in new.values():
            data = tensor.make()
            if data.nbytes != tensor.nbytes:
                raise FormatError(f"a tensor of {tensor.nbytes} bytes was given {data.nbytes}")
            file.write(data.data)
            file.write(bytes(_aligned(data.nbytes) - data.nbytes))
            progress.step(data.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _keys(metadata: Mapping[str, Any]) -> dict[str, tuple[int, bytes]]:
    """Each key's type and bytes; an alignment other than ours is left out."""
    names = [name for name in metadata if name != "general.alignment"]
    if isinstance(metadata, Metadata):
        return {name: metadata.raw(name) for name in names}
    return {name: _encoded(name, metadata[name]) for name in names}


def _encoded(name: str, value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int | np.integer):
        kind = next((k for k in (4, 5, 10, 11) if _fits(int(value), _SCALARS[k])), None)
        if kind is None:
            raise FormatError(f"the key '{name}' is {value}, which no integer of GGUF holds")
        return kind, struct.pack(_SCALARS[kind], int(value))
    if isinstance(value, float | np.floating):
        return 6, struct.pack("<f", float(value))
    if isinstance(value, str):
        return _STRING, _string(value)
    if isinstance(value, np.ndarray) and value.dtype in _ARRAYS:
        return _ARRAY, struct.pack("<IQ", _ARRAYS[value.dtype], value.size) + value.tobytes()
    if isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.ndim == 1:
        return _ARRAY, struct.pack("<IQ", _STRING, value.size) + b"".join(map(_string, value.tolist()))
    if isinstance(value, Sequence) and value:
        return _ARRAY, _list(name, value)
    raise FormatError(f"the key '{name}' is {value!r}; GGUF holds numbers, texts, booleans and lists of one of them")


def _fits(value: int, layout: str) -> bool:
    try:
        struct.pack(layout, value)
    except struct.error:
        return False
    return True


def _list(name: str, values: Sequence[Any]) -> bytes:
    """An array's bytes: all of one type, integers as wide as the widest value needs."""
    items = [_encoded(name, value) for value in values]
    kinds = {kind for kind, _ in items}
    if kinds <= {4, 5, 10, 11} and len(kinds) > 1:
        wide = 11 if any(value < 0 for value in values) else 10
        items = [(wide, struct.pack(_SCALARS[wide], value)) for value in values]
        kinds = {wide}
    if len(kinds) > 1 or _ARRAY in kinds:
        raise FormatError(f"the key '{name}' is a list of several types or of lists; GGUF has lists of one type")
    return struct.pack("<IQ", kinds.pop(), len(items)) + b"".join(raw for _, raw in items)


__all__ = [
    "FLOATS", "PACKED", "GgufFile", "GgufTensor", "Metadata", "NewTensor", "read_gguf", "type_name", "write_gguf",
]  # fmt: skip
