"""Anonymous memory with an address: arenas, scratch, unpacked weights."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_FLOOR = 4 << 20
"""Blocks from here on ask for huge pages: fewer TLB misses when weights stream."""


class Block:
    """`nbytes` of zeroed private memory, page-aligned; pages come when touched first.

    Private, so that after a fork parent and child do not write into each other's arenas.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # The array holds the mapping alive: it goes when the last view of `bytes` goes.
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE_FLOOR and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses: slower, nothing else
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8, count=nbytes)
        self.address = address_of(self.bytes) if nbytes else 0

    def zero(self) -> None:
        self.bytes[:] = 0


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
