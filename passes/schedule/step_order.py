"""Which steps depend on each other, and which pairs the streams and events already order.

    a: launch writes %h        b: launch reads %h, writes %y        c: launch writes %h
    b depends on a (it reads what a wrote), c on b (it overwrites what b reads)

Dependences are between whole buffers: before plan-memory, no two buffers share bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.ir.rt import StepOp
from qcompiler.ir.rt_schedule import Schedule


def dependences(schedule: Schedule, steps: Sequence[StepOp]) -> list[tuple[int, ...]]:
    """For each step, the earlier steps it must follow: the last writer of each buffer it touches, and, for each buffer
    it writes, all readers since that write. Transitive dependences are left out."""
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
    """The order that streams and events guarantee so far. `before[n]` maps each stream to its latest step that has
    finished when step n begins."""

    def __init__(self) -> None:
        self.before: list[dict[str, int]] = []
        self._now: dict[str, dict[str, int]] = {}
        self._after: list[tuple[str, dict[str, int]]] = []

    def waits(self, number: int, stream: str, earlier: Sequence[int]) -> list[int]:
        """Adds the next step. Returns the dependences it still needs an event for, latest first."""
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
