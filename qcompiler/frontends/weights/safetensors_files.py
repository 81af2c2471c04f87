"""Tensors of safetensors files, mapped: a folder of shards, with or without an index, or one file.

Only headers are read until a tensor's bytes are touched; those are then pages of the file, not of the heap.

    8 bytes  n, little-endian      n bytes  JSON: {"name": {"dtype": "BF16", "shape": […], "data_offsets": [a, b]}, …}
    then the data; offsets count from their beginning    (https://huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import json_object, open_regular, read_json_object, shown

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
CODES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes that have a meaning only together with a scale in another tensor."""
MAX_HEADER = 100 << 20  # the format's own limit
MAX_DIMS = 16
LONGEST_NAME = 1024
MAX_NAME = 255  # bytes of a file's name, on the systems there are
MAX_SIZE = 1 << 48
"""Maximum of a dimension, of a tensor's elements, of an offset: no file is as large."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class FileTensor:
    """One tensor: its name and place in a file. `start` counts bytes from the beginning of the file."""

    file: ShardFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_made(self) -> bool:
        """False: the values are those of the file."""
        return False

    @property
    def codes(self) -> None:
        """None: a tensor of a safetensors file holds values. Checkpoints combine several tensors into codes."""

    def view(self) -> torch.Tensor:
        """The values in the mapped file; the mapping is private, so writes do not reach the file."""
        return self.file.view(self)

    def array(self) -> npt.NDArray[Any]:
        """The values as a NumPy array, bf16 and fp8 by ml_dtypes."""
        name = str(self.dtype).removeprefix("torch.")
        small = getattr(ml_dtypes, name, None)
        if small is None:
            values: npt.NDArray[Any] = self.view().numpy()
            return values
        return self.view().view(torch.uint8 if self.dtype.itemsize == 1 else torch.int16).numpy().view(small)

    def identity(self) -> dict[str, Any]:
        """Identifies the bytes: the file's name, size and modification time, and the position in it."""
        status = self.file.status
        return {
            "file": self.file.path.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "start": self.start,
        }

    def release(self) -> None:
        """Releases the pages that a view has touched; they are read again at the next touch."""
        self.file.release(self)


class ShardFile:
    """One file, mapped at the first read. WeightsError if it is not a safetensors file or is truncated."""

    def __init__(self, path: Path, *, codes: bool = False) -> None:
        self.path = path
        self._dtypes = {**DTYPES, **CODES} if codes else DTYPES
        self.notes: dict[str, Any] = {}
        """The header's data besides the tensors (`__metadata__`); not checked here."""
        try:
            with open_regular(path) as file:
                self.status = os.fstat(file.fileno())
                self.tensors = self._header(file.read(8), file.read)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise WeightsError(f"cannot read the weights of {path}: {error}") from error
        self._mapping: mmap.mmap | None = None

    def _header(self, first: bytes, read: Any) -> dict[str, FileTensor]:
        count = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= count <= min(MAX_HEADER, self.status.st_size - 8):
            raise WeightsError(f"{self.path} is no safetensors file, or was cut off in its header")
        described = json_object(read(count), f"the header of {self.path}", WeightsError)
        notes = described.get("__metadata__")
        self.notes = notes if isinstance(notes, dict) else {}
        tensors = {
            name: self._tensor(name, facts, 8 + count) for name, facts in described.items() if name != "__metadata__"
        }
        self._refuse_overlap(tensors)
        return tensors

    def _tensor(self, name: str, facts: Any, data: int) -> FileTensor:
        """The only place that reads a tensor's entry in a header: all numbers are bounded by the file's size."""
        kind, shape, (start, end) = self._facts(name, facts)
        if kind not in self._dtypes:
            raise WeightsError(
                f"{shown(name)} in {self.path} has the dtype {kind[:40]}; there are: {', '.join(self._dtypes)}. "
                + (
                    "Its scales are in other tensors: qc.from_checkpoint reads both"
                    if kind in CODES
                    else "Convert the checkpoint"
                )
            )
        dtype = self._dtypes[kind]
        if math.prod(shape) * dtype.itemsize != end - start:
            raise WeightsError(
                f"{shown(name)} in {self.path} has offsets {shown(start)}…{shown(end)} for {kind} {shown(list(shape))}"
            )
        if data + end > self.status.st_size:
            raise WeightsError(
                f"{self.path} was cut off: {shown(name)} ends at byte {shown(data + end)} of {self.status.st_size}; "
                "copy or download the file again"
            )
        return FileTensor(self, name, dtype, shape, data + start)

    def _facts(self, name: str, facts: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        """(dtype, shape, offsets) with checked types, sizes below 2^48, which is larger than any file."""
        if len(name) > LONGEST_NAME:
            raise WeightsError(f"{self.path} names a tensor by {len(name)} characters: {shown(name)}")
        if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
            raise WeightsError(f"the header of {self.path} describes {shown(name)} by {shown(facts)}")
        kind, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
        if not isinstance(kind, str) or not _are_sizes(shape) or len(shape) > MAX_DIMS:
            raise WeightsError(f"{shown(name)} in {self.path} has the dtype {shown(kind)} and the shape {shown(shape)}")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise WeightsError(f"{shown(name)} in {self.path} has the offsets {shown(offsets)}")
        if math.prod(max(size, 1) for size in shape) > MAX_SIZE:
            raise WeightsError(f"{shown(name)} in {self.path} has the shape {shape}: more than 2^48 elements")
        return kind, tuple(shape), (offsets[0], offsets[1])

    def _refuse_overlap(self, tensors: Mapping[str, FileTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.nbytes and tensor.start < end:
                raise WeightsError(f"{shown(tensor.name)} in {self.path} overlaps {shown(previous)}")
            if tensor.nbytes:
                end, previous = tensor.start + tensor.nbytes, tensor.name

    def view(self, tensor: FileTensor) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._mapping is None:
            with open_regular(self.path) as file:
                now = os.fstat(file.fileno())
                if (now.st_size, now.st_mtime_ns) != (self.status.st_size, self.status.st_mtime_ns):
                    raise WeightsError(f"{self.path} has changed since its header was read")
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = np.frombuffer(self._mapping, np.uint8, count=tensor.nbytes, offset=tensor.start)
        if tensor.start % tensor.dtype.itemsize:  # old writers do not align
            raw = raw.copy()
        return torch.from_numpy(raw).view(tensor.dtype).reshape(tensor.shape)

    def release(self, tensor: FileTensor) -> None:
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # advice only
            self._mapping.madvise(mmap.MADV_DONTNEED, first, tensor.start + tensor.nbytes - first)


def _are_sizes(values: Any) -> bool:
    """Whether a JSON value is a list of integers from 0 to `MAX_SIZE`; booleans do not count."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def read_tensors(path: Path, *, codes: bool = False) -> dict[str, FileTensor]:
    """All tensors of a file or folder by name; fp8 only if the caller handles its scales (`codes`).

    In a folder the index (`model.safetensors.index.json`, or the only other `*.index.json`) names the file of each
    tensor; without one, all `*.safetensors` count.  WeightsError if there are none, if a file is missing or damaged, or
    if two files hold the same name.
    """
    if not path.is_dir():
        if not path.exists():
            raise WeightsError(f"weights={str(path)!r}: there is no such file or folder")
        return ShardFile(path, codes=codes).tensors
    index = _index(path)
    if index is not None:
        return _indexed(path, index, codes)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"weights={str(path)!r}: the folder holds no *.safetensors")
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in ShardFile(file, codes=codes).tensors.items():
            if name in found:
                raise WeightsError(
                    f"both {found[name].file.path.name} and {file.name} in {path} hold {shown(name)}; name the file to "
                    "read"
                )
            found[name] = tensor
    return found


def _index(folder: Path) -> Path | None:
    if (folder / INDEX).exists():
        return folder / INDEX
    others = sorted(folder.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 else None


def _indexed(folder: Path, index: Path, codes: bool) -> dict[str, FileTensor]:
    try:
        places = read_json_object(index, WeightsError).get("weight_map")
    except WeightsError as error:
        raise WeightsError(f"{index} is no index of shards: {error}") from error
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise WeightsError(f"{index} is no index of shards: it has no weight_map from names to files")
    names = sorted(set(places.values()))
    missing = [name for name in names if not _is_beside(folder, name)]
    if missing:
        raise WeightsError(f"{index} names files that are not there: {_few(missing)}")
    files = {name: ShardFile(folder / name, codes=codes) for name in names}
    absent = [name for name, place in places.items() if name not in files[place].tensors]
    if absent:
        raise WeightsError(f"{index} names tensors that their files do not hold: {_few(absent)}")
    return {name: files[place].tensors[name] for name, place in places.items()}


def _is_beside(folder: Path, name: str) -> bool:
    """Whether a name is that of a file directly in the folder: an index must not reach other folders."""
    if Path(name).name != name or "\0" in name or len(name.encode()) > MAX_NAME:
        return False
    return (folder / name).is_file()


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:10])) + (f" … ({len(names)} in all)" if len(names) > 10 else "")


__all__ = ["FileTensor", "ShardFile", "read_tensors"]
