"""Questions about a plan that tests and reports ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qcompiler.plan.plan import EntryPoint, Launch, Plan, Select, Step


def recomputed_per_call(plan: Plan) -> list[str]:
    """Kernels that an entry point launches although nothing they read depends on the call's inputs or on a state.

    What depends on no input (masks, rope tables, position grids) belongs into `init`, which runs once at load; the list
    is empty for a plan without such waste.
    """
    kinds = {arena.name: arena.kind for arena in plan.arenas}
    arena_of = {buffer.name: buffer.arena for buffer in plan.buffers}
    found: list[str] = []
    for entry in plan.entries:
        found += [f"{entry.name}: {kernel}" for kernel in _constant_launches(entry, plan, kinds, arena_of)]
    return found


def _constant_launches(entry: EntryPoint, plan: Plan, kinds: Mapping[str, str], arena_of: dict[str, str]) -> list[str]:
    accesses = {kernel.name: [operand.access for operand in kernel.operands] for kernel in plan.kernels}
    varying = {name for name, arena in arena_of.items() if kinds[arena] in ("input", "state")}
    found: list[str] = []
    for step in entry.steps:
        name, reads, writes = _effects(step, accesses)
        if name is None:
            continue
        if any(buffer in varying for buffer in reads):
            varying.update(writes)
        else:
            found.append(name)
            varying.difference_update(writes)
    return found


def _effects(step: Step, accesses: Mapping[str, Sequence[str]]) -> tuple[str | None, list[str], list[str]]:
    """(what runs, buffers read, buffers written) of a step; no name for steps that move no data."""
    if isinstance(step, Launch | Select):
        kernel = step.kernel if isinstance(step, Launch) else step.cases[0].kernel
        pairs = list(zip(accesses[kernel], step.operands, strict=True))
        reads = [view.buffer for access, view in pairs if "r" in access]
        return kernel, reads, [view.buffer for access, view in pairs if "w" in access]
    if step.__struct_config__.tag == "copy":
        return "copy", [step.source.buffer], [step.target.buffer]  # type: ignore[union-attr]
    return None, [], []
