"""A program in memory: all contents of a `.qca` file, so that a freshly compiled program runs without a file."""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from qcompiler import __version__
from qcompiler.errors import ChangedFileError, FileBoundsError, ForeignFileError, PlanError, WeightsError
from qcompiler.formats.foreign.json_text import open_regular
from qcompiler.plan.kernel import Strict
from qcompiler.plan.plan import Plan, Signature, WeightEntry
from qcompiler.plan.weights import NO_VALUES, WeightStore
from qcompiler.runtime.code import Code
from qcompiler.runtime.memory import Block, Bytes, ask_for_huge_pages

CHUNK = 16 << 20
"""Each digest covers this many bytes of a weight."""


class ProgramTarget(Strict, frozen=True):
    """The target of the program: an instruction set ("x86-64-v4") or a GPU's architecture ("sm_90a")."""

    kind: Literal["cpu", "cuda"] = "cpu"
    isa: str = "x86-64"


@dataclass(frozen=True)
class NativeLibrary:
    """A compiled build of the plan: its path and its needs. A `.so` for cpu and sim, a `.cubin` for cuda.

    A build from a program file has figures of its own: the bytes of scratch per thread, since another version may have
    emitted it, and the thread pool's library, for a machine without a compiler.  `code` are the verified bytes of
    `path`, which are loaded.
    """

    isa: str
    path: Path
    emitter_version: str
    compiler: str = ""
    scratch: int | None = None
    pool: Code | None = None
    code: Code | None = None

    def read(self) -> bytes:
        """The build's bytes: the verified ones, if there are any."""
        return self.code.data if self.code is not None else self.path.read_bytes()


def open_program(path: Path) -> BufferedReader:
    """A program file, opened for reading. ForeignFileError unless it is a regular file: opening a pipe would wait."""
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ForeignFileError(f"{path} is not a qcompiler program: it is not a regular file") from error


def _mapped(file: BufferedReader) -> mmap.mmap:
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    ask_for_huge_pages(mapping)
    return mapping


class MappedFile:
    """A mapped file, and its status at that time. If its name moves to another file, this one stays as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_program(path) as file:
            self.status = os.fstat(file.fileno())
            size = self.status.st_size
            self.data = memoryview(_mapped(file) if size else b"")
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def check(self) -> None:
        """ChangedFileError if the file was cut or overwritten in place, so that the mapped bytes are not the checked
        ones.

        It uses the file's status at the moment of the call.  Reading a page that was cut off ends the process
        (SIGBUS).
        """
        now = os.fstat(self._file)
        if (now.st_size, now.st_mtime_ns) == (self.status.st_size, self.status.st_mtime_ns):
            return
        size = f"it has {now.st_size} bytes instead of {self.status.st_size}"
        what = size if now.st_size != self.status.st_size else "its bytes may have changed"
        raise ChangedFileError(
            f"{self.path} was written to while a program has it mapped: {what}. Load it again; write new versions "
            "under another name and rename them (save does), or load with copy=True, which keeps the weights in memory"
        )


@dataclass(frozen=True)
class ProgramImage:
    """A program: its plan, the caller's view of it, and the bytes of its weights.

    `weights` are the bytes of the weight file (u8, 64-byte aligned, read-only by convention), which the constants arena
    of a program for one device mirrors.  `plan.weights` is their directory, and `source` the file they are mapped
    from, if any.  `ledger` and `report` are JSON values for readers.  `texts` are files for readers, by their
    name in the program file (``ir/02-import.mlir``, ``kernels/program.cpp``).  `native` lists builds that `save_image`
    packs.  `attachments` are files by name that travel with the program, such as a language model's tokenizer: the
    runtime carries their bytes and does not look into them.  `trusted_operators` are torch operators that may run
    although they are not on the list of harmless ones.
    """

    plan: Plan
    signature: Signature
    weights: Bytes = field(repr=False)
    target: ProgramTarget = field(default_factory=ProgramTarget)
    ledger: Any = None
    report: Any = None
    torch_calls: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    native: tuple[NativeLibrary, ...] = ()
    qcompiler: str = __version__
    valued: bool = True
    source: MappedFile | None = field(default=None, repr=False)
    trusted_operators: frozenset[str] = frozenset()
    attachments: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def require_values(self) -> None:
        """WeightsError for a program that was compiled without values."""
        if not self.valued:
            raise WeightsError(NO_VALUES)

    def require_unchanged(self) -> None:
        """ChangedFileError if the file of the weights was cut or overwritten since it was mapped."""
        if self.source is not None:
            self.source.check()

    def with_native(self, *native: NativeLibrary) -> ProgramImage:
        return replace(self, native=native)


def build_image(
    plan: Plan,
    signature: Signature,
    store: WeightStore,
    *,
    room: Callable[[int], Bytes] | None = None,
    **details: Any,
) -> ProgramImage:
    """An image whose constants arena holds the store's tensors at the offsets of `plan.weights`.

    `room` returns zeroed bytes for the arena (default: anonymous memory); tensors are copied into it one at a time.
    Without values in the store the image has no bytes, and can neither run nor be saved.
    `details` are further fields of `ProgramImage`.  PlanError if a tensor is missing, or differs from its entry in size
    or layout.
    """
    nbytes = constants_nbytes(plan)
    check_directory(plan.weights, nbytes)
    if not store.valued:
        return ProgramImage(plan, signature, np.zeros(0, np.uint8), valued=False, **details)
    arena = room(nbytes) if room is not None else Block(nbytes).bytes
    for entry in plan.weights:
        tensor = store[entry.name]
        if (tensor.layout, tensor.format, tensor.nbytes) != (entry.layout, entry.format, entry.nbytes):
            raise PlanError(
                f"weight '{entry.name}' is {tensor.nbytes} bytes of {tensor.format} in layout {tensor.layout!r}, "
                f"the plan expects {entry.nbytes} bytes of {entry.format} in layout {entry.layout!r}"
            )
        tensor.write(arena[entry.offset : entry.offset + entry.nbytes])
    return ProgramImage(plan, signature, arena, **details)


def constants_nbytes(plan: Plan) -> int:
    """The bytes of weights: the size of a constants arena that mirrors the weight file (0 without one), or, if each
    device gathers its weights, the end of the last weight."""
    if any(buffer.weight is not None for buffer in plan.buffers):
        return max((entry.offset + entry.nbytes for entry in plan.weights), default=0)
    return max((arena.nbytes for arena in plan.arenas if arena.kind == "constants"), default=0)


def check_directory(entries: tuple[WeightEntry, ...], nbytes: int) -> None:
    """FileBoundsError unless all entries lie inside `nbytes` bytes, aligned, without overlap and with unique names."""
    end, previous = 0, ""
    if len({entry.name for entry in entries}) != len(entries):
        raise FileBoundsError("two entries of the weight directory have one name")
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < 0 or entry.nbytes < 0 or entry.offset + entry.nbytes > nbytes:
            raise FileBoundsError(
                f"weight '{entry.name}' claims bytes {entry.offset}…{entry.offset + entry.nbytes}, "
                f"but the weights have {nbytes} bytes"
            )
        if entry.offset % 64:
            raise FileBoundsError(f"weight '{entry.name}' starts at {entry.offset}, which is no multiple of 64")
        if entry.offset < end:
            raise FileBoundsError(
                f"weight '{entry.name}' starts at {entry.offset}, inside '{previous}' (ends at {end})"
            )
        end, previous = entry.offset + entry.nbytes, entry.name


def chunk_digests(data: Bytes) -> tuple[str, ...]:
    """sha256 of every 16 MiB of a tensor's bytes."""
    starts = range(0, data.nbytes, CHUNK)
    return tuple(hashlib.sha256(data.data[start : start + CHUNK]).hexdigest() for start in starts)


def with_digests(entries: tuple[WeightEntry, ...], weights: Bytes) -> tuple[WeightEntry, ...]:
    """The directory with digests of the present bytes."""
    return tuple(
        msgspec.structs.replace(entry, sha256=chunk_digests(weights[entry.offset : entry.offset + entry.nbytes]))
        for entry in entries
    )
