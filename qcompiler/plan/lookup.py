"""A plan's declarations by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from qcompiler.errors import ScheduleError
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Arena, Buffer, DeviceSlot, Plan, Stream, WeightEntry


@dataclass(frozen=True)
class PlanIndex:
    """A plan's declarations by name."""

    plan: Plan
    devices: Mapping[str, DeviceSlot]
    streams: Mapping[str, Stream]
    events: Collection[str]
    arenas: Mapping[str, Arena]
    buffers: Mapping[str, Buffer]
    kernels: Mapping[str, KernelSpec]
    weights: Mapping[int, WeightEntry]
    """The weights by their offset in the weight file."""
    named_weights: Mapping[str, WeightEntry]

    @staticmethod
    def of(plan: Plan) -> PlanIndex:
        """ScheduleError (duplicate-name) if two things of one kind share a name."""
        entries = (*plan.entries, *((plan.init,) if plan.init is not None else ()))
        unique("entry point", (entry.name for entry in entries))
        unique("event", (event.name for event in plan.events))
        unique("weight", (weight.name for weight in plan.weights))
        for kind, records in (
            ("device", plan.devices), ("stream", plan.streams), ("arena", plan.arenas), ("buffer", plan.buffers),
            ("kernel", plan.kernels),
        ):  # fmt: skip
            unique(kind, (record.name for record in records))
        return PlanIndex(
            plan,
            {device.name: device for device in plan.devices},
            {stream.name: stream for stream in plan.streams},
            frozenset(event.name for event in plan.events),
            {arena.name: arena for arena in plan.arenas},
            {buffer.name: buffer for buffer in plan.buffers},
            {kernel.name: kernel for kernel in plan.kernels},
            {weight.offset: weight for weight in plan.weights},
            {weight.name: weight for weight in plan.weights},
        )

    def weight_of(self, buffer: Buffer) -> WeightEntry | None:
        """The weight in a buffer of a constants arena: the one that the buffer names, or else the one at its offset."""
        return self.weights.get(buffer.offset) if buffer.weight is None else self.named_weights.get(buffer.weight)


def unique(kind: str, names: Iterable[str]) -> None:
    """ScheduleError (duplicate-name) if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScheduleError(f"two {kind}s are named '{name}'; rename one", rule="duplicate-name")
        seen.add(name)
