"""`prog.report()`: decisions with reasons, and the program's contents and costs, as text and as a dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcompiler.inspect.checks import copied_bytes
from qcompiler.inspect.torch_share import torch_shares
from qcompiler.plan.moved import counts as moved_counts
from qcompiler.plan.moved import moved_text
from qcompiler.plan.plan import Launch, Plan, Select, TorchCall
from qcompiler.units import counted, human_bytes


@dataclass(frozen=True)
class Choice:
    """One decision of a pass: where, what, why."""

    stage: str
    path: str
    what: str
    why: str


@dataclass(frozen=True)
class ProgramReport:
    """A program in figures and reasons. `str(report)` is the text, `report.as_dict()` the same for tools."""

    title: str
    ledger: str
    plan: Plan
    choices: Sequence[Choice]

    def as_dict(self) -> dict[str, Any]:
        """Counts, bytes and decisions as plain values."""
        return {
            "program": self.title,
            "kernels": len(self.plan.kernels),
            "kernel_uses": dict(kernel_uses(self.plan)),
            "entries": {entry.name: _steps(entry.steps) for entry in self.plan.entries},
            "arenas": {arena.name: {"kind": arena.kind, "bytes": arena.nbytes} for arena in self.plan.arenas},
            "copied_state_bytes": copied_bytes(self.plan),
            "moved": moved_counts(self.plan),
            "torch": [share.as_dict() for share in torch_shares(self.plan)],
            "choices": [vars(choice) for choice in self.choices],
        }

    def __str__(self) -> str:
        parts = [self.title, self.ledger, plan_text(self.plan), idioms_text(self.choices), choices_text(self.choices)]
        return "\n\n".join(part for part in parts if part)


def plan_text(plan: Plan) -> str:
    """Entry points, steps, kernels and memory of a plan in a few lines."""
    lines = [
        f"Plan: {counted(len(plan.kernels), 'kernel')}, {counted(len(plan.entries), 'entry point')}",
        f"  {sharing_text(plan)}",
    ]
    for entry in plan.entries:
        ranges = ", ".join(f"{s.name} in [{s.min}, {s.max}]" for s in entry.symbols) or "static shapes"
        steps = steps_text(_steps(entry.steps))
        lines.append(f"  {entry.name}({ranges}): {steps}")
    if plan.moved:
        lines.append(f"  moved weights: {moved_text(moved_counts(plan))}")
    lines += [f"  in torch, {share}" for share in torch_shares(plan)]
    if plan.init is not None:
        lines.append(f"  init, once at load: {counted(len(plan.init.steps), 'step')}")
    sizes: Counter[str] = Counter()
    for arena in plan.arenas:
        sizes[arena.kind] += arena.nbytes
    if any(arena.kind == "state" for arena in plan.arenas):
        lines += [f"  {line}" for line in _state_lines(plan)]
    lines.append(f"  memory at the maximum: {_sizes_text(sizes)}")
    if len(plan.devices) > 1:
        lines += [f"    {device}: {_sizes_text(each)}" for device, each in device_bytes(plan).items()]
    return "\n".join(lines)


def device_bytes(plan: Plan) -> dict[str, Counter[str]]:
    """Bytes of each kind of arena, by device slot."""
    sizes: dict[str, Counter[str]] = {device.name: Counter() for device in plan.devices}
    for arena in plan.arenas:
        sizes[arena.device][arena.kind] += arena.nbytes
    return sizes


def _sizes_text(sizes: Counter[str]) -> str:
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sizes.items())


def _state_lines(plan: Plan) -> list[str]:
    """The number of states, and what a call copies of them."""
    lines = []
    for entry, counts in copied_bytes(plan).items():
        if counts:
            copied = ", ".join(f"'{state}' {human_bytes(count)}" for state, count in sorted(counts.items())[:4])
            more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
            lines.append(f"{entry} copies {human_bytes(sum(counts.values()))} of states in each call: {copied}{more}")
    count = sum(arena.kind == "state" for arena in plan.arenas)
    return [f"{counted(count, 'state')}, " + ("updated in place" if not lines else "not all updated in place"), *lines]


def kernel_uses(plan: Plan) -> Counter[str]:
    """How many steps of the plan launch each kernel; a select counts for every kernel that it may launch."""
    uses: Counter[str] = Counter()
    for entry in (*plan.entries, *([plan.init] if plan.init is not None else [])):
        for step in entry.steps:
            if isinstance(step, Launch):
                uses[step.kernel] += 1
            elif isinstance(step, Select):
                uses.update({case.kernel for case in step.cases})
    return uses


def sharing_text(plan: Plan) -> str:
    """The number of launches and of kernels; equal layers of a model launch the same kernels."""
    uses = kernel_uses(plan)
    entries = (*plan.entries, *([plan.init] if plan.init is not None else []))
    launches = sum(isinstance(step, Launch | Select) for entry in entries for step in entry.steps)
    shared = [count for count in uses.values() if count > 1]
    text = f"{counted(launches, 'launch', 'launches')} of {counted(len(plan.kernels), 'kernel')}"
    if not shared:
        return text
    serve = "serves" if len(shared) == 1 else "serve"
    return f"{text}, of which {len(shared)} {serve} {sum(shared)} places"


def idioms_text(choices: Iterable[Choice]) -> str:
    """The ledger of idioms: the number of each by place, and the forms that only look like one. "" if there are
    none."""
    found: dict[str, list[Choice]] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        verb, _, name = choice.what.partition(" qc.")
        if choice.stage == "raise-idioms" and verb in ("raised", "found"):
            found.setdefault(name, []).append(choice)
        elif choice.stage == "raise-idioms" and choice.what.endswith(" stays"):
            others.setdefault((choice.what, choice.why), []).append(choice.path)
    lines = []
    for name, each in found.items():
        written = sum(choice.what.startswith("raised") for choice in each)
        text = f"  {name}: {len(each)}" + (f", {written} of them written out in parts" if written else "")
        lines.append(f"{text}  [{_places([choice.path for choice in each])}]")
    for (what, why), paths in others.items():
        lines += [f"  {what}  [{_places(paths)}]", f"      {why}"]
    return "\n".join(["Idioms", *lines]) if lines else ""


def _places(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def choices_text(choices: Iterable[Choice]) -> str:
    """Decisions by stage; equal decisions are counted, with the first module path."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for choice in choices:
        groups.setdefault((choice.stage, choice.what, choice.why), []).append(choice.path)
    lines = ["Decisions"]
    for (stage, what, why), paths in groups.items():
        lines.append(f"  {stage}: {what}  [{_places(paths)}]" + (f"\n      {why}" if why else ""))
    return "\n".join(lines)


def _steps(steps: Sequence[object]) -> dict[str, int]:
    return dict(Counter(step_kind(step) for step in steps))


def steps_text(counts: Mapping[str, int]) -> str:
    """Numbers of steps by their kind in words, `1 copy, 12 launches`."""
    plurals = {"launch": "launches", "copy": "copies"}
    texts = [counted(count, kind, plurals.get(kind, "")) for kind, count in sorted(counts.items())]
    return ", ".join(texts) or "no steps"


def step_kind(step: object) -> str:
    """The name of a kind of step in counts."""
    if isinstance(step, Launch | Select):
        return "launch"
    return "torch call" if isinstance(step, TorchCall) else type(step).__name__.lower()
