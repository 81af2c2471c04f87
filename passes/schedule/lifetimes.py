"""Lifetimes of buffers at step granularity, under the order that streams and events give.

Step c of stream i happens before any step whose clock has `clock[i] >= c`; c counts from 1. The lifetime of a buffer in
an entry is two vectors over the streams. `last[i]` is the number of its last use on stream i (0: none). `before[i]` is
the number of steps of stream i that have certainly finished when any use of the buffer begins. All uses of X come
before all uses of Y exactly if `before_Y >= last_X` in every component.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import PassError
from qcompiler.ir.rt import EntryOp, RecordOp, StepOp, WaitOp, name_of
from qcompiler.ir.rt_schedule import Schedule


@dataclass
class Use:
    """The lifetime of one buffer in one entry. `first` and `final` are positions in the entry's list of steps."""

    entry: str
    last: list[int]
    before: list[int]
    first: int
    final: int


class Lifetimes:
    """The lifetimes of all buffers of a schedule. PassError for a step without a stream."""

    def __init__(self, schedule: Schedule) -> None:
        self._uses: dict[str, list[Use]] = {}
        for entry in schedule.entries.values():
            for name, use in _walk(entry, schedule).items():
                self._uses.setdefault(name, []).append(use)

    def of(self, buffer: str) -> list[Use]:
        """One lifetime for each entry that uses the buffer."""
        return self._uses.get(buffer, [])

    def lower_bound(self, sizes: dict[str, int]) -> int:
        """Bytes that every placement needs: the most that are live at one position of an entry's list of steps."""
        most = 0
        for entry in {use.entry for name in sizes for use in self.of(name)}:
            change: dict[int, int] = {}
            for name, size in sizes.items():
                for use in self.of(name):
                    if use.entry == entry:
                        change[use.first] = change.get(use.first, 0) + size
                        change[use.final + 1] = change.get(use.final + 1, 0) - size
            live = 0
            for _, difference in sorted(change.items()):
                live += difference
                most = max(most, live)
        return most


def _walk(entry: EntryOp, schedule: Schedule) -> dict[str, Use]:
    streams = {name: i for i, name in enumerate(dict.fromkeys(step.stream_name for step in entry.steps))}
    clocks = [[0] * len(streams) for _ in streams]
    events: dict[str, list[int]] = {}
    uses: dict[str, Use] = {}
    for place, step in enumerate(entry.steps):
        if step.stream_name is None:
            raise PassError(
                f"{step.name} in entry '{entry.sym}' has no stream; run assign-streams", stage="plan-memory"
            )
        stream = streams[step.stream_name]
        clock = clocks[stream]
        if isinstance(step, WaitOp):
            event = name_of(step.event)
            if event not in events:
                raise PassError(f"entry '{entry.sym}' waits for '{event}' before it is recorded", stage="plan-memory")
            clock[:] = map(max, clock, events[event])
        for buffer in _touched(step, schedule):
            use = uses.setdefault(buffer, Use(entry.sym, [0] * len(streams), list(clock), place, place))
            use.last[stream] = clock[stream] + 1
            use.before = list(map(min, use.before, clock))
            use.final = place
        clock[stream] += 1
        if isinstance(step, RecordOp):
            events[name_of(step.event)] = list(clock)
    return uses


def _touched(step: StepOp, schedule: Schedule) -> list[str]:
    return [view.buffer for view, _ in schedule.accesses(step)]
