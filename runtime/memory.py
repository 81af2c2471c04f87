"""Memory with an address: anonymous (arenas, scratch, unpacked weights), or of a file that has no name."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qcompiler.errors import OutOfMemoryError, WorkdirError
from qcompiler.runtime import sanitize

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_FLOOR = 4 << 20
"""Blocks from here on ask for huge pages: fewer TLB misses when weights stream."""


class Block:
    """`nbytes` of zeroed private memory, page-aligned; pages come when touched first.

    Private, so that after a fork parent and child do not write into each other's arenas.  OutOfMemoryError if the
    system does not give them.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes: Bytes
        if sanitize.guarding() and nbytes:
            self.bytes = _guarded(nbytes)
            self.address = address_of(self.bytes)
            return
        # The array holds the mapping alive: it goes when the last view of `bytes` goes.
        mapping = _private(max(nbytes, 1))
        if nbytes >= HUGE_PAGE_FLOOR and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses: slower, nothing else
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(mapping, np.uint8, count=nbytes)
        self.address = address_of(self.bytes) if nbytes else 0

    def zero(self) -> None:
        self.bytes[:] = 0


def _private(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise no_memory(nbytes, "the program's memory") from error


def no_memory(nbytes: int, what: str) -> OutOfMemoryError:
    """The host has no room for so many bytes."""
    return OutOfMemoryError(
        f"the system gives no {nbytes:,} bytes for {what}: compile with smaller maxima of the dynamic dimensions, "
        "close other sessions, or look at the limits of this process (ulimit -v, the container's)",
        errno.ENOMEM,
        "ENOMEM",
    )


def _guarded(nbytes: int) -> Bytes:
    """Zeroed memory at a page's begin, with inaccessible pages around it and what follows in its last page poisoned."""
    room = align_up(nbytes, mmap.PAGESIZE)
    mapping = _private(room + 2 * sanitize.GUARD)
    start = address_of(np.frombuffer(mapping, np.uint8))
    first, end = start + sanitize.GUARD, start + sanitize.GUARD + room
    sanitize.protect(start, sanitize.GUARD)
    sanitize.protect(end, sanitize.GUARD)
    sanitize.poison(first + nbytes, room - nbytes)
    weakref.finalize(mapping, sanitize.unpoison, first + nbytes, room - nbytes)
    return np.frombuffer(mapping, np.uint8, count=nbytes, offset=sanitize.GUARD)


def file_bytes(nbytes: int, directory: str | Path | None = None) -> Bytes:
    """`nbytes` of zeroed memory that pages of an unnamed file hold: the system writes them out when it needs room.

    The file has no name in `directory` (default: `scratch_directory()`), and its room is free again when the last view
    is gone, or the process.  WorkdirError if there is no room: it is reserved here, so that writing cannot fail later.
    """
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    where = Path(directory) if directory is not None else scratch_directory()
    try:
        with tempfile.TemporaryFile(dir=where, prefix="qcompiler.") as file:
            reserve(file, 0, nbytes, where)
            mapping = mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise WorkdirError(f"cannot make a file of {nbytes:,} bytes in {where}: {error}") from error
    return np.frombuffer(mapping, np.uint8, count=nbytes)


def reserve(file: BinaryIO, offset: int, nbytes: int, where: Path) -> None:
    """Takes room on the disk for a part of a file. WorkdirError if there is not enough."""
    try:
        os.posix_fallocate(file.fileno(), offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise WorkdirError(
            f"{where} has no room for {nbytes:,} more bytes of packed weights ({error.strerror}); free some, or name "
            "another folder with workdir= (or TMPDIR)"
        ) from error


def scratch_directory() -> Path:
    """Where files without a name lie: TMPDIR, else /var/tmp, which is on a disk where /tmp often is memory."""
    named = os.environ.get("TMPDIR")
    if not named and os.access("/var/tmp", os.W_OK | os.X_OK):
        return Path("/var/tmp")
    return Path(tempfile.gettempdir())


_left_to_devices: list[Any] = []


@contextlib.contextmanager
def kept_if_it_fails(*owners: Any) -> Iterator[None]:
    """Around the transfers of host memory and the wait for them: if that fails, nobody knows when the device is done
    with the memory, and so it is never freed."""
    try:
        yield
    except BaseException:
        _left_to_devices.append(owners)
        raise


def address_of(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
