"""Vector clocks: which operations are ordered, and which bytes two unordered operations both touch.

Every operation belongs to an *actor* (a stream, a branch of a graph, the host), is that actor's `tick`-th operation,
and carries a clock: for each actor the latest tick that is known to be over before the operation begins.  Operation a
comes before b exactly if b's clock has reached a's tick.  The actual order of execution does not matter.

`AccessMap` keeps, per byte, the last write and the reads since.  As in FastTrack (Flanagan and Freund, PLDI 2009), that
is enough to find, for every new access, a conflicting access without an order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol

Clock = dict[int, int]
"""Actor -> tick."""

AccessKind = Literal["r", "w", "rw"]


class Stamped(Protocol):
    """An operation that can be compared."""

    actor: int
    tick: int
    clock: Clock


class Access(NamedTuple):
    """Bytes [lo, hi) that an operation reads or writes; `label` is the operand's name."""

    lo: int
    hi: int
    kind: AccessKind
    label: str = ""


class Conflict(NamedTuple):
    """A new access met an unordered one: bytes [lo, hi), what the other operation was and whether it wrote."""

    other: Stamped
    wrote: bool
    lo: int
    hi: int


class _Cell(NamedTuple):
    """Bytes [lo, hi) with one history."""

    lo: int
    hi: int
    write: Stamped | None
    reads: tuple[Stamped, ...]


def join(into: Clock, clock: Clock) -> None:
    """The maximum of both clocks, entry by entry."""
    for actor, tick in clock.items():
        if into.get(actor, 0) < tick:
            into[actor] = tick


def is_before(first: Stamped, second: Stamped) -> bool:
    """Whether `first` is over before `second` begins (an operation counts as before itself)."""
    return second.clock.get(first.actor, 0) >= first.tick


class AccessMap:
    """The history of a range of addresses, as sorted disjoint cells."""

    __slots__ = ("_cells", "_starts")

    def __init__(self) -> None:
        self._cells: list[_Cell] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._cells)

    def touch(self, op: Stamped, lo: int, hi: int, *, writes: bool) -> list[Conflict]:
        """Records an access of an operation that is being executed; returns its conflicts.

        Operations are recorded in an order that their clocks allow, so an earlier entry is before `op` or unordered.
        """
        if hi <= lo:
            return []
        first = bisect_right(self._starts, lo) - 1
        if first >= 0 and self._cells[first][:2] == (lo, hi):  # the same view as before, the usual case
            cell = self._cells[first]
            self._cells[first] = _after(cell, op, lo, hi, writes)
            return _conflicts(cell, op, lo, hi, writes)
        if first < 0 or self._cells[first].hi <= lo:
            first += 1
        last = bisect_left(self._starts, hi, first)
        conflicts: list[Conflict] = []
        fresh: list[_Cell] = []
        at = lo
        for cell in self._cells[first:last]:
            if cell.lo < lo:
                fresh.append(cell._replace(hi=lo))
            if at < cell.lo:
                fresh.append(_new(at, cell.lo, op, writes))
            low, high = max(lo, cell.lo), min(hi, cell.hi)
            conflicts += _conflicts(cell, op, low, high, writes)
            fresh.append(_after(cell, op, low, high, writes))
            if cell.hi > hi:
                fresh.append(cell._replace(lo=hi))
            at = high
        if at < hi:
            fresh.append(_new(at, hi, op, writes))
        self._replace(first, last, fresh)
        return conflicts

    def prune(self, is_over: Callable[[Stamped], bool]) -> None:
        """Forgets operations that are over for all future operations."""
        kept = []
        for cell in self._cells:
            write = None if cell.write is None or is_over(cell.write) else cell.write
            reads = tuple(read for read in cell.reads if not is_over(read))
            if write is not None or reads:
                kept.append(_Cell(cell.lo, cell.hi, write, reads))
        self._replace(0, len(self._cells), kept)

    def _replace(self, first: int, last: int, cells: Iterable[_Cell]) -> None:
        merged: list[_Cell] = []
        for cell in cells:
            if merged and merged[-1].hi == cell.lo and merged[-1][2:] == cell[2:]:
                merged[-1] = merged[-1]._replace(hi=cell.hi)
            else:
                merged.append(cell)
        self._cells[first:last] = merged
        self._starts[first:last] = [cell.lo for cell in merged]


def _new(lo: int, hi: int, op: Stamped, writes: bool) -> _Cell:
    return _Cell(lo, hi, op, ()) if writes else _Cell(lo, hi, None, (op,))


def _conflicts(cell: _Cell, op: Stamped, lo: int, hi: int, writes: bool) -> list[Conflict]:
    found = []
    if cell.write is not None and not is_before(cell.write, op):
        found.append(Conflict(cell.write, True, lo, hi))
    if writes:
        found += [Conflict(read, False, lo, hi) for read in cell.reads if not is_before(read, op)]
    return found


def _after(cell: _Cell, op: Stamped, lo: int, hi: int, writes: bool) -> _Cell:
    if writes:
        return _Cell(lo, hi, op, ())
    if cell.write is op:
        return _Cell(lo, hi, op, cell.reads)
    # Reads that are before this one need not be kept: an operation that must wait for them must wait for this one.
    return _Cell(lo, hi, cell.write, (*(read for read in cell.reads if not is_before(read, op)), op))
