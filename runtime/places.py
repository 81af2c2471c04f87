"""Which module of the model each step of an entry point computes for.

    places(plan, plan.entries[0])[12]      Place(("model.layers.3.mlp.down_proj",), "weights")

A plan has no module path for a step.  It is known from what the step uses, in this order:

"weights"     the modules whose weights it reads: one for most linears, several for a merged one
"kernel"      the op for which its kernel was emitted, if only this step launches that kernel
"neighbours"  a guess, where several steps share the kernel: that path with the numbers of the layers around the step,
              those of the nearest earlier step that reads weights, else of the nearest later one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Select, Step, TorchCall, View

Source = Literal["weights", "kernel", "neighbours", ""]


@dataclass(frozen=True)
class Place:
    """Module paths, and how they are known; none if nothing tells."""

    paths: tuple[str, ...] = ()
    source: Source = ""

    @property
    def label(self) -> str:
        """One path for all: `attn.q+k`."""
        return joined_paths(self.paths) if self.paths else ""


NOWHERE = Place()


def places(plan: Plan, entry: EntryPoint) -> dict[int, Place]:
    """The place of each launch, copy and torch call, by the number of its step."""
    known = PlanIndex.of(plan)
    counts = Counter(kernel for each in plan.entries for step in each.steps for kernel in _kernels(step))
    read = {number: _read(step, known) for number, step in enumerate(entry.steps)}
    near = _nearest(entry.steps, read)
    found: dict[int, Place] = {}
    for number, step in enumerate(entry.steps):
        if not isinstance(step, Launch | Select | Copy | TorchCall):
            continue
        serves = _serves(step, known)
        if read[number]:
            found[number] = Place(read[number], "weights")
        elif not serves:
            found[number] = NOWHERE
        elif all(counts[kernel] == 1 for kernel in _kernels(step)):
            found[number] = Place((serves,), "kernel")
        else:
            moved = next((path for each in near[number] if (path := moved_to(serves, each)) is not None), None)
            found[number] = Place((moved,), "neighbours") if moved is not None else NOWHERE
    return found


def moved_to(path: str, near: str) -> str | None:
    """`path` with the numbers that `near` has in the same places; None if `near` does not decide all of them."""
    parts, others = path.split("."), near.split(".")
    made: list[str] = []
    for place, part in enumerate(parts):
        other = others[place] if place < len(others) else ""
        if part != other and not (part.isdigit() and other.isdigit()):
            rest = parts[place:]
            return None if any(each.isdigit() for each in rest) else ".".join([*made, *rest])
        made.append(other)
    return ".".join(made)


def _kernels(step: Step) -> list[str]:
    match step:
        case Launch():
            return [step.kernel]
        case Select():
            return [case.kernel for case in step.cases]
    return []


def _serves(step: Step, known: PlanIndex) -> str:
    """The path of the op for which a step's kernel was first emitted."""
    if isinstance(step, TorchCall):
        return step.serves
    return next((known.kernels[kernel].serves for kernel in _kernels(step)), "")


def _views(step: Step) -> Sequence[View]:
    match step:
        case Copy():
            return (step.source, step.target)
        case Launch() | Select() | TorchCall():
            return step.operands
    return ()


def _read(step: Step, known: PlanIndex) -> tuple[str, ...]:
    """The modules of the weights that a step reads, each once, in the order of its operands."""
    paths: list[str] = []
    for view in _views(step):
        buffer = known.buffers[view.buffer]
        weight = known.weight_of(buffer)
        if known.arenas[buffer.arena].kind == "constants" and weight is not None:
            paths += [module_of(part.parameters[0]) for part in weight.named if part.parameters]
    return tuple(dict.fromkeys(paths))


def module_of(parameter: str) -> str:
    """The module that owns a parameter: its path without the last name. A parameter of the model itself stays."""
    return parameter.rpartition(".")[0] or parameter


def _nearest(steps: Sequence[Step], read: dict[int, tuple[str, ...]]) -> dict[int, list[str]]:
    """For each step the paths that the nearest earlier step reads, then those of the nearest later one."""
    before: tuple[str, ...] = ()
    found: dict[int, list[str]] = {}
    for number in range(len(steps)):
        found[number] = list(before)
        before = read[number] or before
    after: tuple[str, ...] = ()
    for number in reversed(range(len(steps))):
        found[number] += after
        after = read[number] or after
    return found


__all__ = ["NOWHERE", "Place", "module_of", "moved_to", "places"]
