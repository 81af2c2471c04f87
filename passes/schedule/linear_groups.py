"""Linears that read the same rows, in one launch: which they are, and the kernel of such a group.

rt.launch @linear_q4_K_0 [%x, %wqk, %qk]                  rt.launch @linears_0 [%x, %wqk, %qk, %x, %wv, %v]
rt.launch @parts_0 [%qk, …]                        ->     rt.launch @parts_0 [%qk, …]
rt.launch @linear_q6_K_0 [%x, %wv, %v]

rt.kernel @linears_0 (%x_0, %w_0, %out_0, %x_1, %w_1, %out_1) {
  %0 = qc.linear %x_0, %w_0
  %1 = qc.linear %x_1, %w_1
  rt.yield %0, %1
}

merge-linears makes one linear of those whose weights have one format.  The others share a launch on a GPU, where a
block has a panel of one weight and all rows of x, of which there are at most eight.  A CPU calls one function after
another in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import qc
from qcompiler.ir.module import is_named
from qcompiler.ir.rt import LaunchOp, StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.lowering.drafts import Draft
from qcompiler.plan.kinds.linears import MOST_LINEARS, MOST_ROWS
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.plan import View


@dataclass(frozen=True)
class FewRows:
    """A launch of one linear of few rows, on a GPU."""

    step: LaunchOp
    number: int
    device: str

    @property
    def rows(self) -> View:
        """The rows that it multiplies."""
        return self.step.view_records[0]


@dataclass
class LinearGroup:
    """The linears of one launch."""

    members: list[FewRows] = field(default_factory=list)

    def takes(self, new: FewRows) -> bool:
        """Whether a linear reads the rows of this group, on its device, and there is room."""
        first = self.members[0]
        return (new.rows, new.device) == (first.rows, first.device) and len(self.members) < MOST_LINEARS

    @property
    def steps(self) -> list[LaunchOp]:
        return [each.step for each in self.members]

    @property
    def why(self) -> str:
        return f"{len(self.members)} linears of one kernel read the same rows, and their weights or epilogues differ"


def few_rows(step: StepOp, number: int, schedule: Schedule, separate: Sequence[str]) -> FewRows | None:
    """The step as a linear of a group, or None. `separate` are globs over module paths."""
    if not isinstance(step, LaunchOp):
        return None
    kernel, views = schedule.kernels[step.kernel_name], step.view_records
    if kernel.body is None:
        return None
    ops = list(kernel.body.block.ops)
    device = schedule.device_of(views[0].buffer)
    if len(ops) != 2 or not isinstance(ops[0], qc.LinearOp) or schedule.devices[device].kind.data != "cuda":
        return None
    rows, weight = views[0].shape[0], views[1]
    if is_named(kernel.serves_text, separate):
        return None
    few = len(views[0].shape) == 2 and isinstance(rows, int) and 1 <= rows <= MOST_ROWS
    return FewRows(step, number, device) if few and weight.layout not in (None, "canonical") else None


def linears_draft(group: LinearGroup, schedule: Schedule) -> Draft:
    """The operands of each linear, in their order, under their names and its number."""
    kernels = [schedule.kernels[step.kernel_name] for step in group.steps]
    draft = Draft("linears", joined_paths(list(dict.fromkeys(kernel.serves_text for kernel in kernels))))
    arguments: list[list[SSAValue]] = []
    for number, (step, kernel) in enumerate(zip(group.steps, kernels, strict=True)):
        operands = zip(kernel.operand_records, step.view_records, strict=True)
        arguments.append([draft.add(f"{op.name}_{number}", op.access, view) for op, view in operands])
    builder = Builder(InsertPoint.at_end(draft.body))
    for kernel, given in zip(kernels, arguments, strict=True):
        assert kernel.body is not None
        block = kernel.body.block
        (op, _) = block.ops
        made = builder.insert(op.clone(dict(zip(block.args, given, strict=True))))
        assert isinstance(made, qc.LinearOp)
        draft.written += [*made.beside, made.result]
    return draft
