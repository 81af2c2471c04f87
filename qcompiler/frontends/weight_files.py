"""Where packed weights are put: anonymous memory, files without a name, or the files of a working folder.

One tensor at a time: `store` gives room for a tensor's bytes and has them filled in.  In a file, they are pages of that
file from then on, and no part of the process's own memory.
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

IN_MEMORY = 256 << 20
"""Bytes of parameters up to which packed weights stay in memory where no working folder is named."""

FILE_BYTES = 64 << 20
"""The least size of a file without a name: small tensors share one."""

ALIGNMENT = 256

Fill = Callable[[Bytes], None]


@dataclass(frozen=True)
class Entry:
    """One stored tensor: its first parameter path, its format's text ("" for plain values) and what it decodes to.

    `arrangement` says how the model's tensor was rearranged before ("" if not), `nbytes` are the canonical bytes.
    """

    key: str
    format: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    arrangement: str = ""


class WeightFiles(Protocol):
    """Room for what a compilation stores."""

    def begin(self, entries: Sequence[Entry]) -> None:
        """All that will be stored, in order."""

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        """The entry's bytes: `fill` writes them into zeroed room, unless they are there from an earlier run.

        `identity` tells the values that they are made from.
        """

    def room(self, nbytes: int) -> Bytes:
        """Zeroed bytes that last as long as something refers to them."""

    def finish(self) -> None:
        """All is stored."""

    def abandon(self) -> None:
        """The compilation failed; what is stored stays."""


class InMemory:
    """Anonymous memory."""

    def begin(self, entries: Sequence[Entry]) -> None:
        del entries

    def store(self, entry: Entry, identity: Callable[[], dict[str, Any]], fill: Fill) -> Bytes:
        out = np.zeros(entry.nbytes, np.uint8)
        fill(out)
        return out

    def room(self, nbytes: int) -> Bytes:
        return Block(nbytes).bytes

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Unnamed:
    """Files without a name, in `directory` or where temporary files lie; gone when nothing refers to them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._free: Bytes = np.zeros(0, np.uint8)

    def begin(self, entries: Sequence[Entry]) -> None:
        """One file for all: a mapping keeps a descriptor open, and processes have few."""
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


__all__ = ["IN_MEMORY", "Entry", "Fill", "InMemory", "Unnamed", "WeightFiles"]
