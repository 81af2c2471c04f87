"""The steps of one entry point: launches of shared kernels, selects by the number of rows, and copies.

qc.linear %x, %w {m_classes = [4, none]}    →    rt.select on b*s [<= 4: @linear_0, else @linear_1] …
%x where %out is wanted                     →    rt.copy @main.tmp.3 to @main.out.0
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import Operation

from qcompiler.ir import qc, rt
from qcompiler.ir.module import path_of
from qcompiler.passes.lowering.drafts import Draft, copy_draft
from qcompiler.passes.lowering.kinds.linear import cases_of, with_m_class
from qcompiler.passes.lowering.rt_module import EntryMemory
from qcompiler.passes.lowering.views import is_contiguous
from qcompiler.passes.lowering.views import with_shape as reshaped
from qcompiler.plan.plan import SelectCase, View


@dataclass
class Steps:
    memory: EntryMemory
    ops: list[rt.StepOp] = field(default_factory=list)

    def launch(self, each: Draft, op: Operation | None = None) -> None:
        """Adds a launch. For a linear with several cases it adds a select by the number of rows."""
        kernels = self.memory.program.kernels
        if not isinstance(op, qc.LinearOp):
            self.ops.append(rt.LaunchOp(kernels.name(each), each.views))
            return
        cases = cases_of(op)
        names = [kernels.name(with_m_class(each, m_class)) for _, m_class in cases]
        if len(cases) == 1:
            self.ops.append(rt.LaunchOp(names[0], each.views))
            return
        records = [SelectCase(max=limit, kernel=name) for (limit, _), name in zip(cases, names, strict=True)]
        self.ops.append(rt.SelectOp(each.operands[-1].shape[0], records, each.views))

    def copy(self, source: View, target: View, op: Operation) -> None:
        """Adds a copy of the values to `target`, on behalf of `op`. It adds nothing if they are already there."""
        if source.buffer == target.buffer and source.offset == target.offset and is_contiguous(source):
            return
        if is_contiguous(source):
            self.ops.append(rt.CopyOp(reshaped(source, target.shape, target.strides), target))
        else:
            self.launch(copy_draft(source, target, path_of(op)))

    def contiguous_copy(self, view: View, op: Operation, device: str | None = None) -> View:
        """A row-major copy in a new buffer, on the op's device or on `device`."""
        target = self.memory.fresh(view, self.memory.device_of(op) if device is None else device)
        self.launch(copy_draft(view, target, path_of(op)))
        return target

    def copy_across(self, source: View, target: View) -> None:
        """Adds a copy of row-major bytes to another device."""
        self.ops.append(rt.CopyOp(reshaped(source, target.shape, target.strides), target))
