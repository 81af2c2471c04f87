"""Recognises attention: `softmax(q kᵀ * scale + mask) v`, written as two batched matmuls around a softmax.

Views may reorder, join and split dims anywhere between the two matmuls, and each matmul may have its operands in either
order, as an einsum does; attention_dims.py says which dim is what. The scale may be a product or a quotient, of the
scores, of q or of k. The scaled scores may be soft-capped (`c * tanh(x / c)`). Casts around the softmax are dropped,
and so is the widening of q and k in front of the scores, since `qc.attention` keeps scores in fp32. The mask is what is
added to the scores, or what replaces them where a condition is false (idioms/terms.py). A softmax over the scores and
one more column, whose weight is cut off again, is attention with sinks, the numbers of that column:

    softmax(concat(scores, sinks))[..., :-1] v
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.idioms.attention_dims import AttentionDims, Frame, Misfit, dims_of
from qcompiler.passes.idioms.attention_operands import unwidened
from qcompiler.passes.idioms.terms import Masks, Term
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import can_be_extra
from qcompiler.passes.views import factors, views
from qcompiler.passes.views.trace import Node, Tracer
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

Shape = tuple[Dim, ...]
_Made = TypeVar("_Made", bound=Operation)
_WIDE: DType = "f32"


@dataclass(frozen=True)
class _Product:
    """The scores: `matmul * scale`, soft-capped, then the terms in order. `frames` lead down to the matmul."""

    matmul: qc.BatchMatmulOp
    frames: tuple[Frame, ...]
    scale: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class _Weights:
    """The softmax of the scores and, where there are some, of sinks behind them. `frames` lead down to it; they have
    the dims of the scores."""

    softmax: qc.SoftmaxOp
    frames: tuple[Frame, ...]
    scores: SSAValue
    sinks: SSAValue | None = None


@dataclass(frozen=True)
class NotRaised:
    """Why a softmax between two matmuls did not become an attention."""

    why: str


def raise_attention(op: qc.BatchMatmulOp, tracer: Tracer, masks: Masks) -> SSAValue | NotRaised | None:
    """The attention that computes a matmul's result, inserted before the matmul. None if it reads no softmax."""
    for position in range(2):
        weights = _weights(op.operands[position], tracer)
        if weights is not None:
            found = _product(tracer.element(weights.scores), shape_of(weights.scores.type), tracer)
            if found is None:
                return NotRaised("its scores are not a matmul that is scaled, capped and masked")
            axis = weights.softmax.axis.value.data
            sinks = None if weights.sinks is None else _sinks(weights.sinks, len(found.frames), tracer)
            known = dims_of(op, position, weights.frames, axis, found.matmul, found.frames, found.terms, sinks)
            return NotRaised(known.why) if isinstance(known, Misfit) else _build(op, found, known, tracer, masks)
    return None


def _build(
    op: qc.BatchMatmulOp, found: _Product, dims: AttentionDims, tracer: Tracer, masks: Masks
) -> SSAValue | NotRaised:
    dtypes = {tensor_dtype(v.type) for v in (dims.q.value, dims.k.value, dims.v.value, op.result)}
    if len(dtypes - {_WIDE}) > 1:
        return NotRaised(f"its operands have different types: {', '.join(sorted(dtypes))}")
    lone = () if dims.sinks is None else (dims.sinks,)
    split = masks.split((*dims.terms, *lone), dims.scores, dims.natural)
    if split is None:
        return NotRaised(f"the number of heads is not fixed in the leading dims {dims.scores.leading}")
    builder = build.with_path(InsertPoint.before(op), path_of(op))
    q, factor_q = _unscaled(builder, dims.q.value, tracer)
    k, factor_k = _unscaled(builder, dims.k.value, tracer)
    dtype = tensor_dtype(op.result.type)
    typed = [_as(dtype, value, builder) for value in (q, k, dims.v.value)]
    if any(value is None for value in typed):
        return NotRaised(f"its result is {dtype}, and not all of its operands are, or are widened from that")
    q, k, v = (value for value in typed if value is not None)
    has_sinks = dims.sinks is not None
    mask = masks.build(op, dims.terms, dims.scores, split, has_sinks) if dims.terms else None
    if mask is None and dims.terms:
        return NotRaised("what is done to the scores before the softmax is not an attention's mask")
    sinks = masks.sinks(op, dims.sinks, dims.scores, split) if dims.sinks is not None else None
    if sinks is None and dims.sinks is not None:
        return NotRaised("what is beside the scores in the softmax is not one number for each query, head or sequence")
    batch, heads = dims.shared[:split], dims.shared[split:]
    q = factors.arranged(builder, q, dims.q.dims, [batch, [*heads, *dims.groups], dims.queries, [dims.depth]])
    k = factors.arranged(builder, k, dims.k.dims, [batch, heads, dims.keys, [dims.depth]])
    v = factors.arranged(builder, v, dims.v.dims, [batch, heads, dims.keys, [dims.width]])
    type_ = tensor_type((*shape_of(q.type)[:3], dims.width.size), dtype)
    scale = found.scale * factor_q * factor_k
    made = qc.AttentionOp(q, k, v, mask, type_, scale=scale, softcap=found.softcap, sinks=sinks)
    builder.insert(made)
    own = [batch, [*heads, *dims.groups], dims.queries, [dims.width]]
    return build.reshape(builder, factors.arranged(builder, made.result, own, dims.result), shape_of(op.result.type))


def _as(dtype: DType, value: SSAValue, builder: Builder) -> SSAValue | None:
    """An operand in the type of the result: widened, or what it is widened from. None if neither is possible."""
    if tensor_dtype(value.type) == dtype:
        return value
    if dtype != _WIDE:
        return unwidened(value, builder)
    wide = ELEMENT_TYPES[_WIDE]
    return build.pointwise(
        builder, [value], shape_of(value.type), _WIDE, lambda inner, x: inner.insert(arith.ExtFOp(x[0], wide))
    )


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


# --- the weights and the scores --------------------------------------------------------------------------------------


def _weights(value: SSAValue, tracer: Tracer) -> _Weights | None:
    """The softmax that a matmul's operand is, behind casts and views, and the frames that lead down to it."""
    frames: list[Frame] = []
    while True:
        reshape = None
        for each, order in _whole(tracer.element(value), shape_of(value.type), tracer):
            made, frame = loops.producer(each), Frame(shape_of(each.type), order)
            if isinstance(made, qc.SoftmaxOp):
                return _Weights(made, (*frames, frame), made.x)
            beside = _beside_sinks(made, tracer) if isinstance(made, tensor.ExtractSliceOp) else None
            if beside is not None:
                return _Weights(beside[0], (*frames, frame), *beside[1:])
            reshape = (made.src, order) if isinstance(made, views.Reshape) else None
        if reshape is None:
            return None
        value = reshape[0]
        frames.append(Frame(shape_of(value.type), reshape[1]))


def _beside_sinks(weights: tensor.ExtractSliceOp, tracer: Tracer) -> tuple[qc.SoftmaxOp, SSAValue, SSAValue] | None:
    """The softmax over scores and one column behind them, the scores and the column, if a slice has the weights of the
    scores."""
    softmax = _made_by(weights.source, qc.SoftmaxOp, tracer)
    joined = None if softmax is None else _made_by(softmax.x, tensor.ConcatOp, tracer)
    if softmax is None or joined is None or len(joined.inputs) != 2:
        return None
    scores, column = joined.inputs
    axis, whole = softmax.axis.value.data, shape_of(scores.type)
    is_beside = joined.dim.value.data == axis and shape_of(column.type)[axis] == 1
    cut = ((0,) * len(whole), whole, (1,) * len(whole))
    return (softmax, scores, column) if is_beside and views.slice_of(weights) == cut else None


def _made_by(value: SSAValue, kind: type[_Made], tracer: Tracer) -> _Made | None:
    """The op of this kind that has the value as its result, up to float casts."""
    own = loops.own_index(shape_of(value.type))
    for each, index in tracer.aliases(tracer.element(value)):
        made = loops.producer(each)
        if isinstance(made, kind):
            return made if index == own and shape_of(each.type) == shape_of(value.type) else None
    return None


def _sinks(value: SSAValue, level: int, tracer: Tracer) -> Term:
    """The numbers beside the scores as a term of these, with as few dims as they vary along."""
    tensor_, index = value, loops.own_index(shape_of(value.type))
    for each, at in tracer.aliases(tracer.element(value)):
        if not can_be_extra(each, at):
            break
        tensor_, index = each, at
    return Term(tensor_, index, tracer.varies(tracer.element(value)), level)


def _whole(node: Node, shape: Shape, tracer: Tracer) -> list[tuple[SSAValue, tuple[int, ...]]]:
    """The tensors that hold this element and no others, outermost first, with their dims among those of `shape`."""
    seen = [(v, factors.listing(index, shape_of(v.type), shape)) for v, index in tracer.aliases(node)]
    return [(value, order) for value, order in seen if order is not None]


def _product(node: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    """Reads scale, cap and terms from the scores, outermost first. `shape` is the shape of the scores at this point."""
    whole = _whole(node, shape, tracer)
    for value, order in whole:
        matmul = loops.producer(value)
        if isinstance(matmul, qc.BatchMatmulOp):
            return _Product(matmul, (Frame(shape_of(value.type), order),))
    reshape = loops.producer(whole[-1][0]) if whole else None
    if isinstance(reshape, views.Reshape):  # the last alias: nothing looks through this one
        inner = shape_of(reshape.src.type)
        below = _product(tracer.element(reshape.src), inner, tracer)
        return None if below is None else replace(below, frames=(Frame(inner, whole[-1][1]), *below.frames))
    found = tracer.head(node)
    if found.op in ("arith.mulf", "arith.divf"):
        return _capped(found, shape, tracer) or _scaled(found, shape, tracer)
    if found.op == "arith.addf":
        for one, other in tracer.either(found, "arith.addf"):
            scores = _product(one, shape, tracer)
            added = next(tracer.aliases(other), None)
            if scores is not None and added is not None:
                term = Term(*added, tracer.varies(other), len(scores.frames))
                return replace(scores, terms=(*scores.terms, term))
    if found.op == "arith.select":
        keep, kept, dropped = found.args
        negated = _negated(keep, tracer)
        return _selected(keep, kept, dropped, shape, tracer) or _selected(negated, dropped, kept, shape, tracer)
    return None


def _selected(keep: Node | None, kept: Node, dropped: Node, shape: Shape, tracer: Tracer) -> _Product | None:
    """Matches the scores where `keep` is true, and a number elsewhere."""
    value, mask = tracer.constant(dropped), next(tracer.aliases(keep), None) if keep is not None else None
    scores = _product(kept, shape, tracer) if value is not None and mask is not None else None
    if scores is None or value is None or mask is None or keep is None:
        return None
    term = Term(*mask, tracer.varies(keep), len(scores.frames), dropped=value)
    return replace(scores, terms=(*scores.terms, term))


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
