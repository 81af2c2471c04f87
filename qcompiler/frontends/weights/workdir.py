"""A working folder: packed weights that outlive their process, so that a killed compile can continue.

    workdir/
      3f1c9a5e0b7d2c44/          one for each list of weights (names, shapes, formats) and version of the encoders
        lock                     held by the process that compiles; it holds that process's id
        journal.jsonl            a line for each finished weight
        weights-1.bin            their bytes, each from a page boundary; each run that encodes begins a new file

A line is written when its bytes are on the disk (fsync), so its claim is true.  A line that a kill tore is not JSON or
lacks its end; it and everything after it is ignored.  A line is used if its entry is the wanted one, made from values
of the same identity, and if its digest matches the bytes.  Files are only ever appended to, and are removed when no
line refers to them: a program that still maps one loses nothing.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

import qcompiler.formats
from qcompiler.errors import WorkdirError
from qcompiler.frontends.weights.weight_files import Entry, Fill, Unnamed
from qcompiler.plan.weights import Bytes
from qcompiler.runtime.memory import align_up, reserve
from qcompiler.runtime.progress import note

JOURNAL_VERSION = 1
CHUNK = 16 << 20
COMMIT_BYTES = 1 << 20
"""Bytes that may be encoded before they are synced: an fsync for each bias would take longer than encoding it."""


class Line(msgspec.Struct, frozen=True):
    """A finished weight: `nbytes` at `offset` of `file` with this digest, made from values of this identity."""

    key: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    arrangement: str
    source: dict[str, Any]
    file: str
    offset: int
    nbytes: int
    sha256: str

    def serves(self, entry: Entry) -> bool:
        """Whether it fits `entry`, apart from its values."""
        mine = (self.key, self.format, self.dtype, self.shape, self.arrangement, self.nbytes, self.layout)
        theirs = (entry.key, entry.format, entry.dtype, entry.shape, entry.arrangement, entry.nbytes, "canonical")
        return mine == theirs


class WorkFolder:
    """Weight files in a user's folder. WorkdirError if another process compiles the same weights there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.encoded = self.reused = 0
        self._unnamed = Unnamed(self.path)
        self._folder = self.path
        self._lock: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        self._data: _DataFile | None = None
        self._room = 1
        self._maps: dict[str, Bytes] = {}
        self._lines: dict[str, Line] = {}
        self._current: dict[str, Line] = {}
        self._pending: list[Line] = []

    # --- the compilation's view ---

    def begin(self, entries: Sequence[Entry], kept: int) -> None:
        del kept
        self._folder = self.path / _folder_name(entries)
        self._room = max(1, sum(align_up(entry.nbytes, mmap.ALLOCATIONGRANULARITY) for entry in entries))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            kept = self._read_journal()
            self._journal = (self._folder / "journal.jsonl").open("r+b" if kept else "wb")
            self._journal.truncate(kept)
            self._journal.seek(kept)
        except OSError as error:
            self.abandon()
            raise WorkdirError(f"cannot work in {self._folder}: {error}") from error

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        source = identity()
        known = self._lines.get(entry.key)
        if known is not None and known.serves(entry) and known.source == source:
            found = self._verified(known)
            if found is not None:
                self.reused += 1
                self._current[entry.key] = known
                return found
        self.encoded += 1
        return self._encode(entry, source, fill)

    def room(self, nbytes: int) -> Bytes:
        self.path.mkdir(parents=True, exist_ok=True)
        return self._unnamed.room(nbytes)

    def finish(self) -> None:
        """Rewrites the journal with this program's weights; files without a line are removed."""
        self._commit()
        if self._current != self._lines or self.encoded:
            self._rewrite_journal()
        used = {line.file for line in self._current.values()}
        for path in self._folder.glob("weights-*.bin"):
            if path.name not in used:
                path.unlink()
        if self.reused:
            note(f"{self.reused} of {self.reused + self.encoded} packed weights were in {self._folder}")
        self.abandon()

    def abandon(self) -> None:
        self._commit()  # finished weights count even if the compile failed
        for file in (self._data, self._journal, self._lock):  # the lock goes last
            if file is not None:
                file.close()
        self._maps.clear()
        self._data = self._journal = self._lock = None

    # --- the lock ---

    def _take_lock(self) -> None:
        self._lock = (self._folder / "lock").open("a+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read(20).decode("ascii", "replace").strip() or "?"
            self._lock.close()
            self._lock = None
            raise WorkdirError(
                f"the process {holder} compiles the same weights in {self._folder}; wait for it, or name another "
                "workdir"
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()

    # --- earlier runs ---

    def _read_journal(self) -> int:
        """Reads the lines; returns the number of bytes up to the end of the last whole one."""
        try:
            text = (self._folder / "journal.jsonl").read_bytes()
        except FileNotFoundError:
            return 0
        kept = 0
        for raw in text.splitlines(keepends=True):
            try:
                line = msgspec.json.decode(raw, type=Line) if raw.endswith(b"\n") else None
            except (msgspec.MsgspecError, UnicodeDecodeError):
                line = None
            if line is None:
                break
            kept += len(raw)
            self._lines[line.key] = line
        return kept

    def _verified(self, line: Line) -> Bytes | None:
        """The bytes of a line if they match it."""
        try:
            data = self._mapped(line.file)
        except (OSError, ValueError) as error:
            note(f"{self._folder / line.file} cannot be read ({error}): '{line.key}' is encoded again")
            return None
        found = data[line.offset : line.offset + line.nbytes] if line.offset >= 0 else data[:0]
        if found.nbytes != line.nbytes or _digest(found) != line.sha256:
            note(f"{self._folder / line.file} is cut off or damaged: '{line.key}' is encoded again")
            return None
        return found

    def _mapped(self, name: str) -> Bytes:
        """A file of earlier bytes as a private mapping: writes to it do not reach the file."""
        if Path(name).name != name:
            raise ValueError("no name of a file here")
        if name not in self._maps:
            with (self._folder / name).open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[name] = np.frombuffer(mapping, np.uint8)
        return self._maps[name]

    # --- writing ---

    def _encode(self, entry: Entry, source: dict[str, Any], fill: Fill) -> Bytes:
        if self._data is None:
            self._data = self._new_file()
        offset = self._data.end
        out = self._data.writable(entry.nbytes, self._folder)
        fill(out)
        line = Line(
            entry.key, entry.format, entry.dtype, entry.shape, "canonical", entry.arrangement, source,
            self._data.name, offset, entry.nbytes, _digest(out),
        )  # fmt: skip
        self._pending.append(line)
        self._current[entry.key] = line
        if sum(each.nbytes for each in self._pending) >= COMMIT_BYTES:
            self._commit()
        return self._mapped(line.file)[offset : offset + entry.nbytes]

    def _new_file(self) -> _DataFile:
        # The name of any line's file, even a lost one, is not used again.
        names = {p.name for p in self._folder.glob("weights-*.bin")} | {line.file for line in self._lines.values()}
        numbers = [int(digits) for name in names if (digits := name[8:-4]).isdigit()]
        made = _DataFile(self._folder / f"weights-{max(numbers, default=0) + 1}.bin", self._room)
        _sync_folder(self._folder)
        return made

    def _commit(self) -> None:
        """Writes data first, then the lines that refer to it."""
        if not self._pending or self._data is None or self._journal is None:
            return
        self._data.sync()
        for line in self._pending:
            self._journal.write(msgspec.json.encode(line) + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._pending.clear()

    def _rewrite_journal(self) -> None:
        path = self._folder / "journal.jsonl"
        fresh = path.with_suffix(".new")
        with fresh.open("wb") as file:
            for line in self._current.values():
                file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        _sync_folder(self._folder)


class _DataFile:
    """A new file of packed weights, with the maximum size, mapped once and filled from its beginning.

    A mapping keeps a descriptor open, so there is one file for all weights.  The file has holes until it is closed,
    when it gets its true size.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.name, self.end = path.name, 0
        self._file = path.open("x+b")
        self._file.truncate(capacity)
        self._bytes = np.frombuffer(mmap.mmap(self._file.fileno(), capacity), np.uint8)

    def writable(self, nbytes: int, where: Path) -> Bytes:
        """The next bytes; their space on the disk is reserved first, since a write to a mapping cannot raise."""
        first = self.end
        if nbytes:
            reserve(self._file, first, nbytes, where)
        self.end = align_up(first + nbytes, mmap.ALLOCATIONGRANULARITY)
        return self._bytes[first : first + nbytes]

    def sync(self) -> None:
        """Writes the file to the disk; on Linux fsync also writes what was written through mappings."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Cuts the file to its true size; mappings of the cut part are never touched."""
        self._file.truncate(max(self.end, 1))
        self._file.close()


def _sync_folder(path: Path) -> None:
    """Syncs a folder: a file's name is safe only then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_name(entries: Sequence[Entry]) -> str:
    """Sixteen hexadecimal digits of a digest of the stored weights' descriptions and of the encoders' code."""
    facts = [JOURNAL_VERSION, _encoders(), [asdict(entry) for entry in entries]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@functools.cache
def _encoders() -> str:
    """A digest of the formats' source: another version may encode differently."""
    folder = Path(next(iter(qcompiler.formats.__path__)))
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _digest(data: Bytes) -> str:
    """sha256; read pages are released chunk by chunk."""
    digest = hashlib.sha256()
    for start in range(0, data.nbytes, CHUNK):
        digest.update(data[start : start + CHUNK].data)
    return digest.hexdigest()


__all__ = ["COMMIT_BYTES", "Line", "WorkFolder"]
