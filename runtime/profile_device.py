"""Times the launches of a call on a GPU: an event before and after each on the launch's own stream.

A launch that the host submits after the device has become idle would be timed with its waiting for the host.  So each
timed call begins with a plug: copies between two buffers that keep the device busy until the host has submitted all
steps.  The plug is made as long as the submission takes.  A launch is late if the device had reached the event before
it when it was submitted.  Rounds in which a step was late do not count for it; a step that was late in every round is
marked.

The timed call goes through the session's own call, with another executor in the place of its own.  Nothing of this is
in the way of an ordinary call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from qcompiler.runtime.backends.base import Backend, Event, Memory
from qcompiler.runtime.profile_cpu import WARM_UP
from qcompiler.runtime.streams import Queue, order

if TYPE_CHECKING:
    from qcompiler.runtime.binding import Binding
    from qcompiler.runtime.device_session import DeviceSession
    from qcompiler.runtime.executor import ArenaArray, PlanExecutor, Submission, TorchTime

PLUG_BYTES = 128 << 20
"""Bytes of a copy of a plug. With what it writes it is more than the caches of the GPUs that there are: the copies that
measure the bandwidth are of memory."""

LONGEST_PLUG_US = 50_000.0
AHEAD = 1.5
"""The plug's time as a share of the time in which the host submits all steps."""

COPIES = 8
"""Copies that measure the bandwidth."""


@dataclass(frozen=True)
class DeviceTiming:
    """A step's number, and medians over the rounds in microseconds."""

    step: int
    us: float
    begin_us: float
    late: bool


@dataclass(frozen=True)
class DeviceTimings:
    """What the rounds gave. `bandwidth` is that of copies in bytes per second (0 on the simulated GPU); `late` says
    that the untimed steps were submitted late in every round."""

    call_us: float
    entry_us: float
    round_us: float
    steps: tuple[DeviceTiming, ...]
    bandwidth: float
    late: bool


class Plug:
    """Copies that keep a device busy for a wanted time. None on the simulated GPU, which has no time of its own."""

    def __init__(self, home: Queue) -> None:
        self._home = home
        self._memory: list[Memory] = []
        self._copy_us = 0.0
        self.bandwidth = 0.0
        self._done = home.backend.event("plug")
        if home.backend.kind != "sim":
            self._memory = [home.backend.allocate(PLUG_BYTES, label="plug") for _ in range(2)]
            self._measure()

    def _measure(self) -> None:
        """The time of a copy: the best of some, of which the first one does not count."""
        backend, stream = self._home.backend, self._home.stream
        timers = [backend.timer() for _ in range(COPIES + 2)]
        for timer in timers:
            backend.record(timer, stream)
            self._copy()
        backend.synchronize(stream)
        taken = [backend.elapsed(a, b) for a, b in pairwise(timers[1:])]
        self._copy_us = max(min(taken), 1e-3)
        self.bandwidth = 2 * PLUG_BYTES / self._copy_us * 1e6

    def _copy(self) -> None:
        source, target = self._memory
        self._home.backend.copy(self._home.stream, target.address, source.address, PLUG_BYTES)

    def insert(self, us: float) -> None:
        """Keeps the home stream busy for about so many microseconds."""
        if self._memory:
            for _ in range(math.ceil(min(us, LONGEST_PLUG_US) / self._copy_us)):
                self._copy()
        self._home.backend.record(self._done, self._home.stream)

    @property
    def over(self) -> bool:
        """Whether the device is past the plug, and so was idle before now. The simulated GPU never is."""
        return bool(self._memory) and self._home.backend.query(self._done)


@dataclass
class Behind:
    """An executor's steps behind plugs on all devices. `seconds` is how long the last submission of the steps took."""

    executor: PlanExecutor
    homes: Mapping[str, Queue]
    plugs: Mapping[str, Plug]
    seconds: float = 0.0
    late: bool = False

    def __post_init__(self) -> None:
        self.queues = self.executor.queues
        self.origins = {name: home.backend.timer("begin") for name, home in self.homes.items()}
        self.by_device = {home.backend.device: name for name, home in self.homes.items()}

    @property
    def time(self) -> TorchTime:
        return self.executor.time

    def run(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        for name, home in self.homes.items():
            self.plugs[name].insert(AHEAD * self.seconds * 1e6)
            home.backend.record(self.origins[name], home.stream)
        order(self.homes.values(), self.queues)
        began = perf_counter()
        self.submit(context, arenas, binding)
        self.seconds = perf_counter() - began
        self.late = any(plug.over for plug in self.plugs.values())

    def submit(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        raise NotImplementedError

    def since_origin(self, backend: Backend, timer: Event) -> float:
        return backend.elapsed(self.origins[self.by_device[backend.device]], timer)


@dataclass
class Untimed(Behind):
    """The steps as every call submits them, between two times on each stream."""

    ends: list[tuple[Backend, Event]] = field(default_factory=list)

    def submit(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        self.executor.run(context, arenas, binding)
        if not self.ends:
            self.ends = [(queue.backend, queue.backend.timer("end")) for queue in self.queues]
        for queue, (backend, timer) in zip(self.queues, self.ends, strict=True):
            backend.record(timer, queue.stream)

    @property
    def us(self) -> float:
        return max((self.since_origin(backend, timer) for backend, timer in self.ends), default=0.0)


@dataclass
class Timed(Behind):
    """The steps one by one, with an event before and after each that does work."""

    timers: dict[int, tuple[Backend, Event, Event]] = field(default_factory=dict)
    late_steps: set[int] = field(default_factory=set)

    def submit(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        self.late_steps.clear()
        for step in self.executor.submissions(binding):
            with self.executor.labelled(step.number):
                if step.work:
                    self._between(step, context, arenas)
                else:
                    step.issue(context, arenas)

    def _between(self, step: Submission, context: Any, arenas: ArenaArray) -> None:
        backend = step.backend
        if step.number not in self.timers:
            self.timers[step.number] = (backend, backend.timer("before"), backend.timer("after"))
        _, before, after = self.timers[step.number]
        backend.record(before, step.stream)
        step.issue(context, arenas)
        if backend.kind != "sim" and backend.query(before):
            self.late_steps.add(step.number)
        backend.record(after, step.stream)

    def spans(self) -> dict[int, tuple[float, float, bool]]:
        """Step -> (begin, time, late) of the last call, which is over."""
        return {
            number: (self.since_origin(backend, before), backend.elapsed(before, after), number in self.late_steps)
            for number, (backend, before, after) in self.timers.items()
        }


def time_calls(
    session: DeviceSession, args: tuple[Any, ...], kwargs: dict[str, Any], binding: Binding, rounds: int
) -> DeviceTimings:
    """Times calls of a session with the arguments of a binding: as they are, behind a plug, and step by step."""
    homes = session.queues.homes
    plugs = {name: Plug(home) for name, home in homes.items()}
    executor = session.executors[binding.entry]
    untimed, timed = Untimed(executor, homes, plugs), Timed(executor, homes, plugs)

    def call(run: PlanExecutor | Behind) -> float:
        session.executors[binding.entry] = cast("PlanExecutor", run)  # a call uses its queues and `run`
        began = perf_counter()
        session._run(args, kwargs, None, None)
        session.queues.synchronize()
        return perf_counter() - began

    calls, entries, spans = [], [], []
    try:
        for _ in range(WARM_UP + rounds):
            calls.append(call(executor))
            call(untimed)
            entries.append((0.0, untimed.us, untimed.late))
            call(timed)
            spans.append(timed.spans())
    finally:
        session.executors[binding.entry] = executor
    kept = slice(WARM_UP, None)
    steps = tuple(_timing(number, [each[number] for each in spans[kept]]) for number in timed.timers)
    bandwidth = min((plug.bandwidth for plug in plugs.values()), default=0.0)
    entry = _timing(-1, entries[kept])
    round_us = median(sum(span[1] for span in each.values()) for each in spans[kept])
    return DeviceTimings(median(calls[kept]) * 1e6, entry.us, round_us, steps, bandwidth, entry.late)


def _timing(step: int, spans: Sequence[tuple[float, float, bool]]) -> DeviceTiming:
    """The medians over the rounds in which the step was in time, or over all if it never was."""
    in_time = [span for span in spans if not span[2]]
    kept = in_time or spans
    return DeviceTiming(step, median(span[1] for span in kept), median(span[0] for span in kept), not in_time)
