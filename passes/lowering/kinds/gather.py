"""qc.gather: both modes."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, along_groups, axis_groups, collapsed, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.gather import GatherKernel


def draft(op: qc.GatherOp, memory: ValueMemory) -> Draft:
    result = Draft("gather", path_of(op))
    shape, axis, along = shape_of(op.x.type), op.axis.value.data, op.mode.data == "along"
    groups = axis_groups(len(shape), axis)
    if along:
        groups = along_groups(memory.view(op.x), memory.view(op.index), axis)
    x = result.add("x", "r", collapsed(memory.view(op.x), groups, op, memory))
    index = memory.view(op.index)
    index = collapsed(index, groups, op, memory) if along else vector_of(op.index, op, memory)
    index_argument = result.add("index", "r", index)
    index_rank = 1 if along else len(shape_of(op.index.type))
    out_groups = (
        groups
        if along
        else [
            tuple(range(axis)),
            tuple(range(axis, axis + index_rank)),
            tuple(range(axis + index_rank, len(shape) - 1 + index_rank)),
        ]
    )
    out = views.collapse(memory.result(op.result, shape_of(op.result.type)), out_groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.GatherOp(x, index_argument, tensor(out.shape, out.dtype), axis=1, mode=op.mode.data))
    return result


def body(op: qc.GatherOp, operands: Operands, serves: str) -> GatherKernel:
    x, out = named(operands, "x"), named(operands, "out")
    return GatherKernel(
        mode=op.mode.data,  # type: ignore[arg-type]
        outer=x.shape[0],
        length=x.shape[1],
        count=out.shape[1],
        inner=x.shape[2],
    )


LOWERING = Lowering(GatherKernel, (qc.GatherOp,), draft, body)
