"""qc.top_p."""

from __future__ import annotations

from qcompiler.ir.module import path_of
from qcompiler.ir.qc_index import TopPOp
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.top_p import TopPKernel


def draft(op: TopPOp, memory: ValueMemory) -> Draft:
    result = Draft("top_p", path_of(op))
    x = result.add("x", "r", matrix_of(op.x, op, memory))
    top = result.add("top", "r", vector_of(op.top, op, memory))
    draw = result.add("draw", "r", vector_of(op.draw, op, memory))
    out = views.as_vector(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(TopPOp(x, top, draw, tensor(out.shape, out.dtype)))
    return result


def body(op: TopPOp, operands: Operands, serves: str) -> TopPKernel:
    x = named(operands, "x")
    return TopPKernel(rows=x.shape[0], cols=x.shape[1])


LOWERING = Lowering(TopPKernel, (TopPOp,), draft, body)
