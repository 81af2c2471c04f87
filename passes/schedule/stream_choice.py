"""Which stream each step of an entry runs on: list scheduling by estimated times.

    norm ── q ── rope ── attention        stream 0   norm  q  rope ─┬─ attention
       ├─── k ── rope ──┘         →       stream 1        k  rope ──┤
       └─── v ──────────┘                 stream 2        v ────────┘

Steps are taken in the order of the list, which is never changed.  A step goes on where the last of the steps it depends
on ran, so that a chain stays on one stream.  It goes elsewhere only if it would end there earlier by more than an event
takes: the event in front of it counts in its time there, the one behind it is that margin.  A stream whose last step
has an *heir* (of the steps that depend on it, the one with the most work behind it) that could go on at once is dearer
to all others by the time that the heir would have to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompiler.kernels.cost import Cost, Occupancy


@dataclass(frozen=True)
class Task:
    """One step. `lanes` are the streams it may run on, the first one the device's own; `earlier` its dependences."""

    device: str
    lanes: tuple[str, ...]
    earlier: tuple[int, ...]
    cost: Cost
    event: float
    """Microseconds that an edge from another stream takes."""
    stays: bool = False
    """Whether it runs on the device's own stream in any case."""


@dataclass(frozen=True)
class Choice:
    """The stream of each task, and when the last of them ends, in microseconds."""

    streams: tuple[str, ...]
    span: float


def choose(tasks: Sequence[Task], limit: int) -> Choice:
    """A stream for each task, of the first `limit` of its lanes."""
    state = _State(_heirs(tasks))
    for task in tasks:
        state.add(task, task.lanes[:limit])
    return Choice(tuple(state.streams), state.span(tasks))


def _heirs(tasks: Sequence[Task]) -> list[tuple[int, int] | None]:
    """For each task its heir, and the last of the tasks that the heir depends on."""
    rank = [task.cost.span for task in tasks]
    heirs: list[int | None] = [None] * len(tasks)
    for number in reversed(range(len(tasks))):
        heir = heirs[number]
        rank[number] += rank[heir] if heir is not None else 0.0
        for each in tasks[number].earlier:
            best = heirs[each]
            if best is None or rank[number] >= rank[best]:
                heirs[each] = number
    return [None if heir is None else (heir, max(tasks[heir].earlier)) for heir in heirs]


def longest_chain(tasks: Sequence[Task]) -> float:
    """What no number of streams gets below: the longest chain of dependences without any event, or all of a device's
    work at its full rate."""
    ends: list[float] = []
    work: dict[str, float] = {}
    for task in tasks:
        ends.append(max((ends[each] for each in task.earlier), default=0.0) + task.cost.span)
        work[task.device] = work.get(task.device, 0.0) + task.cost.span * task.cost.share
    return max([*ends, *work.values()], default=0.0)


@dataclass
class _State:
    heirs: Sequence[tuple[int, int] | None]
    streams: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    """When each stream that is in use has done what it was given."""
    last: dict[str, int] = field(default_factory=dict)
    devices: dict[str, Occupancy] = field(default_factory=dict)

    def span(self, tasks: Sequence[Task]) -> float:
        """When every stream has been joined to its device's own."""
        events = {stream: task.event for stream, task in zip(self.streams, tasks, strict=True)}
        owns = {task.lanes[0] for task in tasks}
        return max(
            (end + (0.0 if stream in owns else events[stream]) for stream, end in self.free.items()), default=0.0
        )

    def add(self, task: Task, lanes: Sequence[str]) -> None:
        device = self.devices.setdefault(task.device, Occupancy())
        home = self._home(task, lanes)
        ends = {lane: device.finish(self._start(task, lane, lanes[0]), task.cost) for lane in self._open(lanes)}
        price = {lane: end + self._delay(lane, task) for lane, end in ends.items()}
        best = min(price, key=lambda lane: (price[lane], lanes.index(lane)))
        chosen = lanes[0] if task.stays else best if price[best] + task.event < price[home] else home
        end = device.place(self._start(task, chosen, lanes[0]), task.cost)
        self.last[chosen] = len(self.streams)
        self.streams.append(chosen)
        self.ends.append(end)
        self.free[chosen] = end

    def _delay(self, lane: str, task: Task) -> float:
        """What the heir of a stream's last step loses if the task at hand takes its place there; the event that joins
        a stream that is not in use yet."""
        if lane not in self.free:
            return 0.0 if lane == task.lanes[0] else task.event
        heir = self.heirs[self.last[lane]] if lane in self.last else None
        number = len(self.streams)
        if heir is None or heir[0] <= number or heir[1] >= number:
            return 0.0  # nobody, this task itself, somebody who has his place, or who waits for others still
        return task.cost.span

    def _home(self, task: Task, lanes: Sequence[str]) -> str:
        """Where the step goes on by itself: behind the dependence that ends last."""
        before = [each for each in task.earlier if self.streams[each] in lanes]
        return self.streams[max(before, key=lambda each: (self.ends[each], each))] if before else lanes[0]

    def _open(self, lanes: Sequence[str]) -> list[str]:
        """The streams in use, the device's own, and one more."""
        used = [lane for lane in lanes if lane in self.free or lane == lanes[0]]
        return [*used, *[lane for lane in lanes if lane not in used][:1]]

    def _start(self, task: Task, lane: str, own: str) -> float:
        """Behind what the stream was given, and behind the dependences, those on other streams an event later. A
        stream that begins waits for the device's own to begin."""
        times = [self.free.get(lane, 0.0 if lane == own else task.event)]
        times += [self.ends[each] + (0.0 if self.streams[each] == lane else task.event) for each in task.earlier]
        return max(times)
