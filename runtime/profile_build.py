"""Makes a profile of measured steps: adds to each its module, its work, the machine's limit and the estimate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import Copy, Launch, Plan, Select
from qcompiler.runtime.binding import Binding
from qcompiler.runtime.executor import chosen_kernel
from qcompiler.runtime.limits import Machine
from qcompiler.runtime.places import NOWHERE, places
from qcompiler.runtime.profile import Profile, StepProfile
from qcompiler.runtime.step_costs import UNKNOWN, step_costs


@dataclass(frozen=True)
class Measured:
    """A step's number and medians over the rounds, in microseconds. `begin_us` is None where steps follow each
    other."""

    step: int
    us: float
    begin_us: float | None = None
    regions: int = 0
    tasks: int = 0
    task_us: float = 0.0
    late: bool = False


@dataclass(frozen=True)
class Whole:
    """What was measured of the whole call, and on what."""

    call_us: float
    entry_us: float
    round_us: float
    rounds: int
    threads: int
    device: str
    isa: str
    streams: dict[str, str]
    machine: Machine | None
    machine_missing: str = ""
    notes: tuple[str, ...] = ()


def built(plan: Plan, binding: Binding, measured: Iterable[Measured], whole: Whole) -> Profile:
    """The profile of one entry point at the sizes of a binding."""
    entry, symbols = plan.entries[binding.entry], dict(binding.symbols)
    known = PlanIndex.of(plan)
    at = places(plan, entry)
    costs = step_costs(plan, entry, symbols, whole.isa, whole.machine)
    steps: list[StepProfile] = []
    clock = 0.0
    for each in measured:
        step, place, cost = entry.steps[each.step], at.get(each.step, NOWHERE), costs.get(each.step, UNKNOWN)
        kernel = ""
        if isinstance(step, Launch | Select):
            kernel = step.kernel if isinstance(step, Launch) else chosen_kernel(step, symbols)
        kind = known.kernels[kernel].template if kernel else "copy" if isinstance(step, Copy) else "torch"
        steps.append(StepProfile(
            step=each.step, kind=kind, kernel=kernel, us=each.us, regions=each.regions, tasks=each.tasks,
            task_us=each.task_us, id=step_id(entry.name, each.step), stream=step.stream,
            begin_us=clock if each.begin_us is None else each.begin_us, paths=place.paths, path_from=place.source,
            nbytes=cost.nbytes, operations=cost.operations, arithmetic=cost.arithmetic, limit_us=cost.limit_us,
            limited_by=cost.limited_by, estimate_us=cost.estimate_us, late=each.late,
        ))  # fmt: skip
        clock += each.us
    used = {step.stream for step in steps}
    return Profile(
        entry.name, symbols, whole.threads, whole.rounds, whole.call_us, whole.entry_us, whole.round_us, tuple(steps),
        device=whole.device, isa=whole.isa, machine=whole.machine, machine_missing=whole.machine_missing,
        notes=whole.notes, streams={name: device for name, device in whole.streams.items() if name in used},
    )  # fmt: skip


def step_id(entry: str, step: int) -> str:
    """Names a step in its program: the entry point and the number of the step in it, as in the plan."""
    return f"{entry}/{step}"


def streams_of(plan: Plan, devices: Sequence[str]) -> dict[str, str]:
    """Stream -> the device that serves its slot; `devices` are those of the slots, in the plan's order."""
    slots = {slot.name: device for slot, device in zip(plan.devices, devices, strict=True)}
    return {stream.name: slots[stream.device] for stream in plan.streams}
