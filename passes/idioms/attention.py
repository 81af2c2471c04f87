"""Attention from `softmax(q kᵀ * scale + mask) v`, written as two batched matmuls around a softmax.

The matmuls may be of rank 3 over joined batch and heads, the scale a product or a quotient (of the scores, of q or of
k), the scaled scores soft-capped (`c * tanh(x / c)`).  Casts around the softmax are dropped, since `qc.attention` keeps
scores in fp32.  What is then added to the scores, or replaces them where a mask is false, is the mask: idioms/terms.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.idioms.terms import Full, Masks, Term
from qcompiler.passes.support import loops
from qcompiler.passes.support.trace import Node, Tracer


@dataclass(frozen=True)
class _Scores:
    """`matmul * scale`, soft-capped, then the terms in order (their indices over the softmax's dims)."""

    matmul: qc.BatchMatmulOp
    scale: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()


def raise_attention(op: qc.BatchMatmulOp, tracer: Tracer, masks: Masks) -> SSAValue | None:
    """The attention that computes a matmul's result, inserted before it; None if it is none."""
    softmax = loops.producer(_under_casts_and_reshapes(op.a))
    if not isinstance(softmax, qc.SoftmaxOp):
        return None
    shape = shape_of(softmax.result.type)
    if len(shape) not in (3, 4) or softmax.axis.value.data != len(shape) - 1 or shape[-2:] != shape_of(op.a.type)[-2:]:
        return None
    scores = _scores(tracer.element(softmax.x), len(shape), tracer)
    if scores is None or shape_of(scores.matmul.result.type)[-2:] != shape[-2:]:
        return None
    batch, heads = (shape[0], shape[1]) if len(shape) == 4 else (shape[0], 1)
    dtypes = {tensor_dtype(v.type) for v in (scores.matmul.a, scores.matmul.b, op.b, op.result)}
    if not isinstance(heads, int) or len(dtypes) != 1:
        return None
    return _build(op, scores, (batch, heads, shape[-2], shape[-1]), tracer, masks)


def _build(op: qc.BatchMatmulOp, scores: _Scores, full: Full, tracer: Tracer, masks: Masks) -> SSAValue | None:
    batch, heads, queries, keys = full
    mask = None
    if scores.terms:
        mask = masks.build(op, scores.terms, full)
        if mask is None:
            return None
    builder = build.with_path(InsertPoint.before(op), path_of(op))
    depth, width = shape_of(scores.matmul.a.type)[-1], shape_of(op.b.type)[-1]
    plain_q, factor_q = _unscaled(builder, scores.matmul.a, tracer)
    plain_k, factor_k = _unscaled(builder, scores.matmul.b, tracer)
    q = build.reshape(builder, plain_q, (batch, heads, queries, depth))
    turned = len(shape_of(plain_k.type))
    k = build.transpose(builder, plain_k, [*range(turned - 2), turned - 1, turned - 2])
    k = build.reshape(builder, k, (batch, heads, keys, depth))
    v = build.reshape(builder, op.b, (batch, heads, keys, width))
    type_ = tensor_type((batch, heads, queries, width), tensor_dtype(op.result.type))
    made = qc.AttentionOp(q, k, v, mask, type_, scale=scores.scale * factor_q * factor_k, softcap=scores.softcap)
    builder.insert(made)
    return build.reshape(builder, made.result, shape_of(op.result.type))


def _unscaled(builder: Builder, value: SSAValue, tracer: Tracer) -> tuple[SSAValue, float]:
    """(x, factor) where value is x * factor and x is at hand, seen with the value's dims."""
    element = tracer.head(tracer.element(value))
    if element.op not in ("arith.mulf", "arith.divf"):
        return value, 1.0
    sides = [(element.args[0], element.args[1])]
    if element.op == "arith.mulf":
        sides.append((element.args[1], element.args[0]))
    for inner, other in sides:
        factor = tracer.constant(other)
        for source, index in tracer.aliases(inner):
            order = loops.order_of(index, shape_of(source.type), shape_of(value.type))
            if factor and order is not None and tensor_dtype(source.type) == tensor_dtype(value.type):
                view = build.transpose(builder, source, [order.index(n) for n in range(len(order))])
                return view, factor if element.op == "arith.mulf" else 1 / factor
    return value, 1.0


def _under_casts_and_reshapes(value: SSAValue) -> SSAValue:
    """The value behind float casts and reshapes of the batch dims."""
    while True:
        op = loops.producer(value)
        if isinstance(op, tensor.ExpandShapeOp | tensor.CollapseShapeOp):
            value = op.src
        elif isinstance(op, ops.GenericOp) and _is_cast(op):
            value = op.inputs[0]
        else:
            return value


def _is_cast(op: ops.GenericOp) -> bool:
    body = list(op.body.block.ops)
    return (
        loops.is_pointwise(op)
        and len(op.inputs) == 1
        and all(isinstance(each, arith.ExtFOp | arith.TruncFOp) for each in body[:-1])
        and loops.inputs_of(op)[0][1] == loops.output_index(op)
    )


def _scores(node: Node, rank: int, tracer: Tracer) -> _Scores | None:
    """Reads scale, cap and terms off the scores, outermost first; `rank` of them at this point."""
    for tensor_, index in tracer.aliases(node):
        inner = _under_casts_and_reshapes(tensor_)
        matmul = loops.producer(inner)
        whole = index == loops.own_index(shape_of(tensor_.type))
        if isinstance(matmul, qc.BatchMatmulOp) and whole:
            return _Scores(matmul)
        if whole and inner is not tensor_ and shape_of(inner.type)[-2:] == shape_of(tensor_.type)[-2:]:
            return _scores(tracer.element(inner), len(shape_of(inner.type)), tracer)
    found = tracer.head(node)
    if found.op in ("arith.mulf", "arith.divf"):
        return _capped(found, rank, tracer) or _scaled(found, rank, tracer)
    if found.op == "arith.addf":
        for one, other in tracer.either(found, "arith.addf"):
            scores = _scores(one, rank, tracer)
            added = next(tracer.aliases(other), None)
            if scores is not None and added is not None:
                return replace(scores, terms=(*scores.terms, Term(*added, rank)))
    if found.op == "arith.select":
        keep, kept, dropped = found.args
        negated = _negated(keep, tracer)
        return _selected(keep, kept, dropped, rank, tracer) or _selected(negated, dropped, kept, rank, tracer)
    return None


def _selected(keep: Node | None, kept: Node, dropped: Node, rank: int, tracer: Tracer) -> _Scores | None:
    """The scores where `keep` is true, else a number."""
    value, mask = tracer.constant(dropped), next(tracer.aliases(keep), None) if keep is not None else None
    scores = _scores(kept, rank, tracer) if value is not None and mask is not None else None
    if scores is None or value is None or mask is None:
        return None
    return replace(scores, terms=(*scores.terms, Term(*mask, rank, dropped=value)))


def _negated(node: Node, tracer: Tracer) -> Node | None:
    """a, where node is `not a`."""
    for inner, other in tracer.either(node, "arith.xori"):
        if tracer.constant(other):
            return inner
    return None


def _capped(found: Node, rank: int, tracer: Tracer) -> _Scores | None:
    """`c * tanh(scores / c)`."""
    for inner, other in tracer.either(found, "arith.mulf"):
        cap, tanh = tracer.constant(other), tracer.head(inner)
        if cap is None or cap <= 0 or tanh.op != "math.tanh":
            continue
        scores = _scores(tanh.args[0], rank, tracer)
        # the quotient was read as a part of the scale
        if scores is not None and not scores.terms and scores.softcap is None:
            return replace(scores, scale=scores.scale * cap, softcap=cap)
    return None


def _scaled(found: Node, rank: int, tracer: Tracer) -> _Scores | None:
    left, right = found.args
    factor, inner = tracer.constant(right), left
    if factor is None and found.op == "arith.mulf":
        factor, inner = tracer.constant(left), right
    scores = _scores(inner, rank, tracer) if factor else None
    if scores is None or factor is None or scores.terms or scores.softcap is not None:
        return None
    return replace(scores, scale=scores.scale * factor if found.op == "arith.mulf" else scores.scale / factor)
