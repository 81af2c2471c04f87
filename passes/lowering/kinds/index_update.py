"""qc.index_update: writes the memory of the operand that it updates."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, axis_groups, collapsed, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.index_update import IndexUpdateKernel


def draft(op: qc.IndexUpdateOp, memory: ValueMemory) -> Draft:
    result = Draft("index_update", path_of(op))
    groups = axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    target = views.collapse(memory.updated(op, op.x), groups)
    assert target is not None
    x = result.add("x", "rw", target)
    index = result.add("index", "r", vector_of(op.index, op, memory))
    src = result.add("src", "r", collapsed(memory.view(op.src), groups, op, memory))
    result.body.add_op(qc.IndexUpdateOp(x, index, src, tensor(target.shape, target.dtype), axis=1))
    return result


def body(op: qc.IndexUpdateOp, operands: Operands, serves: str) -> IndexUpdateKernel:
    x, src = named(operands, "x"), named(operands, "src")
    return IndexUpdateKernel(outer=x.shape[0], length=x.shape[1], count=src.shape[1], inner=x.shape[2])


LOWERING = Lowering(IndexUpdateKernel, (qc.IndexUpdateOp,), draft, body)
