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
"""Memory of at least this size asks for huge pages: weights stream with fewer TLB misses, and the processor's own
prefetching does not stop at the end of each 4 KiB (docs/performance.md has what that is worth)."""


class Block:
    """`nbytes` of zeroed private memory, page-aligned; the system provides pages at their first touch.

    Private, so that after a fork parent and child do not write into each other's arenas.  OutOfMemoryError if the
    system refuses.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes: Bytes
        if sanitize.guarding() and nbytes:
            self.bytes = _guarded(nbytes)
            self.address = address_of(self.bytes)
            return
        # The array keeps the mapping alive, until the last view of `bytes` is dropped.
        mapping = _private(max(nbytes, 1))
        ask_for_huge_pages(mapping)
        self.bytes = np.frombuffer(mapping, np.uint8, count=nbytes)
        self.address = address_of(self.bytes) if nbytes else 0

    def zero(self) -> None:
        self.bytes[:] = 0


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """For pages that are not in memory yet. Those of a file become huge where its file system can (ext4 from Linux 6.16
    on, xfs, btrfs)."""
    if len(mapping) >= HUGE_PAGE_FLOOR and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages refuses: only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)


def _private(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise no_memory(nbytes, "the program's memory") from error


def no_memory(nbytes: int, what: str) -> OutOfMemoryError:
    """The error if the host has no room for this many bytes."""
    return OutOfMemoryError(
        f"the system gives no {nbytes:,} bytes for {what}: compile with smaller maxima of the dynamic dimensions, "
        "close other sessions, or look at the limits of this process (ulimit -v, the container's)",
        errno.ENOMEM,
        "ENOMEM",
    )


def _guarded(nbytes: int) -> Bytes:
    """Zeroed memory at the start of a page, between inaccessible pages, with the rest of its last page poisoned."""
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
    """`nbytes` of zeroed memory in the pages of an unnamed file: the system writes them out when it needs memory.

    The file is in `directory` (default: `scratch_directory()`); its space is freed with the last view, or with the
    process.  WorkdirError if there is no room: it is reserved here, so that writing cannot fail later.
    """
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    where = Path(directory) if directory is not None else scratch_directory()
    try:
        with tempfile.TemporaryFile(dir=where, prefix="qcompiler.") as file:
            reserve(file, 0, nbytes, where)
            mapping = mmap.mmap(file.fileno(), nbytes)
            ask_for_huge_pages(mapping)
    except OSError as error:
        raise WorkdirError(f"cannot make a file of {nbytes:,} bytes in {where}: {error}") from error
    return np.frombuffer(mapping, np.uint8, count=nbytes)


def reserve(file: BinaryIO, offset: int, nbytes: int, where: Path) -> None:
    """Reserves space on the disk for a part of a file. WorkdirError if there is not enough."""
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
    """The folder of unnamed files: TMPDIR, else /var/tmp, which is on a disk; /tmp is often memory."""
    named = os.environ.get("TMPDIR")
    if not named and os.access("/var/tmp", os.W_OK | os.X_OK):
        return Path("/var/tmp")
    return Path(tempfile.gettempdir())


_left_to_devices: list[Any] = []


@contextlib.contextmanager
def kept_if_it_fails(*owners: Any) -> Iterator[None]:
    """Encloses transfers of host memory and the wait for them. If that fails, the device may still use the memory, so
    it is never freed."""
    try:
        yield
    except BaseException:
        _left_to_devices.append(owners)
        raise


def address_of(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
