"""qc.softmax over any axis. The kernel's axis is the last dim."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.softmax import SoftmaxKernel


def draft(op: qc.SoftmaxOp, memory: ValueMemory) -> Draft:
    rank, axis = len(shape_of(op.x.type)), op.axis.value.data
    last = [i for i in range(rank) if i != axis] + [axis]
    result = Draft("softmax", path_of(op))
    source = views.transpose(memory.view(op.x), last)
    matrix = views.as_matrix(source) or views.as_matrix(memory.contiguous_copy(source, op))
    assert matrix is not None
    x = result.add("x", "r", matrix)
    # The result is stored with its axis last, so that its rows are contiguous. The value is a view of that memory.
    out = views.as_matrix(views.transpose(memory.result(op.result, shape_of(op.result.type)), last))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.SoftmaxOp(x, tensor(out.shape, out.dtype), axis=1))
    return result


def body(op: qc.SoftmaxOp, operands: Operands, serves: str) -> SoftmaxKernel:
    x = named(operands, "x")
    return SoftmaxKernel(rows=x.shape[0], cols=x.shape[1])


LOWERING = Lowering(SoftmaxKernel, (qc.SoftmaxOp,), draft, body, only_floats=True)
