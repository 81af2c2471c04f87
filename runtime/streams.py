"""A session's queues: one backend stream per stream of the plan, tied together at both ends of a call.

Each device slot has a *home*: its first stream.  A call starts and ends there:

    caller's streams -> homes -> all streams of the entry point … -> homes -> caller's streams

Every arrow is an event recorded on the left and waited for on the right, so a call inside a caller's capture forks from
it and joins it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qcompiler.errors import CaptureRuleError, DeviceError, PlanError, RuntimeFailure
from qcompiler.plan.plan import EntryPoint, Plan
from qcompiler.runtime.backends.base import Backend, Event, Stream
from qcompiler.runtime.placement import SlotDevice

STREAM_CAPTURE_IMPLICIT = 906


class Queue:
    """A stream with its backend and an event that marks its end."""

    __slots__ = ("_tail", "backend", "stream")

    def __init__(self, backend: Backend, stream: Stream) -> None:
        self.backend = backend
        self.stream = stream
        self._tail: Event | None = None

    def release(self, others: Iterable[Queue]) -> None:
        """Orders the later work of others after the present work of this queue."""
        waiting = [other for other in others if other.stream is not self.stream]
        if not waiting:
            return
        if self._tail is None:
            self._tail = self.backend.event("tail")
        self.backend.record(self._tail, self.stream)
        for other in waiting:
            other.backend.wait(other.stream, self._tail)


def order(before: Iterable[Queue], after: Iterable[Queue]) -> None:
    """Every queue of `after` waits for every queue of `before`."""
    after = list(after)
    for queue in before:
        queue.release(after)


class Queues:
    """The queues of one session (or of one run of `@init`)."""

    def __init__(self, plan: Plan, slots: Mapping[str, SlotDevice]) -> None:
        self.named = {
            stream.name: Queue(slots[stream.device].backend, slots[stream.device].backend.stream(stream.name))
            for stream in plan.streams
        }
        self.homes: dict[str, Queue] = {}
        for stream in plan.streams:
            self.homes.setdefault(stream.device, self.named[stream.name])
        for name, slot in slots.items():
            if name not in self.homes:
                self.homes[name] = Queue(slot.backend, slot.backend.stream(f"{name} home"))
        self.first = self.homes[next(iter(slots))]
        self._events: dict[tuple[str, str], Event] = {}
        self._recorded: dict[str, Event] = {}

    def record_event(self, name: str, queue: Queue) -> Event:
        """The event `name` of the plan, on the device whose stream records it."""
        key = (name, queue.backend.device)
        if key not in self._events:
            self._events[key] = queue.backend.event(name)
        self._recorded[name] = self._events[key]
        return self._events[key]

    def wait_event(self, name: str) -> Event:
        """The event of the latest record before the wait, in the plan's order."""
        if name not in self._recorded:
            raise PlanError(f"the event '{name}' is waited for before anything records it")
        return self._recorded[name]

    def of_entry(self, entry: EntryPoint) -> tuple[Queue, ...]:
        """The queues that an entry point uses."""
        return tuple(self.named[name] for name in dict.fromkeys(step.stream for step in entry.steps))

    def fork(self, queues: Iterable[Queue]) -> None:
        """The homes, ordered with each other, release an entry point's queues."""
        order(self.homes.values(), [*self.homes.values(), *queues])

    def join(self, queues: Iterable[Queue]) -> None:
        """The homes wait for an entry point's queues and for each other."""
        order([*self.homes.values(), *queues], self.homes.values())

    def synchronize(self) -> None:
        """Waits until all work is done, even if part of it failed; raises the first error that kernels reported."""
        errors: list[RuntimeFailure] = []
        for queue in {id(queue): queue for queue in (*self.named.values(), *self.homes.values())}.values():
            try:
                queue.backend.synchronize(queue.stream)
            except RuntimeFailure as error:
                errors.append(error)
        if errors:
            raise errors[0]


# --- the caller's streams --------------------------------------------------------------------------------------------


class Callers:
    """The streams that the caller uses, one per device slot, or the stream on which it records a capture."""

    def __init__(self, queues: Queues, given: Any = None) -> None:
        """`given` is the caller's `stream=`, for the first slot's device.

        Has no effect on streams.  DeviceError 906 if the caller records a capture but this call would use the legacy
        stream; CaptureRuleError if this session is part of a capture that the caller does not record.
        """
        self.queues: list[Queue] = []
        self.given: Stream | None = None
        self.capturing = False
        for number, home in enumerate(queues.homes.values()):
            stream = home.backend.caller_stream(given if number == 0 else None)
            capturing = is_capturing(home.backend, stream)
            self.queues.append(Queue(home.backend, stream))
            if number == 0:
                self.given = stream if given is not None else None
                self.capturing = capturing
                if capturing:  # a capture is joined through one stream, without those of other devices
                    return
        if any(home.stream.is_capturing for home in queues.homes.values()):
            raise CaptureRuleError(
                "this session is part of a capture that has not ended; end it first, or use another session "
                "(`program.session()`)"
            )

    def enter(self, queues: Queues) -> None:
        """The homes wait for the caller."""
        order(self.queues, [queues.first])
        order([queues.first], queues.homes.values())

    def leave(self, queues: Queues) -> None:
        """The caller's streams wait for the homes."""
        order(queues.homes.values(), self.queues)


def is_capturing(backend: Backend, stream: Stream) -> bool:
    """Whether a caller records a capture on its stream.

    If it records one on another stream, work on this one would miss the capture, and waiting would break it:
    DeviceError 906 if this is the legacy stream, else CaptureRuleError.
    """
    legacy = stream.handle == backend.legacy_stream().handle
    try:
        capturing = stream.is_capturing
    except DeviceError as error:
        if error.code != STREAM_CAPTURE_IMPLICIT:
            raise
        raise legacy_capture(backend.device) from error
    if legacy and (capturing or backend.captures_here()):
        raise legacy_capture(backend.device)
    if not capturing and backend.captures_here():
        raise CaptureRuleError(
            f"this thread records a capture on another stream of {backend.device} than the one that this call would go "
            "to; pass the capturing stream as `stream=`, or end the capture first"
        )
    return capturing


def legacy_capture(device: str) -> DeviceError:
    """The error for a call that would escape, or break, a caller's capture."""
    return DeviceError(
        f"a capture is being recorded on {device}, but this call would go to the legacy default stream and not become "
        "part of it; pass the capturing stream as `stream=`, or make it the current one",
        STREAM_CAPTURE_IMPLICIT,
        "cudaErrorStreamCaptureImplicit",
    )
