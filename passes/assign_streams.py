"""assign-streams: gives every step a stream and orders what depends on each other across streams by events.

    before  rt.copy from <@x, …> to <@b0, …>
            rt.launch @linear_0 [#rt.view<@b0, …>, …]
    after   rt.copy on @cuda0.copy from <@x, …> to <@b0, …>
            rt.record @main.e0 on @cuda0.copy
            rt.wait @main.e0 on @cuda0.compute
            rt.launch @linear_0 on @cuda0.compute [#rt.view<@b0, …>, …]

A CPU has one in-order stream.  Any other device has one for kernels and one for copies that cross to or from it.  A
step depends on the last steps that wrote what it touches and, where it writes, on the last that read it; that is judged
by whole buffers.  An event is recorded right behind a step and waited for right before its first user on another
stream; what older events already order gets none.  An entry whose steps all name a stream is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import DeviceAssignmentError, PassError
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.rt import CopyOp, EntryOp, EventOp, LibraryCallOp, RecordOp, StepOp, StreamOp, WaitOp, name_of
from qcompiler.ir.rt_schedule import Schedule

STAGE = "assign-streams"


@dataclass(frozen=True)
class AssignStreamsPass(ModulePass):
    """Every step of every entry on a stream, cross-stream dependences on events."""

    name = STAGE

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        schedule = Schedule(op)
        streams = Streams(schedule)
        events = 0
        for entry in schedule.entries.values():
            missing = [step for step in entry.steps if step.stream is None]
            if missing:
                if len(missing) != sum(1 for _ in entry.steps):
                    raise PassError(
                        f"entry '{entry.sym}' names streams for some steps and not for others (first: "
                        f"{missing[0].name} at '{path_of(missing[0])}'); name all or none",
                        stage=STAGE,
                    )
                events = max(events, _assign(schedule, streams, entry))
        streams.declare(op, events)
        if isinstance(ctx, QCContext):
            for entry in schedule.entries.values():
                waits = sum(isinstance(step, WaitOp) for step in entry.steps)
                used = sorted({step.stream_name for step in entry.steps if step.stream_name is not None})
                ctx.report.add(
                    STAGE, entry.sym, f"streams {', '.join(used) or 'none'}", f"{waits} waits across streams"
                )


@dataclass
class Streams:
    """The streams of each device, made when first used."""

    schedule: Schedule
    made: dict[str, str] = field(default_factory=dict)
    """Stream name -> device."""

    def of(self, step: StepOp) -> str:
        """The stream a step belongs on; DeviceAssignmentError if a step other than a copy touches two devices."""
        devices = list(dict.fromkeys(self.schedule.device_of(view.buffer) for view in step.view_records))
        if isinstance(step, LibraryCallOp) and step.record.workspace is not None:
            devices.append(self.schedule.device_of(step.record.workspace))
        if isinstance(step, CopyOp) and len(devices) == 2:
            return self._crossing(*devices)
        if len(set(devices)) != 1:
            where = ", ".join(f"'{v.buffer}' on {self.schedule.device_of(v.buffer)}" for v in step.view_records)
            raise DeviceAssignmentError(
                f"{step.name} at '{path_of(step)}' touches {where or 'no buffer'}; only a copy may cross devices"
            )
        return self._compute(devices[0])

    def _compute(self, device: str) -> str:
        return self._named(device, f"{device}.compute")

    def _crossing(self, source: str, target: str) -> str:
        """On the target's copy engine; to a CPU, on the source's. Between CPUs the target's one stream does it."""
        kinds = {name: op.record.kind for name, op in self.schedule.devices.items()}
        device = source if kinds[target] == "cpu" and kinds[source] != "cpu" else target
        return self._compute(device) if kinds[device] == "cpu" else self._named(device, f"{device}.copy")

    def _named(self, device: str, name: str) -> str:
        self.made[name] = device
        return name

    def declare(self, module: ModuleOp, events: int) -> None:
        """Puts the declarations behind the devices'."""
        block = module.body.block
        new = [StreamOp(name, device) for name, device in self.made.items() if name not in self.schedule.streams]
        names = [event_name(i) for i in range(events)]
        last = list(self.schedule.devices.values())[-1:]
        ops = [*new, *(EventOp(name) for name in names if name not in self.schedule.events)]
        if ops:
            block.insert_ops_after(ops, last[0])


def event_name(number: int) -> str:
    """Events are shared by the entries, which never run at once in one session."""
    return f"e{number}"


def _assign(schedule: Schedule, streams: Streams, entry: EntryOp) -> int:
    """Sets the streams of one entry and inserts its events; how many it uses."""
    steps = list(entry.steps)
    if any(isinstance(step, RecordOp | WaitOp) for step in steps):
        raise PassError(f"entry '{entry.sym}' has events but no streams; assign-streams makes both", stage=STAGE)
    for step in steps:
        step.set_stream(streams.of(step))
    order = _Order(sorted({step.stream_name or "" for step in steps}))
    recorded: dict[int, str] = {}
    for number, step in enumerate(steps):
        for earlier in order.waits(number, step.stream_name or "", _accesses(schedule, step)):
            if earlier not in recorded:
                recorded[earlier] = event_name(len(recorded))
                record = RecordOp(recorded[earlier], steps[earlier].stream_name)
                entry.body.block.insert_op_after(record, steps[earlier])
            entry.body.block.insert_op_before(WaitOp(recorded[earlier], step.stream_name), step)
    return len(recorded)


def _accesses(schedule: Schedule, step: StepOp) -> list[tuple[str, str]]:
    """Buffers a step touches, each with "r", "w" or "rw"."""
    accesses = [(view.buffer, access) for view, access in schedule.accesses(step)]
    if isinstance(step, LibraryCallOp) and step.workspace is not None:
        accesses.append((name_of(step.workspace), "w"))
    return accesses


@dataclass
class _Uses:
    """The latest step on each stream that writes a buffer, and that reads it since."""

    writes: dict[str, int] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)


class _Order:
    """What is ordered already: for each step, the latest step on each stream that comes before it or is it."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._now: dict[str, dict[str, int]] = {stream: {} for stream in streams}
        self._after: list[tuple[str, dict[str, int]]] = []
        self._uses: dict[str, _Uses] = {}

    def waits(self, number: int, stream: str, accesses: Sequence[tuple[str, str]]) -> list[int]:
        """Enters the next step; the earlier steps on other streams that it must still wait for, latest first."""
        now, needed = self._now[stream], []
        for earlier in sorted(self._dependences(accesses), reverse=True):
            other, clock = self._after[earlier]
            if other == stream or now.get(other, -1) >= earlier:
                continue
            needed.append(earlier)
            for each, step in clock.items():
                now[each] = max(now.get(each, -1), step)
        now[stream] = number
        self._after.append((stream, dict(now)))
        self._enter(number, stream, accesses)
        return needed

    def _dependences(self, accesses: Sequence[tuple[str, str]]) -> set[int]:
        found: set[int] = set()
        for buffer, access in accesses:
            uses = self._uses.get(buffer, _Uses())
            found.update(uses.writes.values())
            if access != "r":
                found.update(uses.reads.values())
        return found

    def _enter(self, number: int, stream: str, accesses: Sequence[tuple[str, str]]) -> None:
        written = {buffer for buffer, access in accesses if access != "r"}
        for buffer, _ in accesses:
            if buffer in written:  # it comes after all earlier uses, so they need not be kept
                self._uses[buffer] = _Uses(writes={stream: number})
            else:
                self._uses.setdefault(buffer, _Uses()).reads[stream] = number
