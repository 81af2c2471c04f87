"""What a step depends on, and what streams and events order already.

    a: launch writes %h        b: launch reads %h, writes %y        c: launch writes %h
    b depends on a (it reads what a wrote), c on b (it overwrites what b reads)

Judged by whole buffers: no two buffers share bytes before plan-memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.ir.rt import StepOp
from qcompiler.ir.rt_schedule import Schedule


def dependences(schedule: Schedule, steps: Sequence[StepOp]) -> list[tuple[int, ...]]:
    """For each step the earlier ones that it must follow: the last that wrote what it touches and, where it writes,
    all that have read it since. What follows from these is not repeated."""
    written: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    found: list[tuple[int, ...]] = []
    for number, step in enumerate(steps):
        touched = accesses(schedule, step)
        writes = {buffer for buffer, access in touched if access != "r"}
        earlier = {written[buffer] for buffer, _ in touched if buffer in written}
        earlier.update(reader for buffer in writes for reader in read.get(buffer, ()))
        found.append(tuple(sorted(earlier)))
        for buffer, _ in touched:
            if buffer in writes:
                written[buffer] = number
                read[buffer] = []
            else:
                read.setdefault(buffer, []).append(number)
    return found


def accesses(schedule: Schedule, step: StepOp) -> list[tuple[str, str]]:
    """Buffers a step touches, each with "r", "w" or "rw"."""
    return [(view.buffer, access) for view, access in schedule.accesses(step)]


class Order:
    """What is ordered already. `before[n]` holds the latest step on each stream that is over when step n begins."""

    def __init__(self) -> None:
        self.before: list[dict[str, int]] = []
        self._now: dict[str, dict[str, int]] = {}
        self._after: list[tuple[str, dict[str, int]]] = []

    def waits(self, number: int, stream: str, earlier: Sequence[int]) -> list[int]:
        """Enters the next step; those of the steps it depends on that it must still wait for, latest first."""
        now, needed = self._now.setdefault(stream, {}), []
        for each in sorted(earlier, reverse=True):
            other, clock = self._after[each]
            if other == stream or now.get(other, -1) >= each:
                continue
            needed.append(each)
            for name, step in clock.items():
                now[name] = max(now.get(name, -1), step)
        self.before.append(dict(now))
        now[stream] = number
        self._after.append((stream, dict(now)))
        return needed
