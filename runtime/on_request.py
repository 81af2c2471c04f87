"""What a program loads when it is asked for: the cost model, and so the emitters of all targets, and what uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qcompiler.errors import QCompilerError

if TYPE_CHECKING:
    from qcompiler.plan.plan import Plan
    from qcompiler.runtime.binding import Binding
    from qcompiler.runtime.loaded import LoadedProgram
    from qcompiler.runtime.profile import Profile
    from qcompiler.runtime.profile_cpu import Timings
    from qcompiler.runtime.profile_device import DeviceTimings
    from qcompiler.runtime.timeline import Timeline


def timeline(
    plan: Plan, isa: str, entry: str | None, symbols: Mapping[str, int] | None, measured: Mapping[int, float] | None
) -> Timeline:
    """As `qcompiler.runtime.timeline.timeline`."""
    from qcompiler.runtime.timeline import timeline as estimated

    return estimated(plan, isa, entry, symbols, measured=measured)


def host_profile(program: LoadedProgram, binding: Binding, timings: Timings, rounds: int) -> Profile:
    """The profile of a call on the CPU, beside the limits of this machine on the program's threads."""
    from qcompiler.runtime.limits import Machine, cpu_limits
    from qcompiler.runtime.profile_build import Measured, Whole, built, streams_of

    machine, missing = None, ""
    try:
        limits = cpu_limits(program.num_threads, program.isa)
        machine = Machine(f"this CPU ({program.isa}), as many threads", limits, "measured")
    except QCompilerError as error:  # no compiler, or no memory: the times are there all the same
        missing = f"the probes of bandwidth and rates cannot run: {error}"
    whole = Whole(
        timings.call_us, timings.entry_us, timings.round_us, rounds, program.num_threads, program.device, program.isa,
        streams_of(program.plan, program.devices), machine, missing,
    )  # fmt: skip
    steps = [
        Measured(each.step, each.us, regions=each.regions, tasks=each.tasks, task_us=each.task_us)
        for each in timings.steps
    ]
    return built(program.plan, binding, steps, whole)


def device_profile(program: LoadedProgram, binding: Binding, timings: DeviceTimings, rounds: int) -> Profile:
    """The profile of a call on a GPU, beside its measured bandwidth and the published rates of its architecture."""
    from qcompiler.kernels.cost import device_cost
    from qcompiler.runtime.limits import Limits, Machine
    from qcompiler.runtime.profile_build import Measured, Whole, built, streams_of

    machine, missing, notes = None, "", []
    if program.kind == "sim":
        missing = "the simulated GPU has no bandwidth"
        notes.append("times are those of the simulation on the host; they say nothing about a GPU")
    else:
        figures = device_cost(program.isa)
        limits = Limits(timings.bandwidth, figures.fp32 * 1e6, figures.tensor * 1e6, None)
        machine = Machine(f"{program.device}, rates of {figures.name}", limits, "published")
        notes.append("each step's time has about a microsecond of its two events in it")
    if timings.late:
        notes.append("the untimed steps were submitted late in every round: their time has waiting for the host in it")
    whole = Whole(
        timings.call_us, timings.entry_us, timings.round_us, rounds, program.num_threads, program.device, program.isa,
        streams_of(program.plan, program.devices), machine, missing, tuple(notes),
    )  # fmt: skip
    steps = [Measured(each.step, each.us, each.begin_us, late=each.late) for each in timings.steps]
    return built(program.plan, binding, steps, whole)
