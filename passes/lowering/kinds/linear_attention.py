"""qc.linear_attention: one kernel processes all tokens, in the memory of the states that it changes."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel


def draft(op: qc.LinearAttentionOp, memory: ValueMemory) -> Draft:
    _, heads, width, depth = shape_of(op.state.type)
    result = Draft(f"linear_attention_{heads}x{width}x{depth}", path_of(op))
    given = {
        "query": unit_last(op.query, op, memory),
        "key": unit_last(op.key, op, memory),
        "value": memory.view(op.value),
        "decay": unit_last(op.decay, op, memory),
        "first": memory.view(op.first),
        "counts": memory.view(op.counts),
    }
    if op.rate is not None:
        given["rate"] = unit_last(op.rate, op, memory)
    if op.beta is not None:
        given["beta"] = memory.view(op.beta)
    state = result.add("state", "rw", memory.updated(op, op.state))
    values = {name: result.add(name, "r", view) for name, view in given.items()}
    result.add("out", "w", memory.result(op.out, shape_of(op.out.type)))
    result.body.add_op(qc.LinearAttentionOp(state, **values))
    return result


def body(op: qc.LinearAttentionOp, operands: Operands, serves: str) -> LinearAttentionKernel:
    query, decay = named(operands, "query"), named(operands, "decay")
    slots, heads, width, depth = (int(size) for size in named(operands, "state").shape)
    return LinearAttentionKernel(
        slots=slots, batch=query.shape[0], steps=query.shape[1], heads=heads, groups=int(query.shape[2]), width=width,
        depth=depth, decays_columns=op.rate is None and decay.shape[3] != 1, has_rate=op.rate is not None,
        has_beta=op.beta is not None,
    )  # fmt: skip


LOWERING = Lowering(LinearAttentionKernel, (qc.LinearAttentionOp,), draft, body)
