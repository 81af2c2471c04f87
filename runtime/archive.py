"""Reading and writing the zip of a program file: stored members only, zip64, members at chosen alignment.

Python's `zipfile` could read these files too, but a file may be untrusted: this reader reads only known names, checks
every offset against the file's size, and never decompresses.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from qcompiler.errors import CorruptFileError, ForeignFileError, TruncatedFileError

MARK = "qcompiler-program"
"""Name of the first member. A file that begins with it is a program file, whatever else is wrong with it."""

PAGE = 4096
MAX_MEMBERS = 4096
MAX_DIRECTORY = 4 << 20

_AGAIN = "copy or download it again"

_KNOWN = re.compile(
    r"(qcompiler-program|program\.json|weights\.safetensors"
    r"|native/[A-Za-z0-9._-]{1,100}\.(so|cubin)|ir/[A-Za-z0-9._-]{1,200}|kernels/[A-Za-z0-9._-]{1,200}"
    r"|attachments/[A-Za-z0-9._-]{1,100})\Z"
)
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX32 = 0xFFFFFFFF
_DOS_DATE = (1980 - 1980) << 9 | 1 << 5 | 1  # 1 January 1980: equal programs give equal files


@dataclass(frozen=True)
class Member:
    """A stored member: its data is the range [offset, offset + nbytes) of the file."""

    name: str
    offset: int
    nbytes: int
    crc32: int


# --- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """Writes members one after another; `close` writes the directory. The file must be seekable."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members: list[tuple[Member, int]] = []  # with the offset of the local header

    def add(self, name: str, chunks: Iterable[bytes | memoryview], nbytes: int, *, alignment: int = 1) -> Member:
        """Adds a member whose data starts at a multiple of `alignment` in the file."""
        if not _KNOWN.match(name):
            raise ValueError(f"{name!r} is no name of a member of a program file")
        header = self._file.tell()
        encoded = name.encode()
        zip64 = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        unpadded = header + _LOCAL.size + len(encoded) + len(zip64)
        padding = -unpadded % alignment
        if 0 < padding < 4:  # an extra field has a header of 4 bytes
            padding += alignment
        filler = struct.pack("<HH", 0x5143, padding - 4) + bytes(padding - 4) if padding else b""
        self._file.write(self._local(encoded, 0, zip64 + filler))
        offset, crc, written = self._file.tell(), 0, 0
        for chunk in chunks:
            self._file.write(chunk)
            crc = zlib.crc32(chunk, crc)
            written += len(chunk)
        if written != nbytes:
            raise ValueError(f"member {name!r} has {written} bytes, {nbytes} were announced")
        self._file.seek(header)
        self._file.write(self._local(encoded, crc, zip64 + filler))
        self._file.seek(offset + nbytes)
        member = Member(name, offset, nbytes, crc)
        self._members.append((member, header))
        return member

    @staticmethod
    def _local(name: bytes, crc: int, extra: bytes) -> bytes:
        fixed = _LOCAL.pack(b"PK\3\4", 45, 0x800, 0, 0, _DOS_DATE, crc, _MAX32, _MAX32, len(name), len(extra))
        return fixed + name + extra

    def close(self) -> None:
        start = self._file.tell()
        for member, header in self._members:
            name = member.name.encode()
            extra = struct.pack("<HHQQQ", 1, 24, member.nbytes, member.nbytes, header)
            fixed = _CENTRAL.pack(
                b"PK\1\2", 45, 45, 0x800, 0, 0, _DOS_DATE, member.crc32, _MAX32, _MAX32,
                len(name), len(extra), 0, 0, 0, 0, _MAX32,
            )  # fmt: skip
            self._file.write(fixed + name + extra)
        end, count = self._file.tell(), len(self._members)
        self._file.write(_END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, end - start, start))
        self._file.write(_LOCATOR64.pack(b"PK\6\7", 0, end, 1))
        self._file.write(_END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), _MAX32, _MAX32, 0))


# --- reading ---------------------------------------------------------------------------------------------------------


def read_members(data: memoryview) -> dict[str, Member]:
    """The directory of a program file.

    ForeignFileError for another kind of file, TruncatedFileError if the end is missing, CorruptFileError if a header
    or an offset is wrong. Members with unknown names are not read.
    """
    begin = bytes(data[: _LOCAL.size + len(MARK)])
    if not begin.startswith(b"PK\3\4"):
        if len(data) < 4 and b"PK\3\4".startswith(begin):
            raise TruncatedFileError(f"the file has {len(data)} bytes: it is empty or was cut off ({_AGAIN})")
        if begin.startswith(b"GGUF"):
            raise ForeignFileError(
                "the file is not a qcompiler program but a GGUF file: `qc compile` makes a program of it, "
                "and `qc generate`, `qc chat` and `qc eval` take it as it is"
            )
        raise ForeignFileError("the file is not a qcompiler program (a .qca file is a zip; this is not)")
    if begin[_LOCAL.size :] != MARK.encode():
        if MARK.encode().startswith(begin[_LOCAL.size :]) and len(data) < _LOCAL.size + len(MARK):
            raise TruncatedFileError(f"the file ends inside its first header: it was cut off ({_AGAIN})")
        raise ForeignFileError("the file is a zip, but not a qcompiler program")
    count, size, start = _find_directory(data)
    if count > MAX_MEMBERS or size > MAX_DIRECTORY:
        raise CorruptFileError(f"the file's directory claims {count} members in {size} bytes")
    members: dict[str, Member] = {}
    at, end = start, start + size
    for _ in range(count):
        member, at = _read_entry(data, at, end)
        if member is None:
            continue
        if member.name in members:
            raise CorruptFileError(f"the file holds '{member.name}' twice")
        members[member.name] = member
    _check_overlap(members.values(), start)
    return members


def _find_directory(data: memoryview) -> tuple[int, int, int]:
    """(members, bytes, offset) of the central directory. Program files have no comment: the end record comes last."""
    cut = f"the file ends before its directory: it was cut off ({_AGAIN})"
    at64 = len(data) - _END.size - _LOCATOR64.size
    if at64 < _END64.size or bytes(data[-_END.size :][:4]) != b"PK\5\6":
        raise TruncatedFileError(cut)
    signature, _, end64, _ = _LOCATOR64.unpack_from(data, at64)
    if signature != b"PK\6\7":
        raise TruncatedFileError(cut)
    if end64 != at64 - _END64.size:
        raise CorruptFileError("the file's zip64 record is not where its locator says")
    fields = _END64.unpack_from(data, end64)
    count, size, start = fields[7], fields[8], fields[9]
    if fields[0] != b"PK\6\6" or start + size != end64:
        raise CorruptFileError("the file's directory is not where its end record says")
    return count, size, start


def _read_entry(data: memoryview, at: int, end: int) -> tuple[Member | None, int]:
    if at + _CENTRAL.size > end:
        raise CorruptFileError("the file's directory is shorter than it claims")
    fields = _CENTRAL.unpack_from(data, at)
    flags, method, crc = fields[3], fields[4], fields[7]
    name_size, extra_size, comment_size = fields[10], fields[11], fields[12]
    following = at + _CENTRAL.size + name_size + extra_size + comment_size
    if fields[0] != b"PK\1\2" or following > end:
        raise CorruptFileError("the file's directory is malformed")
    raw = bytes(data[at + _CENTRAL.size : at + _CENTRAL.size + name_size])
    name = raw.decode("ascii", "replace")
    if not _KNOWN.match(name):
        return None, following
    if method != 0 or flags & 1:
        raise CorruptFileError(f"'{name}' is compressed or encrypted; a program file stores its members plainly")
    extra = bytes(data[at + _CENTRAL.size + name_size : following - comment_size])
    nbytes, packed, header = _sizes(fields[9], fields[8], fields[16], extra, name)
    if nbytes != packed:
        raise CorruptFileError(f"'{name}' is stored with two different sizes")
    return Member(name, _data_offset(data, header, raw, nbytes), nbytes, crc), following


def _sizes(nbytes: int, packed: int, header: int, extra: bytes, name: str) -> tuple[int, int, int]:
    """Sizes and the header's offset, from the zip64 field if the 32-bit fields are at their maximum."""
    values = [nbytes, packed, header]
    wide: list[int] = []
    while len(extra) >= 4:
        tag, size = struct.unpack_from("<HH", extra)
        if tag == 1 and size % 8 == 0 and 4 + size <= len(extra):
            wide = list(struct.unpack_from(f"<{size // 8}Q", extra, 4))
        extra = extra[4 + size :]
    for index, value in enumerate(values):
        if value == _MAX32:
            if not wide:
                raise CorruptFileError(f"the directory's entry of '{name}' lacks its 64-bit sizes")
            values[index] = wide.pop(0)
    return values[0], values[1], values[2]


def _data_offset(data: memoryview, header: int, name: bytes, nbytes: int) -> int:
    if header + _LOCAL.size > len(data):
        raise CorruptFileError(f"'{name.decode()}' begins after the end of the file")
    fields = _LOCAL.unpack_from(data, header)
    offset: int = header + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\3\4" or bytes(data[header + _LOCAL.size :][: fields[9]]) != name:
        raise CorruptFileError(f"the header of '{name.decode()}' is not where the directory says")
    if offset + nbytes > len(data):
        raise CorruptFileError(f"'{name.decode()}' leaves the file: it ends at {offset + nbytes} of {len(data)} bytes")
    return offset


def _check_overlap(members: Iterable[Member], directory: int) -> None:
    end, previous = 0, ""
    for member in sorted(members, key=lambda member: member.offset):
        if member.offset < end:
            raise CorruptFileError(f"'{member.name}' overlaps '{previous}' in the file")
        end, previous = member.offset + member.nbytes, member.name
    if end > directory:
        raise CorruptFileError(f"'{previous}' overlaps the file's directory")
