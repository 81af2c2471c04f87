"""Storage of packed weights: anonymous memory, unnamed files, or the files of a working folder.

One tensor at a time: `store` provides memory for a tensor's bytes and has it filled.  If it is in a file, the bytes are
pages of that file from then on, and not memory of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import Bytes
from qcompiler.runtime.memory import Block, align_up, file_bytes

IN_MEMORY = 16 << 20
"""Bytes of packed weights, and of the image made of them, below which no file is used."""

IN_WORK = 2 << 20
"""Bytes that encoders and layouts need in addition to their output: a few tiles for each thread."""

FILE_BYTES = 64 << 20
"""Minimum size of an unnamed file: small tensors share one."""

ALIGNMENT = 256

Fill = Callable[[Bytes], None]


@dataclass(frozen=True)
class Entry:
    """One stored tensor: its first parameter path, its format's text ("" for plain values) and what it decodes to.

    `arrangement` says how the model's tensor was rearranged ("" if not), `nbytes` are the canonical bytes.
    """

    key: str
    format: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    arrangement: str = ""


class WeightFiles(Protocol):
    """Storage for the results of a compilation."""

    def begin(self, entries: Sequence[Entry], kept: int) -> None:
        """Announces everything that will be stored, in order, and the bytes that stay in place until the image is
        made."""

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        """The entry's bytes: `fill` writes them into zeroed memory, unless they exist from an earlier run.

        `identity` identifies the values that they are made from.
        """

    def room(self, nbytes: int) -> Bytes:
        """Zeroed bytes that last as long as a reference to them."""

    def finish(self) -> None:
        """Everything is stored."""

    def abandon(self) -> None:
        """The compilation failed; stored weights stay."""


class InMemory:
    """Anonymous memory."""

    def begin(self, entries: Sequence[Entry], kept: int) -> None:
        del entries, kept

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        out = np.zeros(entry.nbytes, np.uint8)
        fill(out)
        return out

    def room(self, nbytes: int) -> Bytes:
        return Block(nbytes).bytes

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Unnamed:
    """Unnamed files, in `directory` or the folder of temporary files; freed with the last reference."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._free: Bytes = np.zeros(0, np.uint8)

    def begin(self, entries: Sequence[Entry], kept: int) -> None:
        """Uses one file for all: a mapping keeps a descriptor open, and processes have few."""
        del kept
        total = sum(align_up(entry.nbytes, ALIGNMENT) for entry in entries)
        if total > self._free.nbytes:
            self._free = file_bytes(total, self._directory)

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        out = self.room(entry.nbytes)
        fill(out)
        return out

    def room(self, nbytes: int) -> Bytes:
        taken = align_up(nbytes, ALIGNMENT)
        if taken > self._free.nbytes:
            self._free = file_bytes(max(taken, FILE_BYTES), self._directory)
        found, self._free = self._free[:nbytes], self._free[taken:]
        return found

    def finish(self) -> None:
        self._free = np.zeros(0, np.uint8)

    def abandon(self) -> None: ...


class ByNeed:
    """Memory for small programs; unnamed files if packed weights and image would take more than twice the model's
    largest tensor (`largest` bytes), which is what a compile may take in addition to the model."""

    def __init__(self, largest: int) -> None:
        self._limit, self._given = max(2 * largest - IN_WORK, IN_MEMORY), 0
        self._begun = False
        self._files: WeightFiles = InMemory()

    def _need(self, nbytes: int, limit: int) -> None:
        if isinstance(self._files, InMemory) and self._given + nbytes > limit:
            self._files = Unnamed()

    def begin(self, entries: Sequence[Entry], kept: int) -> None:
        stored = sum(entry.nbytes for entry in entries)
        self._begun = True
        self._need(stored + stored + kept, self._limit)  # the image holds everything a second time
        self._files.begin(entries, kept)

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        return self._files.store(entry, identity, fill)

    def room(self, nbytes: int) -> Bytes:
        if not self._begun:  # folded weights, in addition to everything stored
            self._need(nbytes, IN_MEMORY // 4)
        self._given += nbytes
        return self._files.room(nbytes)

    def finish(self) -> None:
        self._files.finish()

    def abandon(self) -> None:
        self._files.abandon()


__all__ = ["ByNeed", "Entry", "Fill", "InMemory", "Unnamed", "WeightFiles"]
