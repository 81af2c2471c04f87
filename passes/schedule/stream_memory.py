"""Activation memory that a choice of streams needs, estimated before plan-memory assigns offsets.

Two steps that may run at the same time cannot share memory. So the arenas grow, most of all where they are fullest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompiler.ir.rt import StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.plan_memory import place
from qcompiler.passes.schedule.lifetimes import Use
from qcompiler.passes.schedule.step_order import Order, accesses


@dataclass
class _Life:
    """The steps that use one buffer."""

    nbytes: int
    steps: list[int] = field(default_factory=list)


class ActivationMemory:
    """The activation arenas of one entry."""

    def __init__(self, schedule: Schedule, steps: Sequence[StepOp], earlier: Sequence[tuple[int, ...]]) -> None:
        self._earlier = earlier
        self._arenas: dict[str, dict[str, _Life]] = {}
        for number, step in enumerate(steps):
            for name in dict.fromkeys(buffer for buffer, _ in accesses(schedule, step)):
                buffer = schedule.buffers[name]
                if schedule.arenas[buffer.arena_name].kind.data == "activations":
                    lives = self._arenas.setdefault(buffer.arena_name, {})
                    lives.setdefault(name, _Life(buffer.nbytes.value.data)).steps.append(number)

    def fullness(self) -> list[float]:
        """For each step, how full the arenas get while it may run: live bytes divided by the peak, 0 to 1. A step may
        run at any point of the list between its last dependence and its first dependent. The fullest arena counts."""
        found = [0.0] * len(self._earlier)
        for lives in self._arenas.values():
            change = [0] * (len(found) + 1)
            for life in lives.values():
                change[life.steps[0]] += life.nbytes
                change[life.steps[-1] + 1] -= life.nbytes
            alive, profile = 0, []
            for difference in change[:-1]:
                alive += difference
                profile.append(alive)
            most = max(profile, default=0)
            found = [max(each, now / most) if most else each for each, now in zip(found, profile, strict=True)]
        first = [len(found)] * len(found)
        for number, earlier in reversed(list(enumerate(self._earlier))):
            for each in earlier:
                first[each] = number
        begins = (max(earlier, default=-1) + 1 for earlier in self._earlier)
        return [max(found[begin:end]) for begin, end in zip(begins, first, strict=True)]

    def nbytes(self, streams: Sequence[str]) -> int:
        """Total bytes of all arenas if the steps run on these streams, with the events this requires."""
        order = Order()
        for number, (stream, earlier) in enumerate(zip(streams, self._earlier, strict=True)):
            order.waits(number, stream, earlier)
        names = {name: i for i, name in enumerate(dict.fromkeys(streams))}
        total = 0
        for lives in self._arenas.values():
            sizes = [life.nbytes for life in lives.values()]
            uses = [[_use(life.steps, streams, names, order)] for life in lives.values()]
            offsets = place(sizes, uses, {})
            total += max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
        return total


def _use(steps: Sequence[int], streams: Sequence[str], names: dict[str, int], order: Order) -> Use:
    """The lifetime of a buffer as plan-memory sees it. Steps count from 1 over all streams."""
    last = [0] * len(names)
    before = [len(streams)] * len(names)
    for number in steps:
        last[names[streams[number]]] = number + 1
        for name, i in names.items():
            before[i] = min(before[i], order.before[number].get(name, -1) + 1)
    return Use("", last, before, steps[0], steps[-1])
