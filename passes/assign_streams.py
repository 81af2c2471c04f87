"""assign-streams: gives every step a stream, and orders dependent steps on different streams by events.

    before  rt.launch @norm [… #rt.view<@h, …>]
            rt.launch @linear_q [#rt.view<@h, …>, …]
            rt.launch @linear_k [#rt.view<@h, …>, …]
    after   rt.launch @norm on @cuda0.compute [… #rt.view<@h, …>]
            rt.record @e0 on @cuda0.compute
            rt.launch @linear_q on @cuda0.compute [#rt.view<@h, …>, …]
            rt.wait @e0 on @cuda0.compute1
            rt.launch @linear_k on @cuda0.compute1 [#rt.view<@h, …>, …]

A CPU has one in-order stream. Any other device has one stream for copies to or from other devices, and up to four
streams for kernels. A step moves to another stream if the estimated times say that it then ends earlier
(schedule/stream_choice.py). An entry point uses several streams only if it ends earlier and needs little more memory
(schedule/overlap.py). The estimates (kernels/cost.py) are for the largest sizes of the entry point.
`assign-streams{compute-streams=2}` sets another limit; 1 puts all kernels on one stream. `@init` always has one.

A step depends on the last writer of each buffer that it touches and, for a buffer that it writes, on all readers since
then. An event is recorded right after a step, and waited for right before the first step on another stream that needs
it. A pair that older events already order gets no event. An entry whose steps all name a stream is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import DeviceAssignmentError, PassError
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.rt import CopyOp, EntryOp, EventOp, RecordOp, StepOp, StreamOp, WaitOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.schedule.overlap import overlap
from qcompiler.passes.schedule.step_costs import StepCosts
from qcompiler.passes.schedule.step_order import Order, dependences
from qcompiler.passes.schedule.stream_choice import Task
from qcompiler.passes.schedule.stream_memory import ActivationMemory

STAGE = "assign-streams"

DEFAULT_STREAMS = 4
"""The blocks of known models have at most three parallel branches, and every stream costs a fork and a join per
call."""

MOST_STREAMS = 16
"""The largest value of the option `compute-streams`."""


@dataclass(frozen=True)
class AssignStreamsPass(ModulePass):
    """Gives every step a stream, and every dependence between streams an event.

    `compute_streams` is the most streams for kernels that a device may have.
    """

    name = STAGE
    compute_streams: int = DEFAULT_STREAMS

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if not 1 <= self.compute_streams <= MOST_STREAMS:
            message = f"compute-streams is {self.compute_streams}; it is a number from 1 to {MOST_STREAMS}"
            raise PassError(message, stage=STAGE)
        schedule = Schedule(op)
        streams = Streams(schedule)
        costs = StepCosts(schedule, ctx)
        for entry in schedule.entries.values():
            missing = [step for step in entry.steps if step.stream is None]
            why = "named before"
            if missing:
                if len(missing) != sum(1 for _ in entry.steps):
                    raise PassError(
                        f"entry '{entry.sym}' names streams for some steps and not for others (first: "
                        f"{missing[0].name} at '{path_of(missing[0])}'); name all or none",
                        stage=STAGE,
                    )
                why = _assign(entry, streams, costs, 1 if entry.is_init else self.compute_streams)
            if isinstance(ctx, QCContext):
                _report(ctx, entry, why)
        streams.declare(op)


def _report(context: QCContext, entry: EntryOp, why: str) -> None:
    waits = sum(isinstance(step, WaitOp) for step in entry.steps)
    used = sorted({step.stream_name for step in entry.steps if step.stream_name is not None})
    what = f"streams {', '.join(used) or 'none'}; {waits} waits"
    context.report.add(STAGE, entry.sym, what, why)


@dataclass
class Streams:
    """The streams of each device, the ones in use, and the number of events."""

    schedule: Schedule
    used: set[str] = field(default_factory=set)
    events: int = 0

    def candidates(self, step: StepOp) -> tuple[str, tuple[str, ...]]:
        """The device of a step, and the streams that it may run on. The first stream is the default.

        DeviceAssignmentError if a step other than a copy touches two devices.
        """
        devices = list(dict.fromkeys(self.schedule.device_of(view.buffer) for view in step.view_records))
        if isinstance(step, CopyOp) and len(devices) == 2:
            device = self._crossing(*devices)
            return device, (device + (".compute" if self.on_cpu(device) else ".copy"),)
        if len(set(devices)) != 1:
            where = ", ".join(f"'{v.buffer}' on {self.schedule.device_of(v.buffer)}" for v in step.view_records)
            raise DeviceAssignmentError(
                f"{step.name} at '{path_of(step)}' touches {where or 'no buffer'}; only a copy may cross devices"
            )
        return devices[0], _compute(devices[0])[: 1 if self.on_cpu(devices[0]) else None]

    def on_cpu(self, device: str) -> bool:
        return self.schedule.devices[device].record.kind == "cpu"

    def _crossing(self, source: str, target: str) -> str:
        """The device whose stream runs a copy between devices: the target, or the source if only the target is a
        CPU."""
        return source if self.on_cpu(target) and not self.on_cpu(source) else target

    def declare(self, module: ModuleOp) -> None:
        """Inserts the declarations of streams and events after the devices. Calls begin on a device's first stream."""
        names = [(name, device) for device in self.schedule.devices for name in (*_compute(device), f"{device}.copy")]
        new = [StreamOp(n, d) for n, d in names if n in self.used and n not in self.schedule.streams]
        events = [name for name in map(event_name, range(self.events)) if name not in self.schedule.events]
        last = list(self.schedule.devices.values())[-1:]
        if ops := [*new, *map(EventOp, events)]:
            module.body.block.insert_ops_after(ops, last[0])


def _compute(device: str) -> tuple[str, ...]:
    return (f"{device}.compute", *(f"{device}.compute{number}" for number in range(1, MOST_STREAMS)))


def event_name(number: int) -> str:
    """The name of an event. Entries share events, since one session never runs two entries at once."""
    return f"e{number}"


def _assign(entry: EntryOp, streams: Streams, costs: StepCosts, limit: int) -> str:
    """Sets the streams of one entry and inserts its events. Returns the reason, for the report."""
    steps = list(entry.steps)
    if any(isinstance(step, RecordOp | WaitOp) for step in steps):
        raise PassError(f"entry '{entry.sym}' has events but no streams; assign-streams makes both", stage=STAGE)
    earlier = dependences(streams.schedule, steps)
    homes = [streams.candidates(step) for step in steps]
    sizes = {name: high for name, (_, high) in entry.ranges.items()}
    tasks = [
        Task(device, candidates, before, costs.of(step, device, sizes), costs.device(device).event)
        for step, (device, candidates), before in zip(steps, homes, earlier, strict=True)
    ]
    chosen, why = overlap(tasks, limit, ActivationMemory(streams.schedule, steps, earlier))
    if all(streams.on_cpu(device) for device, _ in homes):
        why = "a CPU has one stream"
    else:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        why = f"estimated for {costs.gpu.name}{' at ' + at if at else ''}: {why}"
    streams.used.update(chosen)
    order, recorded = Order(), dict[int, str]()
    for number, (step, stream) in enumerate(zip(steps, chosen, strict=True)):
        step.set_stream(stream)
        for each in order.waits(number, stream, earlier[number]):
            if each not in recorded:
                recorded[each] = event_name(len(recorded))
                entry.body.block.insert_op_after(RecordOp(recorded[each], chosen[each]), steps[each])
            entry.body.block.insert_op_before(WaitOp(recorded[each], stream), step)
    streams.events = max(streams.events, len(recorded))
    return why
