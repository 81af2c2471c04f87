"""qc.cumsum: sums and other folds."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, axis_groups, collapsed
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.scan import ScanKernel


def draft(op: qc.CumsumOp, memory: ValueMemory) -> Draft:
    result = Draft("cumsum", path_of(op))
    groups = axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    x = result.add("x", "r", collapsed(memory.view(op.x), groups, op, memory))
    out = views.collapse(memory.result(op.result, shape_of(op.result.type)), groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.CumsumOp(x, tensor(out.shape, out.dtype), axis=1, reduce=op.fold))
    return result


def body(op: qc.CumsumOp, operands: Operands, serves: str) -> ScanKernel:
    x = named(operands, "x")
    return ScanKernel(outer=x.shape[0], length=x.shape[1], inner=x.shape[2], fold=op.fold)  # type: ignore[arg-type]


LOWERING = Lowering(ScanKernel, (qc.CumsumOp,), draft, body)
