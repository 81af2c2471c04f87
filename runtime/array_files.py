"""Files of `qc run`: .npy files and .npz archives of plain numbers. Inputs come from untrusted sources.

    "\\x93NUMPY"  major  minor  u16 (version 1) or u32 length of the header
    {'descr': '<f4', 'fortran_order': False, 'shape': (2, 5), }

`numpy.load` evaluates the header as Python text and allocates an array of the stated size before it reads.  Here a
regular expression matches the header, sizes are compared with the file's as Python integers, and pickles, objects,
records and texts are refused.  Source: NumPy's format.py, versions 1 to 3.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError
from qcompiler.formats.foreign.json_text import open_regular, shown
from qcompiler.units import printable

Array = npt.NDArray[Any]

MAX_HEADER = 10_000
MAX_MEMBERS = 4096
MAX_DIMS = 32
MAX_RATIO, MAX_EXPANDED = 100, 64 << 20
"""Maximum size of a compressed member: MAX_EXPANDED bytes, or MAX_RATIO times its compressed size."""

_HEADER = re.compile(
    r"\{\s*'descr':\s*'([<>|=]?[biuf](?:1|2|4|8))',\s*'fortran_order':\s*(True|False),\s*"
    r"'shape':\s*\(((?:\s*\d{1,15}\s*,)*(?:\s*\d{1,15}\s*)?)\)\s*,?\s*\}\s*\Z",
    re.ASCII,
)
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError, struct.error,
    OverflowError,
)  # fmt: skip
"""Exceptions of zipfile for damaged archives, and for unknown encryption and compression."""


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """The array of a .npy file, or the arrays of a .npz file by name. ArgumentError names the file and the problem."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(4)
            file.seek(0)
            if begin != b"PK\3\4":
                return _array(file, size, str(path))
            return _archive(file, path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ArgumentError(f"cannot read the input '{path}': {error}") from error


def _array(file: BinaryIO | Any, size: int, where: str) -> Array:
    """The array in a file of `size` bytes."""
    dtype, fortran, shape, at = _header(file, where)
    count = math.prod(shape)
    if any(extent > 1 << 48 for extent in shape) or count * dtype.itemsize > size - at:
        raise ArgumentError(
            f"cannot read the input '{where}': its header says {dtype} {list(shape)}, {count * dtype.itemsize:,} bytes,"
            f" and it holds {max(size - at, 0):,}"
        )
    data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise ArgumentError(f"cannot read the input '{where}': it ends after {len(data):,} bytes of its numbers")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _header(file: BinaryIO | Any, where: str) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """(dtype, whether columns come first, shape, offset of the data)."""
    begin = file.read(8)
    version = begin[6:8]
    if begin[:6] != b"\x93NUMPY" or version not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ArgumentError(f"cannot read the input '{where}': it is no .npy or .npz file")
    width = 2 if version == b"\1\0" else 4
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER:
        raise ArgumentError(f"cannot read the input '{where}': its header has {length} bytes, above {MAX_HEADER}")
    text = file.read(length).decode("latin1")
    found = _HEADER.match(text)
    if found is None:
        raise ArgumentError(
            f"cannot read the input '{where}': an input is an array of booleans, integers or floats, and its header "
            f"says {shown(text.strip())}"
        )
    shape = tuple(int(extent) for extent in found[3].split(",") if extent.strip())
    if len(shape) > MAX_DIMS or (len(shape) == 1 and "," not in found[3]):
        raise ArgumentError(f"cannot read the input '{where}': it has the shape ({found[3][:100]})")
    try:
        dtype = np.dtype(found[1])
    except TypeError as error:
        raise ArgumentError(f"cannot read the input '{where}': there are no numbers {found[1]!r}") from error
    return dtype, found[2] == "True", shape, 8 + width + length


def _archive(file: BinaryIO, path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ArgumentError(f"cannot read the input '{path}': it holds {len(members)} files")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise ArgumentError(f"cannot read the input '{path}': it holds {shown(name)} twice")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ArgumentError(f"cannot read the input '{path}': {shown(name)} is packed in an unknown way")
                if member.file_size > max(MAX_EXPANDED, MAX_RATIO * member.compress_size):
                    raise ArgumentError(
                        f"cannot read the input '{path}': {shown(name)} expands from {member.compress_size:,} to "
                        f"{member.file_size:,} bytes; write it with np.savez"
                    )
                with archive.open(member) as opened:
                    arrays[name] = _array(opened, member.file_size, f"{path}: {name[:100]}")
    except _ZIP_ERRORS as error:
        raise ArgumentError(f"cannot read the input '{path}': {type(error).__name__}: {shown(error)}") from error
    return arrays


def write_archive(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Writes an uncompressed .npz file that `numpy.load` reads, under any names.

    `numpy.savez` takes names as keywords: it fails for `file`, and loses `allow_pickle` without an error.  A control
    character is written as its escape, since zipfile ends a name at a NUL; a name that is there already gets a `_`.
    """
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        taken: set[str] = set()
        for name, value in arrays.items():
            member = printable(name)
            while member in taken:
                member += "_"
            taken.add(member)
            with archive.open(f"{member}.npy", "w", force_zip64=True) as opened:  # its size is not known before
                np.lib.format.write_array(opened, np.asanyarray(value), allow_pickle=False)


__all__ = ["read_arrays", "write_archive"]
