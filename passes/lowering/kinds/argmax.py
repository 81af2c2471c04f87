"""qc.argmax."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, axis_groups, collapsed
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.argmax import ArgmaxKernel


def draft(op: qc.ArgmaxOp, memory: ValueMemory) -> Draft:
    result = Draft("argmax", path_of(op))
    rank, axis = len(shape_of(op.x.type)), op.axis.value.data
    x = result.add("x", "r", collapsed(memory.view(op.x), axis_groups(rank, axis), op, memory))
    groups: list[Sequence[int]] = [tuple(range(axis)), tuple(range(axis, rank - 1))]
    out = views.collapse(memory.result(op.result, shape_of(op.result.type)), groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.ArgmaxOp(x, tensor(out.shape, out.dtype), axis=1))
    return result


def body(op: qc.ArgmaxOp, operands: Operands, serves: str) -> ArgmaxKernel:
    x = named(operands, "x")
    return ArgmaxKernel(outer=x.shape[0], length=x.shape[1], inner=x.shape[2])


LOWERING = Lowering(ArgmaxKernel, (qc.ArgmaxOp,), draft, body)
