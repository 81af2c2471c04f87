"""A second opinion on ordering and memory: slow, and sharing no code with the verifier.

Happens-before is a transitive closure over explicit edges; memory is a dictionary of single bytes; views are expanded
element by element at one binding of the symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Record, Step, View, Wait


def is_sound(plan: Plan, entry: EntryPoint, symbols: Mapping[str, int]) -> bool:
    """Whether one entry (launches, copies, records and waits) is ordered and reads only what it wrote itself."""
    steps = entry.steps
    before = _closure(steps)
    if before is None:
        return False
    arenas = {arena.name: arena for arena in plan.arenas}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    written: dict[tuple[str, int], str] = {}
    touched: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for number, step in enumerate(steps):
        accesses = _accesses(plan, step)
        for view, is_write in sorted(accesses, key=lambda a: a[1]):
            arena = arenas[buffers[view.buffer].arena]
            for byte in _bytes(view, buffers[view.buffer].offset, symbols):
                key = (arena.name, byte)
                loaded = arena.kind in ("input", "constants", "state", "init")
                if not is_write and not loaded and written.get(key) != view.buffer:
                    return False
                for other, other_write in touched.setdefault(key, []):
                    if other == number and is_write and written.get(key, view.buffer) != view.buffer:
                        return False
                    if other != number and (is_write or other_write) and (other, number) not in before:
                        return False
                touched[key].append((number, is_write))
                if is_write:
                    written[key] = view.buffer
    return all(
        (sig.arena, byte) in written
        for sig in entry.outputs
        for byte in range(_size(sig.shape, symbols) * ITEMSIZE[sig.dtype])
    )


def _closure(steps: tuple[Step, ...]) -> set[tuple[int, int]] | None:
    """All pairs (i, j) where i happens before j; None if a wait has no record before it."""
    edges: set[tuple[int, int]] = set()
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    for number, step in enumerate(steps):
        if step.stream in last:
            edges.add((last[step.stream], number))
        last[step.stream] = number
        if isinstance(step, Record):
            recorded[step.event] = number
        if isinstance(step, Wait):
            if step.event not in recorded:
                return None
            edges.add((recorded[step.event], number))
    successors: dict[int, set[int]] = {}
    for number in reversed(range(len(steps))):
        direct = {j for i, j in edges if i == number}
        successors[number] = direct.union(*(successors[j] for j in direct))
    return {(i, j) for i, after in successors.items() for j in after}


def _accesses(plan: Plan, step: Step) -> list[tuple[View, bool]]:
    if isinstance(step, Copy):
        return [(step.source, False), (step.target, True)]
    if isinstance(step, Launch):
        spec = next(kernel for kernel in plan.kernels if kernel.name == step.kernel)
        pairs = list(zip(step.operands, spec.operands, strict=True))
        reads = [(view, False) for view, operand in pairs if operand.access != "w"]
        return reads + [(view, True) for view, operand in pairs if operand.access != "r"]
    return []


def _bytes(view: View, start: int, symbols: Mapping[str, int]) -> set[int]:
    size = ITEMSIZE[view.dtype]
    shape = [dim(extent).evaluate(symbols) for extent in view.shape]
    strides = [dim(stride).evaluate(symbols) for stride in view.strides]
    offset = dim(view.offset).evaluate(symbols)
    found: set[int] = set()
    for index in itertools.product(*map(range, shape)):
        element = offset + sum(i * s for i, s in zip(index, strides, strict=True))
        found.update(range(start + element * size, start + (element + 1) * size))
    return found


def _size(shape: tuple[object, ...], symbols: Mapping[str, int]) -> int:
    total = 1
    for extent in shape:
        total *= dim(extent).evaluate(symbols)  # type: ignore[arg-type]
    return total
