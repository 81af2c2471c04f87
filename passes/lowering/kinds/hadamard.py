"""qc.hadamard."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.hadamard import HadamardKernel


def draft(op: qc.HadamardOp, memory: ValueMemory) -> Draft:
    result = Draft("hadamard", path_of(op))
    x = result.add("x", "r", matrix_of(op.x, op, memory))
    out = views.as_matrix(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.HadamardOp(x, block=op.block.value.data))
    return result


def body(op: qc.HadamardOp, operands: Operands, serves: str) -> HadamardKernel:
    rows, cols = named(operands, "x").shape
    return HadamardKernel(rows=rows, cols=int(cols), block=op.block.value.data)


LOWERING = Lowering(HadamardKernel, (qc.HadamardOp,), draft, body, only_floats=True)
