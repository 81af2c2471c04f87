"""merge-launches: small steps that do not depend on each other share a launch, and write where they are moved to.

    before  rt.launch @rope_q [%qkv, %cos, %sin, %q]             after  rt.launch @parts_0 [%qkv, %cos, %sin, %at,
            rt.launch @rope_k [%qkv, %cos, %sin, %k]                                        %q, %keys, %values]
            rt.launch @index_update_0 [%keys, %at, %k]
            rt.launch @index_update_0 [%values, %at, %qkv]

A launch of a small kernel takes longer to begin than to run.  Four things are done about it, with the steps of an
entry point and their buffers in view:

- A pointwise loop whose result is only read by the update of one row (`qc.index_update` with a list of one entry: a
  cache at one token) computes it in that row; several loops may compute the parts of a row.  Longer lists stay apart:
  the last of equal entries must win there.
- A pointwise loop whose result is only copied computes it where it is copied to.
- Linears of up to eight rows that read the same rows become one kernel on a GPU (plan/kinds/linears.py).
- Pointwise loops and such updates become the parts of one kernel (plan/kinds/parts.py), if none touches what another
  one writes, and if they can stand in one place: each may move past steps that neither touch what it writes nor write
  what it touches.

A part has at most `MOST_ELEMENTS` elements; what is larger keeps a launch, and a geometry, of its own.  Loops that
touch a state's memory other than by such an update stay as they are: where a state is copied is counted (decision 013).
Nothing is computed in another way, so the results are the same to the bit.  `merge-launches{most=1}` merges nothing;
`separate` has patterns of module paths whose linears keep a launch of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import PassError
from qcompiler.ir.context import QCContext
from qcompiler.ir.rt import BufferOp, EntryOp, KernelOp, LaunchOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.lowering.kernels import KernelTable
from qcompiler.passes.schedule.launch_groups import Group, grouped
from qcompiler.passes.schedule.launch_parts import draft_of
from qcompiler.passes.schedule.linear_groups import LinearGroup, linears_draft

STAGE = "merge-launches"

DEFAULT_PARTS = 8
"""A layer of a decoder has four to six such steps in one place."""

MOST_PARTS = 32
"""The largest number that the option takes: a kernel has a parameter for each operand, and CUDA's have 4 KiB."""


@dataclass(frozen=True)
class MergeLaunchesPass(ModulePass):
    """Puts at most `most` small steps into one launch."""

    name = STAGE
    most: int = DEFAULT_PARTS
    separate: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if not 1 <= self.most <= MOST_PARTS:
            raise PassError(f"most is {self.most}; it is a number from 1 to {MOST_PARTS}", stage=STAGE)
        schedule = Schedule(op)
        if self.most == 1 or any(step.stream is not None for each in schedule.entries.values() for step in each.steps):
            return
        used = _used(schedule)
        table = KernelTable()
        for entry in schedule.entries.values():
            if not entry.is_init:
                _merge(entry, schedule, self, table, ctx)
        first = next((each for each in op.body.block.ops if isinstance(each, EntryOp)), None)
        if first is not None:
            op.body.block.insert_ops_before(list(table.ops()), first)
        _drop_unused(op, used)


def _merge(entry: EntryOp, schedule: Schedule, options: MergeLaunchesPass, table: KernelTable, ctx: Context) -> None:
    block = entry.body.block
    for item in grouped(entry, schedule, options.most, options.separate):
        if not isinstance(item, Group | LinearGroup):
            block.detach_op(item)
            block.add_op(item)
            continue
        draft = linears_draft(item, schedule) if isinstance(item, LinearGroup) else draft_of(item, schedule)
        name = table.name(draft)
        block.add_op(LaunchOp(name, draft.views))
        for step in item.steps:
            block.erase_op(step)
        if isinstance(ctx, QCContext):
            ctx.report.add(STAGE, draft.path, f"{entry.sym}: {len(item.steps)} launches are one, {name}", item.why)


def _used(schedule: Schedule) -> set[str]:
    """Kernels and buffers that some step names."""
    found: set[str] = set()
    for entry in schedule.entries.values():
        for step in entry.steps:
            found |= {f"buffer {view.buffer}" for view in step.view_records}
            found |= {f"kernel {name}" for name in schedule.kernels_of(step)}
    return found


def _drop_unused(module: ModuleOp, before: set[str]) -> None:
    """Erases the kernels and buffers that no step names any more."""
    gone = before - _used(Schedule(module))
    for op in list(module.body.block.ops):
        kind = {KernelOp: "kernel", BufferOp: "buffer"}.get(type(op))
        if kind is not None and isinstance(op, KernelOp | BufferOp) and f"{kind} {op.sym}" in gone:
            module.body.block.erase_op(op)
