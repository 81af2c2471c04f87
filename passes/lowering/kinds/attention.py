"""qc.attention."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda import attention as cuda
from qcompiler.kernels.cuda import engines
from qcompiler.passes.devices.engine_report import report_engines
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.cache_rows import require_own_memory
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, named
from qcompiler.plan.kinds.attention import AttentionKernel


def select(op: qc.AttentionOp, ranges: Ranges, context: QCContext) -> None:
    if op.rows_of is not None:
        require_own_memory(op, op.k)
        require_own_memory(op, op.v)
    if context.target.kind != "cuda":
        return
    q = shape_of(op.q.type)
    types = (tensor_dtype(op.q.type), tensor_dtype(op.k.type), tensor_dtype(op.v.type))
    facts = {"attention": engines.attention_facts(types, q[2], int(q[3]), int(op.value_dim), op.rows_of)}
    report_engines(op, context, cuda.ENGINES, facts)


def draft(op: qc.AttentionOp, memory: ValueMemory) -> Draft:
    result = Draft("attention", path_of(op))
    q, k, v = (result.add(name, "r", unit_last(x, op, memory)) for name, x in (("q", op.q), ("k", op.k), ("v", op.v)))
    mask = None
    if op.mask is not None:
        view, full = memory.view(op.mask), (*shape_of(op.q.type)[:3], shape_of(op.k.type)[2])
        mask = result.add("mask", "r", views.spread(view, full))
    last = None
    if op.last is not None:
        rows = (shape_of(op.q.type)[0], shape_of(op.q.type)[2])
        last = result.add("last", "r", views.spread(memory.view(op.last), rows))
    sinks = None
    if op.sinks is not None:
        sinks = result.add("sinks", "r", views.spread(memory.view(op.sinks), (*shape_of(op.q.type)[:3], 1)))
    out = memory.result(op.result, shape_of(op.result.type))
    result.add("out", "w", out)
    result.body.add_op(op.rebuilt(q, k, v, mask, last, sinks, tensor(out.shape, out.dtype)))
    return result


def body(op: qc.AttentionOp, operands: Operands, serves: str) -> AttentionKernel:
    q, k = (named(operands, name) for name in ("q", "k"))
    masks = [operand.dtype for operand in operands if operand.name == "mask"]
    return AttentionKernel(
        batch=q.shape[0],
        heads=int(q.shape[1]),
        kv_heads=int(k.shape[1]),
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim=int(q.shape[3]),
        value_dim=int(op.value_dim),
        scale=op.scale.value.data,
        causal=op.causal is not None,
        mask="none" if not masks else "bool" if masks[0] == "i1" else "float",
        window=op.keys_back,
        softcap=op.cap,
        last=op.last is not None,
        sinks=op.sinks is not None,
        ring=op.ring is not None,
        cache=op.rows_of,  # type: ignore[arg-type]
        compute=op.rounds_to,  # type: ignore[arg-type]
        parts=op.divided_into,
    )


LOWERING = Lowering(AttentionKernel, (qc.AttentionOp,), draft, body, only_floats=True, select=select)
