"""Weights between a target's layouts and the canonical bytes of their formats."""

from __future__ import annotations

import math

import msgspec

from qcompiler import formats
from qcompiler.errors import FormatError, PlanError
from qcompiler.kernels import layouts
from qcompiler.plan.plan import WeightEntry
from qcompiler.runtime.memory import Block, Bytes, align_up, file_bytes
from qcompiler.runtime.progress import Progress

ALIGNMENT = 256
IN_MEMORY = 1 << 20


def canonical_directory(entries: tuple[WeightEntry, ...]) -> tuple[WeightEntry, ...]:
    """The same weights, each in canonical bytes, one after another at multiples of 256 bytes; without digests."""
    offset = 0
    result: list[WeightEntry] = []
    for entry in entries:
        nbytes = entry.nbytes if entry.layout == "canonical" else _nbytes(entry, "canonical")
        result.append(msgspec.structs.replace(entry, layout="canonical", offset=offset, nbytes=nbytes, sha256=()))
        offset = align_up(offset + nbytes, ALIGNMENT)
    return tuple(result)


def to_canonical(entries: tuple[WeightEntry, ...], weights: Bytes, stored: tuple[WeightEntry, ...]) -> Bytes:
    """The bytes that `stored` describes, from the arena that `entries` describes."""
    nbytes = max((entry.offset + entry.nbytes for entry in stored), default=0)
    made = file_bytes(nbytes) if nbytes > IN_MEMORY else Block(nbytes).bytes  # for the duration of a save
    _place_all(entries, weights, stored, made)
    return made


def to_target(stored: tuple[WeightEntry, ...], weights: Bytes, entries: tuple[WeightEntry, ...], nbytes: int) -> Bytes:
    """The constants arena of `nbytes` bytes that `entries` describes, from the bytes that `stored` describes."""
    block = Block(nbytes)
    _place_all(stored, weights, entries, block.bytes)
    return block.bytes


def _place_all(sources: tuple[WeightEntry, ...], data: Bytes, targets: tuple[WeightEntry, ...], into: Bytes) -> None:
    with Progress("changing layouts", sum(source.nbytes for source in sources)) as progress:
        for source, target in zip(sources, targets, strict=True):
            _place(source, data, target, into)
            progress.step(source.nbytes)


def _place(source: WeightEntry, data: Bytes, target: WeightEntry, into: Bytes) -> None:
    values = data[source.offset : source.offset + source.nbytes]
    if source.layout != target.layout:
        try:
            rows, cols = _matrix(source)
            fmt = _format(source)
            canonical = layouts.get(source.layout).unpack(fmt, source.dtype, rows, cols, values)
            values = layouts.get(target.layout).pack(fmt, target.dtype, rows, cols, canonical)
        except FormatError as error:
            raise PlanError(
                f"weight '{source.name}' cannot be brought into layout {target.layout!r}: {error}"
            ) from error
    if values.nbytes != target.nbytes:
        raise PlanError(f"weight '{source.name}' has {values.nbytes} bytes in {target.layout!r}, not {target.nbytes}")
    into[target.offset : target.offset + target.nbytes] = values


def _nbytes(entry: WeightEntry, layout: str) -> int:
    rows, cols = _matrix(entry)
    try:
        return layouts.get(layout).nbytes(_format(entry), entry.dtype, rows, cols)
    except FormatError as error:
        raise PlanError(f"weight '{entry.name}' cannot be brought into layout {layout!r}: {error}") from error


def _matrix(entry: WeightEntry) -> tuple[int, int]:
    if not entry.shape:
        raise PlanError(f"weight '{entry.name}' has rank 0 and no layout but the canonical one")
    return math.prod(entry.shape[:-1]), entry.shape[-1]


def _format(entry: WeightEntry) -> formats.Format | None:
    return None if entry.format is None else formats.get(entry.format.name, **entry.format.params)
