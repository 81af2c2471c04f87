"""Entry points, steps and memory of a plan, as the explorer shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from qcompiler.errors import ArgumentError
from qcompiler.inspect.explore.model import Arena, Buffer, Entry, Step
from qcompiler.inspect.report import step_kind
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Record, Select, TensorSig, TorchCall, View, Wait
from qcompiler.plan.plan import Step as PlanStep
from qcompiler.runtime.step_seconds import Setting, StepSeconds, by_entry
from qcompiler.runtime.timeline import Slice, timeline

Times = Mapping[str, float]
"""Measured seconds by the id of the step: `Profile.seconds()`. A plain mapping names neither device nor sizes."""


def entry_records(plan: Plan, isa: str, times: Times, results: Sequence[str] = ()) -> tuple[Entry, ...]:
    """Every entry point, `init` last, at the sizes that were measured, else at its largest ones.

    `results` are names for the results of all entry points but `init`; those of the plan without.
    ArgumentError for times of steps that there are not.
    """
    known = PlanIndex.of(plan)
    points = (*plan.entries, *((plan.init,) if plan.init is not None else ()))
    steps = {point.name: len(point.steps) for point in points}
    measured = by_entry(times)
    settings = times.settings if isinstance(times, StepSeconds) else {}
    for name, seconds in measured.items():
        if name not in steps:
            raise ArgumentError(f"times of entry point '{name}': the program has {', '.join(steps)}")
        if wrong := [number for number in seconds if not 0 <= number < steps[name]]:
            raise ArgumentError(f"times of step {wrong[0]} of '{name}', which has {steps[name]} steps, from 0 on")
    unknown = Setting("a device that was not named", {})
    return tuple(
        _entry(plan, known, isa, point, measured.get(point.name, {}), settings.get(point.name, unknown))
        for point in (_named(each, results) for each in points)
    )


def _named(point: EntryPoint, results: Sequence[str]) -> EntryPoint:
    if len(results) != len(point.outputs):
        return point
    named = (msgspec.structs.replace(sig, name=name) for sig, name in zip(point.outputs, results, strict=True))
    return msgspec.structs.replace(point, outputs=tuple(named))


def _entry(
    plan: Plan, known: PlanIndex, isa: str, point: EntryPoint, seconds: Mapping[int, float], setting: Setting
) -> Entry:
    measured = {number: 1e6 * each for number, each in seconds.items()}
    line = timeline(plan, isa, point.name, setting.symbols, measured=measured)
    critical = {line.slices[number].step for number in line.critical}
    by_step = {each.step: each for each in line.slices}
    places = _places(point, by_step)
    return Entry(
        name=point.name,
        ranges={symbol.name: (symbol.min, symbol.max) for symbol in point.symbols},
        symbols=line.symbols,
        inputs=tuple(map(_signature, point.inputs)),
        outputs=tuple(map(_signature, point.outputs)),
        device=line.device,
        measured_on=setting.on if seconds else "",
        streams=line.streams,
        span=line.span,
        serial=line.serial,
        steps=tuple(
            _step(known, number, step, by_step.get(number), places[number], number in critical)
            for number, step in enumerate(point.steps)
        ),
        edges=tuple((edge.event, line.slices[edge.source].step, line.slices[edge.target].step) for edge in line.edges),
    )


def _signature(sig: TensorSig) -> str:
    return f"{sig.name}: {sig.dtype}[{', '.join(map(str, sig.shape))}]"


@dataclass(frozen=True)
class _Place:
    path: str
    inferred: bool


def _places(point: EntryPoint, slices: Mapping[int, Slice]) -> list[_Place]:
    """The module path of each step: the timeline's, else what the placed steps before and behind it share."""
    own = [slices[number].place if number in slices else "" for number in range(len(point.steps))]
    before: list[str] = []
    last = ""
    for path in own:
        before.append(last)
        last = path or last
    found: list[_Place] = []
    behind = ""
    for number in reversed(range(len(own))):
        path = own[number] or _shared(before[number], behind)
        found.append(_Place(path, not own[number] and bool(path)))
        behind = own[number] or behind
    return found[::-1]


def _shared(left: str, right: str) -> str:
    """`a.b.c` and `a.b.d+e` share `a.b`."""
    shared: list[str] = []
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)


def _step(known: PlanIndex, number: int, step: PlanStep, shown: Slice | None, place: _Place, critical: bool) -> Step:
    reads, writes = _touched(known, step)
    kernels = _kernels(step)
    return Step(
        number=number,
        kind=step_kind(step),
        stream=step.stream,
        place=place.path,
        inferred=place.inferred,
        kernels=kernels,
        kernel=shown.kernel if shown is not None else (kernels[0] if len(kernels) == 1 else ""),
        template=shown.template if shown is not None else "",
        reads=tuple(view.buffer for view in reads),
        writes=tuple(view.buffer for view in writes),
        views=tuple(map(_view, (*reads, *writes))),
        formats=tuple(dict.fromkeys(format_text(view.format) for view in reads if view.format is not None)),
        event=step.event if isinstance(step, Record | Wait) else "",
        begin=shown.begin if shown is not None else None,
        end=shown.end if shown is not None else None,
        alone=shown.alone if shown is not None else None,
        nbytes=shown.nbytes if shown is not None else 0,
        operations=shown.operations if shown is not None else 0,
        measured=shown.measured if shown is not None else False,
        critical=critical,
    )


def _kernels(step: PlanStep) -> tuple[str, ...]:
    if isinstance(step, Launch):
        return (step.kernel,)
    return tuple(dict.fromkeys(case.kernel for case in step.cases)) if isinstance(step, Select) else ()


def _touched(known: PlanIndex, step: PlanStep) -> tuple[list[View], list[View]]:
    """The views that a step reads, and those that it writes; both for one that it updates."""
    match step:
        case Launch() | Select():
            spec = known.kernels[_kernels(step)[0]]
            pairs = list(zip(spec.operands, step.operands, strict=True))
            return [v for o, v in pairs if "r" in o.access], [v for o, v in pairs if "w" in o.access]
        case Copy():
            return [step.source], [step.target]
        case TorchCall():
            return list(step.inputs), list(step.outputs)
        case _:
            return [], []


def _view(view: View) -> str:
    stored = f" {format_text(view.format)} in {view.layout}" if view.format is not None else ""
    return f"{view.buffer}: {view.dtype}[{', '.join(map(str, view.shape))}]{stored}"


def format_text(ref: FormatRef) -> str:
    """`int4:group=64,symmetric=True`."""
    params = ",".join(f"{key}={value}" for key, value in sorted(ref.params.items()))
    return f"{ref.name}:{params}" if params else ref.name


# --- memory ----------------------------------------------------------------------------------------------------------


def arena_records(plan: Plan, entries: Sequence[Entry]) -> tuple[Arena, ...]:
    """Every arena with its buffers, in the order of their offsets."""
    by_arena: dict[str, list[Buffer]] = {arena.name: [] for arena in plan.arenas}
    used = {entry.name: _spans(entry) for entry in entries}
    owner = {arena.name: arena.entry or "" for arena in plan.arenas}
    for buffer in plan.buffers:
        first, last = used.get(owner[buffer.arena], {}).get(buffer.name, (-1, -1))
        by_arena[buffer.arena].append(Buffer(
            name=buffer.name, offset=buffer.offset, nbytes=buffer.nbytes, first=first, last=last,
            weight=buffer.weight or "",
        ))  # fmt: skip
    return tuple(
        Arena(
            name=arena.name, device=arena.device, kind=arena.kind, nbytes=arena.nbytes, entry=arena.entry or "",
            buffers=tuple(sorted(by_arena[arena.name], key=lambda each: (each.offset, each.first))),
        )
        for arena in plan.arenas
    )  # fmt: skip


def _spans(entry: Entry) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for step in entry.steps:
        for name in (*step.reads, *step.writes):
            spans[name] = (spans.get(name, (step.number, 0))[0], step.number)
    return spans
