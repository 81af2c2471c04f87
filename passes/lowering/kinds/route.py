"""qc.route."""

from __future__ import annotations

from qcompiler.ir.module import path_of
from qcompiler.ir.qc_index import RouteOp
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.route import RouteKernel


def draft(op: RouteOp, memory: ValueMemory) -> Draft:
    result = Draft("route", path_of(op))
    x = result.add("x", "r", matrix_of(op.x, op, memory))
    kinds = []
    for name, value in (("weights", op.weights), ("indices", op.indices)):
        out = views.as_matrix(memory.result(value, shape_of(value.type)))
        assert out is not None
        result.add(name, "w", out)
        kinds.append(tensor(out.shape, out.dtype))
    k, normalise = op.k.value.data, op.normalise is not None
    result.body.add_op(RouteOp(x, kinds, k=k, scores=op.scores.data, normalise=normalise))
    return result


def body(op: RouteOp, operands: Operands, serves: str) -> RouteKernel:
    rows, cols = named(operands, "x").shape
    assert isinstance(cols, int)
    return RouteKernel(
        rows=rows, cols=cols, count=op.k.value.data, scores=op.kind_of_scores, normalise=op.normalise is not None
    )


LOWERING = Lowering(RouteKernel, (RouteOp,), draft, body)
