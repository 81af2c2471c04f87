"""qc.sort and qc.topk."""

from __future__ import annotations

from xdsl.ir import Operation

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, axis_groups, collapsed
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.order import OrderKernel


def draft(op: qc.SortOp | qc.TopkOp, memory: ValueMemory) -> Draft:
    result = Draft("sort" if isinstance(op, qc.SortOp) else "topk", path_of(op))
    groups = axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    x = result.add("x", "r", collapsed(memory.view(op.x), groups, op, memory))
    kinds = []
    for name, value in (("values", op.values), ("indices", op.indices)):
        out = views.collapse(memory.result(value, shape_of(value.type)), groups)
        assert out is not None
        result.add(name, "w", out)
        kinds.append(tensor(out.shape, out.dtype))
    if isinstance(op, qc.SortOp):
        made: Operation = qc.SortOp(x, kinds, axis=1, descending=bool(op.descending.value.data))
    else:
        made = qc.TopkOp(x, kinds, k=op.k.value.data, axis=1)
    result.body.add_op(made)
    return result


def body(op: qc.SortOp | qc.TopkOp, operands: Operands, serves: str) -> OrderKernel:
    x, values = named(operands, "x"), named(operands, "values")
    descending = isinstance(op, qc.TopkOp) or bool(op.descending.value.data)
    outer, length, inner = x.shape
    return OrderKernel(outer=outer, length=length, count=values.shape[1], inner=inner, descending=descending)


LOWERING = Lowering(
    OrderKernel,
    (qc.SortOp, qc.TopkOp),
    draft,
    body,
)
