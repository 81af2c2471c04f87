"""What streams cost in memory: the activations of an entry, before plan-memory gives them offsets.

Work that runs beside other work keeps its buffers beside that one's, so that each arena grows where it is fullest.
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
    """The activation arenas of one entry's steps."""

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
        """For each step the largest share of the arenas' greatest need that is alive while it may run: in the order of
        the list, from the last step it depends on to the first that depends on it."""
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
        """Bytes of all arenas together if the steps run on these streams, with the events that they need."""
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
    """A buffer's life as plan-memory sees it, with steps counted from 1 over all streams."""
    last = [0] * len(names)
    before = [len(streams)] * len(names)
    for number in steps:
        last[names[streams[number]]] = number + 1
        for name, i in names.items():
            before[i] = min(before[i], order.before[number].get(name, -1) + 1)
    return Use("", last, before, steps[0], steps[-1])
