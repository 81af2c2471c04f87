"""Tracks the memory of one entry point step by step: what was written, and whether conflicting accesses are ordered.

*Order.* Steps are issued in the plan's order. But only two things order the execution of two steps: a common stream, or
an event that is recorded after the first and waited for before the second. Every stream has a vector clock. Step `c` of
stream `i` happens before the current step on stream `j` if `clock[j][i] >= c`.

*Content.* Several buffers may use the same bytes, one after the other. A write makes its buffer live, and ends the life
of every buffer that it overlaps. A read of a buffer that is not live is refused. This is decided for whole buffers, so
it does not depend on the symbols. A read of a live buffer also requires that each of its bytes was written since that
life began. coverage.py decides this, with holes of strided writes.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qcompiler.errors import ScheduleError
from qcompiler.plan.coverage import Coverage
from qcompiler.plan.view_regions import Ranges, Region, disjoint


class Clocks:
    """Vector clocks of an entry's streams and the events between them. Streams are numbered."""

    def __init__(self, streams: Sequence[str]) -> None:
        self.names = tuple(streams)
        self.index = {name: i for i, name in enumerate(streams)}
        self.clocks = [[0] * len(streams) for _ in streams]
        self._events: dict[str, _Recorded] = {}

    def tick(self, stream: int) -> int:
        """Counts one more step on a stream, and returns its number."""
        clock = self.clocks[stream]
        clock[stream] += 1
        return clock[stream]

    def record(self, event: str, stream: int, step: int) -> None:
        """The event now stands for all steps of the stream so far. ScheduleError if an older use of the event may not
        have finished."""
        clock = self.clocks[stream]
        old = self._events.get(event)
        if old is not None:
            for user, count, what, at in old.uses:
                if clock[user] < count:
                    raise ScheduleError(
                        f"event '{event}' is recorded again on stream '{self.names[stream]}' while its {what} of step "
                        f"{at} on stream '{self.names[user]}' is not ordered before; use another event",
                        rule="event-rerecorded",
                    )
        self._events[event] = _Recorded(tuple(clock), [(stream, clock[stream], "record", step)])

    def wait(self, event: str, stream: int, step: int) -> None:
        """The stream's next steps run after the event's latest record. ScheduleError if no earlier step recorded it."""
        recorded = self._events.get(event)
        if recorded is None:
            raise ScheduleError(
                f"stream '{self.names[stream]}' waits for event '{event}', which no earlier step of this entry "
                "records; record it before the wait",
                rule="wait-before-record",
            )
        clock = self.clocks[stream]
        for i, count in enumerate(recorded.clock):
            clock[i] = max(clock[i], count)
        recorded.uses.append((stream, clock[stream], "wait", step))


@dataclass
class _Recorded:
    clock: tuple[int, ...]
    uses: list[tuple[int, int, str, int]]  # stream, count, "record" or "wait", step number


@dataclass(slots=True)
class _Access:
    count: int
    step: int
    region: Region


@dataclass(slots=True)
class BufferState:
    """One buffer in one entry. A `loaded` buffer (input, state, constant, init result) has contents from the start."""

    name: str
    start: int  # offset in the arena
    nbytes: int
    shares: bool  # other buffers may lie on the same bytes (activations)
    loaded: bool
    alive: bool = False
    ended_by: tuple[str, int] | None = None
    written: dict[int, Region] = field(default_factory=dict)  # by id(region): an entry shares its regions
    covered: set[int] = field(default_factory=set)  # ids of regions that `written` is known to cover
    accesses: dict[tuple[int, int, bool], _Access] = field(default_factory=dict)
    before: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # by stream: count, step, buffer
    touched: int = -1  # the last step that used the buffer


class Arenas:
    """The owner of each byte of the shared arenas, as sorted disjoint segments."""

    def __init__(self) -> None:
        self._segments: dict[str, tuple[list[int], list[tuple[int, BufferState]]]] = {}

    def claim(self, arena: str, state: BufferState) -> list[BufferState]:
        """Makes the buffer the owner of its bytes, and returns the buffers that owned some of them before."""
        starts, segments = self._segments.setdefault(arena, ([], []))
        low, high = state.start, state.start + state.nbytes
        first = bisect.bisect_right(starts, low) - 1
        if first < 0 or segments[first][0] <= low:
            first += 1
        last = bisect.bisect_left(starts, high)
        displaced: dict[int, BufferState] = {}
        new_starts: list[int] = [low]
        new_segments: list[tuple[int, BufferState]] = [(high, state)]
        for begin, (end, owner) in zip(starts[first:last], segments[first:last], strict=True):
            displaced[id(owner)] = owner
            if begin < low:
                new_starts.insert(0, begin)
                new_segments.insert(0, (low, owner))
            if end > high:
                new_starts.append(high)
                new_segments.append((end, owner))
        starts[first:last] = new_starts
        segments[first:last] = new_segments
        displaced.pop(id(state), None)
        return list(displaced.values())


class AccessChecker:
    """Checks every access of an entry. Step numbers appear in messages; `ranges` are those of the entry's symbols."""

    def __init__(self, clocks: Clocks, ranges: Ranges) -> None:
        self.clocks = clocks
        self.ranges = ranges
        self.coverage = Coverage(ranges)
        self.arenas = Arenas()
        self.ordered = len(clocks.names) <= 1  # one stream: everything is ordered

    def read(self, state: BufferState, region: Region, stream: int, step: int) -> None:
        """ScheduleError: unwritten-read, live-overlap or unordered-read."""
        if not state.loaded:
            if not state.alive:
                self._refuse_dead(state)
            self._check_written(state, region)
        self._order(state, region, stream, step, is_write=False)
        state.touched = step

    def _check_written(self, state: BufferState, region: Region) -> None:
        if id(region) in state.written or id(region) in state.covered:
            return
        hole = self.coverage.hole(region, state.written.values())
        if hole is not None:
            low, high = region.low.evaluate(hole), region.high.evaluate(hole)
            raise ScheduleError(
                f"reads bytes [{low}, {high}) of buffer '{state.name}', not all of which were written "
                f"before{at_shapes(hole)}; write them first",
                rule="unwritten-read",
            )
        state.covered.add(id(region))

    def write(self, state: BufferState, arena: str, region: Region, stream: int, step: int) -> None:
        """ScheduleError: live-overlap, unordered-reuse or unordered-write."""
        if not state.loaded and not state.alive:
            self._begin_life(state, arena, step)
        clock = self.clocks.clocks[stream]
        for other, (count, at, name) in state.before.items():
            if clock[other] < count:
                raise ScheduleError(
                    f"writes buffer '{state.name}', whose memory buffer '{name}' used until step {at} on stream "
                    f"'{self.clocks.names[other]}', without being ordered after that; wait for an event recorded there",
                    rule="unordered-reuse",
                )
        self._order(state, region, stream, step, is_write=True)
        state.written[id(region)] = region
        state.touched = step

    def _begin_life(self, state: BufferState, arena: str, step: int) -> None:
        old = list(state.accesses.items())
        state.before = {}
        for (stream, _, _), access in old:
            self._inherit(state, stream, access, state.name)
        for owner in self.arenas.claim(arena, state) if state.shares else ():
            if owner.touched == step:
                raise ScheduleError(
                    f"uses the buffers '{owner.name}' and '{state.name}' at once, but they overlap in arena '{arena}'; "
                    "place them apart",
                    rule="live-overlap",
                )
            for (stream, _, _), access in owner.accesses.items():
                self._inherit(state, stream, access, owner.name)
            if owner.alive:
                owner.alive, owner.ended_by = False, (state.name, step)
        state.alive, state.written, state.covered, state.accesses = True, {}, set(), {}

    @staticmethod
    def _inherit(state: BufferState, stream: int, access: _Access, name: str) -> None:
        known = state.before.get(stream)
        if known is None or known[0] < access.count:
            state.before[stream] = (access.count, access.step, name)

    @staticmethod
    def _refuse_dead(state: BufferState) -> None:
        if state.ended_by is None:
            raise ScheduleError(
                f"reads buffer '{state.name}', which no earlier step writes; write it first", rule="unwritten-read"
            )
        by, at = state.ended_by
        raise ScheduleError(
            f"reads buffer '{state.name}' although step {at} overwrote its memory through buffer '{by}': two live "
            "buffers overlap; place them apart",
            rule="live-overlap",
        )

    def _order(self, state: BufferState, region: Region, stream: int, step: int, *, is_write: bool) -> None:
        """Every earlier access that conflicts with this one must happen before it."""
        if self.ordered:
            return
        clock = self.clocks.clocks[stream]
        for (other, _, was_write), access in state.accesses.items():
            if other == stream or not (is_write or was_write) or clock[other] >= access.count:
                continue
            if region is not access.region and disjoint(region, access.region, self.ranges):
                continue
            what = f"{'writes' if was_write else 'reads'} the same bytes"
            raise ScheduleError(
                f"{'writes' if is_write else 'reads'} buffer '{state.name}' while step {access.step} on stream "
                f"'{self.clocks.names[other]}', which {what}, is not ordered before; record an event after that step "
                "and wait for it here",
                rule=_UNORDERED[was_write, is_write],
            )
        state.accesses[stream, id(region), is_write] = _Access(clock[stream], step, region)


_UNORDERED = {
    (True, False): "unordered-read",  # read after write
    (True, True): "unordered-write",  # write after write
    (False, True): "unordered-overwrite",  # write after read
}


def at_shapes(binding: Mapping[str, int]) -> str:
    """Symbol values for a message: " at b = 1, s = 7", or nothing."""
    return " at " + ", ".join(f"{name} = {value}" for name, value in binding.items()) if binding else ""
