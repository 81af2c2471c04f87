"""What each step of an entry point touches, and which steps may change places."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.ir.rt import StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.plan.dims import Range, product
from qcompiler.plan.plan import View
from qcompiler.plan.view_regions import Region, disjoint, is_packed, region_of, whole


class Touched:
    """What each step touches, and whether two steps could not change places."""

    def __init__(self, steps: Sequence[StepOp], schedule: Schedule, ranges: dict[str, Range]) -> None:
        self._ranges = ranges
        self._regions: dict[View, Region] = {}
        self._conflicts: dict[tuple[int, int], bool] = {}
        self._views: list[dict[str, list[tuple[View, bool]]]] = []
        self._users: dict[str, list[int]] = {}
        self._writers: dict[str, list[tuple[int, View]]] = {}
        self._sizes = {name: buffer.nbytes.value.data for name, buffer in schedule.buffers.items()}
        self._kinds = {name: schedule.arenas[buffer.arena_name].kind.data for name, buffer in schedule.buffers.items()}
        for number, step in enumerate(steps):
            found: dict[str, list[tuple[View, bool]]] = {}
            for view, access in schedule.accesses(step):
                found.setdefault(view.buffer, []).append((view, access != "r"))
                if access != "r":
                    self._writers.setdefault(view.buffer, []).append((number, view))
            for buffer in found:
                self._users.setdefault(buffer, []).append(number)
            self._views.append(found)

    def users(self, buffer: str) -> list[int]:
        """The steps that touch a buffer."""
        return self._users[buffer]

    def is_only_used_by(self, buffer: str, steps: Sequence[int]) -> bool:
        """Whether these steps, in this order, are all that touches a buffer. Nobody else sees it: it is no argument, no
        result of the program and no state."""
        return self._kinds[buffer] == "activations" and self._users[buffer] == list(steps)

    def writers(self, buffer: str) -> list[tuple[int, View]]:
        """The steps that write to a buffer, each with the view."""
        return self._writers.get(buffer, [])

    def conflict(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """Whether some step of the one kind writes what a step of the other kind touches."""
        return any(self._between(a, b) for a in some for b in others)

    def _between(self, a: int, b: int) -> bool:
        """`conflict` for two steps. A pass asks for most pairs several times."""
        pair = (min(a, b), max(a, b))
        if pair not in self._conflicts:
            self._conflicts[pair] = self._found_between(*pair)
        return self._conflicts[pair]

    def _found_between(self, a: int, b: int) -> bool:
        mine, theirs = self._views[a], self._views[b]
        return any(
            (writes or written) and not self._apart(view, other)
            for buffer in mine.keys() & theirs.keys()
            for view, writes in mine[buffer]
            for other, written in theirs[buffer]
        )

    def _apart(self, a: View, b: View) -> bool:
        """Whether no byte is in both. One without elements is not apart: it must not be read before it is written."""
        if self._may_be_empty(a) or self._may_be_empty(b):
            return False
        return disjoint(self._region(a), self._region(b), self._ranges)

    def _may_be_empty(self, view: View) -> bool:
        return product(view.shape).bounds(self._ranges)[0] < 1

    def _region(self, view: View) -> Region:
        if view not in self._regions:
            self._regions[view] = (
                whole(self._sizes[view.buffer])
                if is_packed(view)
                else region_of(view.dtype, view.shape, view.strides, view.offset, self._ranges)
            )
        return self._regions[view]
