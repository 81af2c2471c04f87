"""Recognises attention: `softmax(q kᵀ * scale + mask) v`, written as two batched matmuls around a softmax.

Reshapes may join and split batch and heads anywhere (idioms/leading.py). The scale may be a product or a quotient, of
the scores, of q or of k. The scaled scores may be soft-capped (`c * tanh(x / c)`). Casts around the softmax are
dropped, since `qc.attention` keeps scores in fp32. The mask is what is added to the scores, or what replaces them where
a condition is false (idioms/terms.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.idioms.leading import Lead, common_factors, runs
from qcompiler.passes.idioms.terms import Masks, Scores, Term
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.views import views
from qcompiler.passes.views.trace import Node, Tracer
from qcompiler.plan.dims import Dim

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class _Product:
    """The scores: `matmul * scale`, soft-capped, then the terms in order."""

    matmul: qc.BatchMatmulOp
    scale: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class NotRaised:
    """Why a softmax between two matmuls did not become an attention."""

    why: str


def raise_attention(op: qc.BatchMatmulOp, tracer: Tracer, masks: Masks) -> SSAValue | NotRaised | None:
    """The attention that computes a matmul's result, inserted before the matmul. None if there is no softmax between
    two matmuls."""
    softmax = loops.producer(_under_casts_and_reshapes(op.a))
    if not isinstance(softmax, qc.SoftmaxOp):
        return None
    shape = shape_of(softmax.result.type)
    if len(shape) < 3 or softmax.axis.value.data != len(shape) - 1 or shape[-2:] != shape_of(op.a.type)[-2:]:
        return None
    found = _product(tracer.element(softmax.x), shape, tracer)
    if found is None or shape_of(found.matmul.result.type)[-2:] != shape[-2:]:
        return None
    dtypes = {tensor_dtype(v.type) for v in (found.matmul.a, found.matmul.b, op.b, op.result)}
    if len(dtypes) != 1:
        return NotRaised(f"its operands have different types: {', '.join(sorted(dtypes))}")
    return _build(op, found, shape, tracer, masks)


def lookalike(op: qc.BatchMatmulOp, tracer: Tracer) -> str | None:
    """Why a matmul that reads a softmax is no attention, if `raise_attention` finds none. None if it reads no
    softmax."""
    softmax = loops.producer(_under_casts_and_reshapes(op.a))
    if not isinstance(softmax, qc.SoftmaxOp):
        return None
    shape = shape_of(softmax.result.type)
    if len(shape) < 3 or softmax.axis.value.data != len(shape) - 1:
        return "the softmax is not along the last of at least three dims"
    if shape[-2:] != shape_of(op.a.type)[-2:]:
        return "queries and keys are not the last two dims of both"
    return "its scores are not a matmul that is scaled, capped and masked"


def _build(op: qc.BatchMatmulOp, found: _Product, shape: Shape, tracer: Tracer, masks: Masks) -> SSAValue | NotRaised:
    leads = [shape[:-2], shape_of(found.matmul.result.type)[:-2], *(term.lead for term in found.terms)]
    known = _factors(leads, _unjoined(found.matmul.a))
    if known is None:
        return NotRaised(f"its scores are seen with the leading dims {' and '.join(map(str, dict.fromkeys(leads)))}")
    factors, natural = known
    scores = Scores(factors, *shape[-2:])
    split = masks.split(found.terms, scores, natural)
    if split is None:
        return NotRaised(f"the number of heads is not fixed in the leading dims {factors}")
    batch, heads, queries, keys = scores.attention(split)
    mask = masks.build(op, found.terms, scores, split) if found.terms else None
    if mask is None and found.terms:
        return NotRaised("what is done to the scores before the softmax is not an attention's mask")
    builder = build.with_path(InsertPoint.before(op), path_of(op))
    depth, width = shape_of(found.matmul.a.type)[-1], shape_of(op.b.type)[-1]
    plain_q, factor_q = _unscaled(builder, found.matmul.a, tracer)
    plain_k, factor_k = _unscaled(builder, found.matmul.b, tracer)
    q = build.reshape(builder, plain_q, (batch, heads, queries, depth))
    turned = len(shape_of(plain_k.type))
    k = build.transpose(builder, plain_k, [*range(turned - 2), turned - 1, turned - 2])
    k = build.reshape(builder, k, (batch, heads, keys, depth))
    v = build.reshape(builder, op.b, (batch, heads, keys, width))
    type_ = tensor_type((batch, heads, queries, width), tensor_dtype(op.result.type))
    made = qc.AttentionOp(q, k, v, mask, type_, scale=found.scale * factor_q * factor_k, softcap=found.softcap)
    builder.insert(made)
    return build.reshape(builder, made.result, shape_of(op.result.type))


def _factors(leads: Sequence[Lead], operand: Lead) -> tuple[Lead, int] | None:
    """The factors of all leading dims, and how many of them come before the heads in the model.

    `operand` has the leading dims of q before a reshape joined them. They answer the second question if the scores have
    only joined dims.
    """
    for known in ([*leads, operand], leads):
        factors = common_factors(known)
        if factors is not None:
            parted = next((lead for lead in known if len(lead) > 1), None)
            return factors, len(factors) if parted is None else runs(parted, factors)[-1].start
    return None


def _unjoined(value: SSAValue) -> Lead:
    """All dims but the last two, as they were before a view joined them."""
    shape, source = shape_of(value.type), shape_of(views.unreshaped(value).type)
    return source[:-2] if source[-2:] == shape[-2:] else shape[:-2]


def _unscaled(builder: Builder, value: SSAValue, tracer: Tracer) -> tuple[SSAValue, float]:
    """(x, factor) if the value is x * factor and x is available, as a view with the value's dims."""
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
    """The value under float casts and reshapes of the batch dims."""
    while True:
        op = loops.producer(value)
        if isinstance(op, views.Reshape):
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


def _product(node: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    """Reads scale, cap and terms from the scores, outermost first. `shape` is the shape of the scores at this point."""
    for tensor_, index in tracer.aliases(node):
        if not _is_whole(tensor_, index, shape):
            continue
        inner = _under_casts_and_reshapes(tensor_)
        matmul = loops.producer(inner)
        if isinstance(matmul, qc.BatchMatmulOp):
            return _Product(matmul)
        if inner is not tensor_ and shape_of(inner.type)[-2:] == shape[-2:]:
            return _product(tracer.element(inner), shape_of(inner.type), tracer)
    found = tracer.head(node)
    if found.op in ("arith.mulf", "arith.divf"):
        return _capped(found, shape, tracer) or _scaled(found, shape, tracer)
    if found.op == "arith.addf":
        for one, other in tracer.either(found, "arith.addf"):
            scores = _product(one, shape, tracer)
            added = next(tracer.aliases(other), None)
            if scores is not None and added is not None:
                return replace(scores, terms=(*scores.terms, Term(*added, shape[:-2])))
    if found.op == "arith.select":
        keep, kept, dropped = found.args
        negated = _negated(keep, tracer)
        return _selected(keep, kept, dropped, shape, tracer) or _selected(negated, dropped, kept, shape, tracer)
    return None


def _is_whole(value: SSAValue, index: Index, shape: Shape) -> bool:
    """Whether the index reads all elements of a tensor in their order. Dims of size 1 do not matter."""
    read = [(e, size) for e, size in zip(index, shape_of(value.type), strict=True) if size != 1]
    return read == [(loops.dim_expr(n), size) for n, size in enumerate(shape) if size != 1]


def _selected(keep: Node | None, kept: Node, dropped: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    """Matches the scores where `keep` is true, and a number elsewhere."""
    value, mask = tracer.constant(dropped), next(tracer.aliases(keep), None) if keep is not None else None
    scores = _product(kept, shape, tracer) if value is not None and mask is not None else None
    if scores is None or value is None or mask is None:
        return None
    return replace(scores, terms=(*scores.terms, Term(*mask, shape[:-2], dropped=value)))


def _negated(node: Node, tracer: Tracer) -> Node | None:
    """a, if the node is `not a`."""
    for inner, other in tracer.either(node, "arith.xori"):
        if tracer.constant(other):
            return inner
    return None


def _capped(found: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    """Matches `c * tanh(scores / c)`."""
    for inner, other in tracer.either(found, "arith.mulf"):
        cap, tanh = tracer.constant(other), tracer.head(inner)
        if cap is None or cap <= 0 or tanh.op != "math.tanh":
            continue
        scores = _product(tanh.args[0], shape, tracer)
        # the quotient was already read as a part of the scale
        if scores is not None and not scores.terms and scores.softcap is None:
            return replace(scores, scale=scores.scale * cap, softcap=cap)
    return None


def _scaled(found: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    left, right = found.args
    factor, inner = tracer.constant(right), left
    if factor is None and found.op == "arith.mulf":
        factor, inner = tracer.constant(left), right
    scores = _product(inner, shape, tracer) if factor else None
    if scores is None or factor is None or scores.terms or scores.softcap is not None:
        return None
    return replace(scores, scale=scores.scale * factor if found.op == "arith.mulf" else scores.scale / factor)
