"""qc.join_attention."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel


def draft(op: qc.JoinAttentionOp, memory: ValueMemory) -> Draft:
    result = Draft("join_attention", path_of(op))
    x = result.add("x", "r", unit_last(op.x, op, memory))
    out = memory.result(op.result, shape_of(op.result.type))
    result.add("out", "w", out)
    result.body.add_op(qc.JoinAttentionOp(x, tensor(out.shape, out.dtype)))
    return result


def body(op: qc.JoinAttentionOp, operands: Operands, serves: str) -> JoinAttentionKernel:
    x = named(operands, "x").shape
    heads, parts, value_dim = (int(n) for n in (x[1], x[3], named(operands, "out").shape[3]))
    return JoinAttentionKernel(batch=x[0], heads=heads, q_len=x[2], parts=parts, value_dim=value_dim)


LOWERING = Lowering(JoinAttentionKernel, (qc.JoinAttentionOp,), draft, body)
