"""Which stream each step of an entry runs on: list scheduling by estimated times.

    norm ── q ── rope ── attention        stream 0   norm  q  rope ─┬─ attention
       ├─── k ── rope ──┘         →       stream 1        k  rope ──┤
       └─── v ──────────┘                 stream 2        v ────────┘

The scheduler takes the steps in list order and never reorders them. A step stays on the stream of the dependence that
ends last, so a chain stays on one stream. It moves to another stream only if it ends earlier there by more than the
time of one event. (Moving costs two events: the one before the step is part of its start time on the other stream, and
the one after it is this margin.)

The *critical successor* of a step is the step that depends on it and has the longest path of work behind it. If the
critical successor of a stream's last step is ready, any other step pays for delaying it: the span of that other step is
added to the price of this stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qcompiler.kernels.cost import Cost, Occupancy


@dataclass(frozen=True)
class Task:
    """One step. `candidates` lists the streams it may run on, the device's own stream first. `earlier` lists the steps
    it depends on."""

    device: str
    candidates: tuple[str, ...]
    earlier: tuple[int, ...]
    cost: Cost
    event: float
    """Microseconds that an edge from another stream takes."""
    stays: bool = False
    """Whether it must stay on the device's own stream."""


@dataclass(frozen=True)
class StreamChoice:
    """The stream of each task, and when the last of them ends, in microseconds."""

    streams: tuple[str, ...]
    span: float


def choose(tasks: Sequence[Task], limit: int) -> StreamChoice:
    """Chooses a stream for each task, among the first `limit` of its `candidates`."""
    state = _State(_critical_successors(tasks))
    for task in tasks:
        state.add(task, task.candidates[:limit])
    return StreamChoice(tuple(state.streams), state.span(tasks))


def _critical_successors(tasks: Sequence[Task]) -> list[tuple[int, int] | None]:
    """For each task: its critical successor, and the latest task that this successor depends on."""
    rank = [task.cost.span for task in tasks]
    successors: list[int | None] = [None] * len(tasks)
    for number in reversed(range(len(tasks))):
        successor = successors[number]
        rank[number] += rank[successor] if successor is not None else 0.0
        for each in tasks[number].earlier:
            best = successors[each]
            if best is None or rank[number] >= rank[best]:
                successors[each] = number
    return [None if successor is None else (successor, max(tasks[successor].earlier)) for successor in successors]


def longest_chain(tasks: Sequence[Task]) -> float:
    """A lower bound on the time with any number of streams: the longest chain of dependences without events, or the
    total work of one device at its full rate, whichever is longer."""
    ends: list[float] = []
    work: dict[str, float] = {}
    for task in tasks:
        ends.append(max((ends[each] for each in task.earlier), default=0.0) + task.cost.span)
        work[task.device] = work.get(task.device, 0.0) + task.cost.span * task.cost.share
    return max([*ends, *work.values()], default=0.0)


@dataclass
class _State:
    successors: Sequence[tuple[int, int] | None]
    streams: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    """When each stream in use finishes the work assigned to it so far."""
    last: dict[str, int] = field(default_factory=dict)
    devices: dict[str, Occupancy] = field(default_factory=dict)

    def span(self, tasks: Sequence[Task]) -> float:
        """When every stream has been joined to the device's own stream."""
        events = {stream: task.event for stream, task in zip(self.streams, tasks, strict=True)}
        owns = {task.candidates[0] for task in tasks}
        return max(
            (end + (0.0 if stream in owns else events[stream]) for stream, end in self.free.items()), default=0.0
        )

    def add(self, task: Task, candidates: Sequence[str]) -> None:
        device = self.devices.setdefault(task.device, Occupancy())
        home = self._home(task, candidates)
        ends = {
            stream: device.finish(self._start(task, stream, candidates[0]), task.cost)
            for stream in self._open(candidates)
        }
        price = {stream: end + self._delay(stream, task) for stream, end in ends.items()}
        best = min(price, key=lambda stream: (price[stream], candidates.index(stream)))
        chosen = candidates[0] if task.stays else best if price[best] + task.event < price[home] else home
        end = device.place(self._start(task, chosen, candidates[0]), task.cost)
        self.last[chosen] = len(self.streams)
        self.streams.append(chosen)
        self.ends.append(end)
        self.free[chosen] = end

    def _delay(self, stream: str, task: Task) -> float:
        """The price of putting `task` on `stream`, on top of its end time: the delay of the critical successor that is
        ready to run there, or the join event of a stream not yet in use."""
        if stream not in self.free:
            return 0.0 if stream == task.candidates[0] else task.event
        successor = self.successors[self.last[stream]] if stream in self.last else None
        number = len(self.streams)
        if successor is None or successor[0] <= number or successor[1] >= number:
            return 0.0  # no critical successor; or it is this task, is placed already, or is not ready yet
        return task.cost.span

    def _home(self, task: Task, candidates: Sequence[str]) -> str:
        """The stream the step stays on by default: that of the dependence that ends last."""
        before = [each for each in task.earlier if self.streams[each] in candidates]
        return self.streams[max(before, key=lambda each: (self.ends[each], each))] if before else candidates[0]

    def _open(self, candidates: Sequence[str]) -> list[str]:
        """The candidates in use, the device's own stream, and one unused candidate."""
        used = [stream for stream in candidates if stream in self.free or stream == candidates[0]]
        return [*used, *[stream for stream in candidates if stream not in used][:1]]

    def _start(self, task: Task, stream: str, own: str) -> float:
        """When `task` can start on `stream`: after the stream's own work and after every dependence. A dependence on
        another stream costs an event. A stream not yet in use starts one event after the device's own."""
        times = [self.free.get(stream, 0.0 if stream == own else task.event)]
        times += [self.ends[each] + (0.0 if self.streams[each] == stream else task.event) for each in task.earlier]
        return max(times)
