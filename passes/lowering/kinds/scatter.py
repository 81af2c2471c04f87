"""qc.scatter: writes x's memory if x is a state, else a copy of x."""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, axis_groups, collapsed
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.scatter import ScatterKernel


def draft(op: qc.ScatterOp, memory: ValueMemory) -> Draft:
    """The kernel updates a buffer that contains x: x's own memory if x is a state, else a copy."""
    result = Draft("scatter", path_of(op))
    shape, axis = shape_of(op.x.type), op.axis.value.data
    count = shape_of(op.index.type)[axis]
    wanted = (*shape[:axis], count, *shape[axis + 1 :])
    if shape_of(op.index.type) != wanted or shape_of(op.src.type) != wanted:
        raise KernelSelectionError(
            f"qc.scatter at '{path_of(op)}' writes a part of x only (index {shape_of(op.index.type)}, x {shape}); "
            "cut x to the index's shape first and insert the result"
        )
    groups = axis_groups(len(shape), axis)
    target = views.collapse(memory.updated(op, op.x), groups)
    assert target is not None
    index = result.add("index", "r", collapsed(memory.view(op.index), groups, op, memory))
    src = result.add("src", "r", collapsed(memory.view(op.src), groups, op, memory))
    out = result.add("out", "rw", target)
    type_ = tensor(target.shape, target.dtype)
    result.body.add_op(qc.ScatterOp(out, index, src, type_, axis=1, reduce=op.reduce.data))
    return result


def body(op: qc.ScatterOp, operands: Operands, serves: str) -> ScatterKernel:
    out, src = named(operands, "out"), named(operands, "src")
    return ScatterKernel(
        outer=out.shape[0],
        length=out.shape[1],
        count=src.shape[1],
        inner=out.shape[2],
        fold=op.reduce.data,  # type: ignore[arg-type]
    )


LOWERING = Lowering(ScatterKernel, (qc.ScatterOp,), draft, body)
