"""Questions about a plan that tests and reports ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Select, Step, View


def recomputed_per_call(plan: Plan) -> list[str]:
    """Kernels that an entry point launches although nothing they read depends on the call's inputs or on a state.

    Such values (masks, rope tables, position grids) belong in `init`, which runs once at load.  The list is empty for
    a plan without such waste.
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


def copied_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes of states that each entry point copies in one call, at its largest sizes: by entry point, by state.

    This counts copies that read from a state's memory, and copies that write all of it.  It does not count new rows
    written into a part of a state, kernels that compute in the state's memory, or results that are a state's value.
    A state that is updated in place has no entry; 0 bytes for a cache mean that a step touches its new rows only.
    """
    arenas = {arena.name: arena for arena in plan.arenas}
    home = {buffer.name: arenas[buffer.arena] for buffer in plan.buffers}
    copies = {kernel.name for kernel in plan.kernels if _is_copy(kernel.body)}
    found: dict[str, dict[str, int]] = {}
    for entry in plan.entries:
        counts = found.setdefault(entry.name, {})
        ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
        for source, target in _moves(entry.steps, copies):
            nbytes = product(source.shape).bounds(ranges)[1] * ITEMSIZE[source.dtype]
            old, new = home[source.buffer], home[target.buffer]
            if old.kind == "state" and new.kind != "output":
                counted = old.name
            elif new.kind == "state" and nbytes == new.nbytes and dim(target.offset) == 0:
                counted = new.name
            else:
                continue
            state = counted.removeprefix("state.")
            counts[state] = counts.get(state, 0) + nbytes
    return found


def _is_copy(body: object) -> bool:
    """A loop that yields its one input."""
    if not isinstance(body, LoopKernel) or body.body.ops or len(body.accesses) != 2:
        return False
    return body.body.yields == (body.body.inputs[0][0],)


def _moves(steps: Sequence[Step], copies: set[str]) -> Iterator[tuple[View, View]]:
    for step in steps:
        if isinstance(step, Copy):
            yield step.source, step.target
        elif isinstance(step, Launch) and step.kernel in copies:
            yield step.operands[0], step.operands[1]
