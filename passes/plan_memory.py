"""plan-memory: gives every buffer its offset. Two activations share memory if one is dead before the other begins.

    before  rt.arena @activations {nbytes = 0}
            rt.buffer @main.0 {arena = @activations, nbytes = 6144}
            rt.buffer @main.1 {arena = @activations, nbytes = 1536}
    after   rt.arena @activations {nbytes = 6144}
            rt.buffer @main.0 {arena = @activations, offset = 0, nbytes = 6144}
            rt.buffer @main.1 {arena = @activations, offset = 0, nbytes = 1536}    (main.0 is dead when it begins)

"Before" means ordered by streams and events, not by the order of the list. Offsets are computed for the bucket's
largest sizes. Placement is greedy: the largest buffer first, each in the smallest sufficient gap between the buffers
that it conflicts with. States, init results, inputs and outputs are placed one after the other. Constants have the
offsets of the weight file, except in a program for several devices: there each device's constants arena holds only the
weights used on it, one after the other. A buffer that already has an offset keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import PassError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.rt import ArenaOp, BufferOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.schedule.lifetimes import Lifetimes, Use
from qcompiler.plan.weights import file_offsets
from qcompiler.units import counted

STAGE = "plan-memory"

ALIGNMENT = 64
"""In bytes: one cache line, and the widest vector load."""

LONG_LIVED_ALIGNMENT = 256
"""The alignment, in bytes, of constants and init results: what CUDA's allocators guarantee."""


@dataclass(frozen=True)
class PlanMemoryPass(ModulePass):
    """Sets the offset of every buffer and the size of every arena, and reports the memory that sharing saved."""

    name = STAGE

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        schedule = Schedule(op)
        lifetimes = Lifetimes(schedule)
        constants = _constant_offsets(schedule, context)
        for arena in schedule.arenas.values():
            buffers = [buffer for buffer in schedule.buffers.values() if buffer.arena_name == arena.sym]
            match arena.kind.data:
                case "constants" if arena.gathered is not None:
                    _place_in_line(buffers, LONG_LIVED_ALIGNMENT)
                case "constants":
                    _place_constants(buffers, constants)
                case "activations":
                    _place_activations(arena, buffers, lifetimes, context)
                case "init":
                    _place_in_line(buffers, LONG_LIVED_ALIGNMENT)
                case _:
                    _place_in_line(buffers, ALIGNMENT)
            ends = [_offset(buffer) + _nbytes(buffer) for buffer in buffers]
            arena.set_nbytes(max([arena.nbytes.value.data, *ends]))


def _nbytes(buffer: BufferOp) -> int:
    return buffer.nbytes.value.data


def _offset(buffer: BufferOp) -> int:
    assert buffer.offset is not None
    return buffer.offset.value.data


def _aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    return -(-offset // alignment) * alignment


# --- constants, states, inputs, outputs ------------------------------------------------------------------------------


def _constant_offsets(schedule: Schedule, context: QCContext) -> dict[str, int]:
    """The offset in the weight file of every weight that some buffer holds."""
    used = {buffer.weight.data for buffer in schedule.buffers.values() if buffer.weight is not None}
    offsets = file_offsets(context.weights, used)
    missing = sorted(used - offsets.keys())
    if missing:
        raise PassError(f"a buffer holds the weight '{missing[0]}', which the weight store does not have", stage=STAGE)
    return offsets


def _place_constants(buffers: Sequence[BufferOp], offsets: dict[str, int]) -> None:
    for buffer in buffers:
        if buffer.weight is None and buffer.offset is None:
            raise PassError(f"buffer '{buffer.sym}' of a constants arena names no weight", stage=STAGE)
        if buffer.weight is not None:
            buffer.set_offset(offsets[buffer.weight.data])


def _place_in_line(buffers: Sequence[BufferOp], alignment: int) -> None:
    end = max([_offset(b) + _nbytes(b) for b in buffers if b.offset is not None], default=0)
    for buffer in buffers:
        if buffer.offset is None:
            buffer.set_offset(_aligned(end, alignment))
            end = _offset(buffer) + _nbytes(buffer)


# --- activations -----------------------------------------------------------------------------------------------------


def _place_activations(arena: ArenaOp, buffers: Sequence[BufferOp], lifetimes: Lifetimes, context: QCContext) -> None:
    uses = [lifetimes.of(buffer.sym) for buffer in buffers]
    sizes = [_nbytes(buffer) for buffer in buffers]
    fixed = {i: _offset(buffer) for i, buffer in enumerate(buffers) if buffer.offset is not None}
    offsets = place(sizes, uses, fixed)
    for buffer, offset in zip(buffers, offsets, strict=True):
        buffer.set_offset(offset)
    size = max([o + s for o, s in zip(offsets, sizes, strict=True)], default=0)
    least = lifetimes.lower_bound({b.sym: _aligned(s) for b, s in zip(buffers, sizes, strict=True)})
    total = sum(map(_aligned, sizes))
    what = f"{size} bytes for {counted(len(buffers), 'buffer')}"
    context.report.add(STAGE, arena.sym, what, f"without sharing {total}, at least {least} live at once")


def place(sizes: Sequence[int], uses: Sequence[Sequence[Use]], fixed: dict[int, int]) -> list[int]:
    """Offsets (multiples of 64) at which no two conflicting buffers overlap. Offsets in `fixed` are kept.

    The algorithm is greedy by size with the best-fitting gap, as in Pisarchyk and Lee, "Efficient Memory Management for
    Deep Neural Net Inference" (2020). `uses[i]` has the lifetime of buffer i in each entry that uses it.
    """
    order = [*fixed, *sorted((i for i in range(len(sizes)) if i not in fixed), key=lambda i: (-sizes[i], i))]
    conflict = _conflicts(uses)
    offsets = np.full(len(sizes), -1, dtype=np.int64)
    ends = np.zeros(len(sizes), dtype=np.int64)
    for i in order:
        if i in fixed:
            offsets[i] = fixed[i]
        else:
            rivals = np.flatnonzero(conflict[i] & (offsets >= 0))
            offsets[i] = _best_gap(offsets[rivals], ends[rivals], _aligned(sizes[i]))
        ends[i] = offsets[i] + _aligned(sizes[i])
    return [int(offset) for offset in offsets]


def _best_gap(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], size: int) -> int:
    """The start of the smallest gap of at least `size` bytes between the ranges, or the end of all ranges."""
    best, best_gap, at = -1, -1, 0
    for k in np.argsort(starts, kind="stable"):
        gap = int(starts[k]) - at
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = at, gap
        at = max(at, int(ends[k]))
    return at if best < 0 else best


def _conflicts(uses: Sequence[Sequence[Use]]) -> npt.NDArray[np.bool_]:
    """An (n, n) array of booleans. `[i, j]` is true if in some entry neither buffer is dead before the other begins."""
    count = len(uses)
    conflict = np.zeros((count, count), dtype=np.bool_)
    entries = sorted({use.entry for each in uses for use in each})
    for entry in entries:
        members = [(i, use) for i, each in enumerate(uses) for use in each if use.entry == entry]
        index = np.array([i for i, _ in members])
        last = np.array([use.last for _, use in members], dtype=np.int64)
        before = np.array([use.before for _, use in members], dtype=np.int64)
        for row, (i, _) in enumerate(members):
            i_first = (before >= last[row]).all(axis=1)  # all uses of i happen before all of the other's
            i_second = (before[row] >= last).all(axis=1)
            conflict[i, index] |= ~(i_first | i_second)
    np.fill_diagonal(conflict, False)
    return conflict
