"""qc.batch_matmul."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering.drafts import Draft, ValueMemory
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel


def draft(op: qc.BatchMatmulOp, memory: ValueMemory) -> Draft:
    result = Draft("batch_matmul", path_of(op))
    a = result.add("a", "r", memory.view(op.a))
    b = result.add("b", "r", memory.view(op.b))
    out = memory.result(op.result, shape_of(op.result.type))
    result.add("out", "w", out)
    result.body.add_op(qc.BatchMatmulOp(a, b, tensor(out.shape, out.dtype)))
    return result


def body(op: qc.BatchMatmulOp, operands: Operands, serves: str) -> BatchMatmulKernel:
    a, out = named(operands, "a"), named(operands, "out")
    return BatchMatmulKernel(batch=out.shape[:-2], m=out.shape[-2], n=out.shape[-1], k=a.shape[-1])


LOWERING = Lowering(BatchMatmulKernel, (qc.BatchMatmulOp,), draft, body, only_floats=True)
