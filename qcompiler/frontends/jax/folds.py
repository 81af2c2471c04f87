"""Reductions of StableHLO: reduce, argmax and argmin, reduce_window, and the running folds that JAX writes with it.

reduce(x, init) applies add                   a reduction loop
reduce((x, iota), …) with a comparison        qc.argmax
reduce_window of the whole axis, padded by    qc.cumsum
  n - 1 before (or behind: from the end)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap

from qcompiler.frontends.common.scalars import cast
from qcompiler.frontends.jax.graph import Body, Node, Value
from qcompiler.frontends.jax.pointwise import in_order
from qcompiler.frontends.jax.scope import (
    FLOATS,
    Result,
    Scalars,
    Scope,
    V,
    combine,
    lowers,
    number,
    opmath,
    signed,
    splat,
)
from qcompiler.frontends.jax.shapes import padding_of
from qcompiler.frontends.jax.views import reversed_along
from qcompiler.ir import build, qc, types
from qcompiler.ir.build import Reduction
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType

_KINDS: dict[str, Reduction] = {
    "stablehlo.add": "add", "stablehlo.multiply": "mul", "stablehlo.maximum": "max", "stablehlo.minimum": "min",
    "stablehlo.or": "or", "stablehlo.and": "and",
}  # fmt: skip


def reduction_of(body: Body) -> Reduction | None:
    """The fold of a region with one op on its two arguments."""
    if len(body.nodes) != 1 or body.returned != body.nodes[0].results:
        return None
    node = body.nodes[0]
    return _KINDS.get(node.op) if set(node.operands) == set(body.arguments) else None


Flow = int | tuple[Any, ...]


def flow_of(body: Body) -> list[Flow]:
    """What a region returns, as nested terms `(op, comparison, *operands)`; numbers are its arguments.

    A constant, or a value from outside of the region, is `("other",)`, which no pattern has.
    """

    def term(value: Value) -> Flow:
        if value in body.arguments:
            return body.arguments.index(value)
        if value.owner is None or value.owner not in body.nodes:
            return ("other",)
        node = value.owner
        return (node.op.removeprefix("stablehlo."), node.attrs.get("comparison_direction"), *map(term, node.operands))

    return [term(value) for value in body.returned]


def _logaddexp() -> Flow:
    """max(a, b) + log1p(exp(-|a - b|)), and a + b where a - b is NaN."""
    difference: Flow = ("subtract", None, 0, 1)
    small = ("exponential", None, ("negate", None, ("abs", None, difference)))
    rest = ("add", None, ("maximum", None, 0, 1), ("log_plus_one", None, small))
    return ("select", None, ("compare", "NE", difference, difference), ("add", None, 0, 1), rest)


def is_logaddexp(body: Body) -> bool:
    """Whether a region is jnp.logaddexp of its two arguments, as JAX writes it."""
    return flow_of(body) == [_logaddexp()]


def _extreme(direction: str) -> list[Flow]:
    """JAX's region of argmax (GT) and argmin (LT) on the arguments a, i, b, j: values a and b, positions i and j."""
    wins = ("or", None, ("compare", direction, 0, 2), ("compare", "NE", 0, 0))
    ties = ("and", None, ("compare", "EQ", 0, 2), ("compare", "LT", 1, 3))
    return [("select", None, wins, 0, 2), ("select", None, ("or", None, wins, ties), 1, 3)]


def _extreme_of_torch_mlir(direction: str) -> list[Flow]:
    """The same as torch-mlir writes it, by GE and LE; it passes over NaN in some orders of the elements."""
    wins = ("compare", direction, 0, 2)
    place = ("select", None, ("compare", "EQ", 0, 2), ("minimum", None, 1, 3), ("select", None, wins, 1, 3))
    return [("select", None, wins, 0, 2), place]


def kind_of(node: Node, value: Value) -> Reduction:
    """The fold of the node's region. UnsupportedOperatorError for another one."""
    kind = reduction_of(node.regions[0])
    if kind is None:
        raise node.unsupported("a reduction by another function than add, mul, max, min, and, or")
    if value.dtype == "i1":
        return {"max": "or", "add": "or", "min": "and", "mul": "and"}.get(kind, kind)  # type: ignore[return-value]
    return kind


@lowers("stablehlo.reduce")
def _reduce(s: Scope, node: Node) -> Result:
    if len(node.results) == 2:
        return _arg_extreme(s, node)
    if len(node.results) > 1:
        raise node.unsupported(f"a reduction of {len(node.results)} tensors at once")
    value, init = node.operands
    kind = kind_of(node, value)
    compute = opmath(value.dtype)
    out = s.reduce(_ordered(s, value, kind), tuple(node.attrs["dimensions"]), kind, compute=compute)
    out = s.cast(_with_init(s, node, out, init, kind, compute), node.result.dtype)
    return in_order(s, out, value) if kind in _EXTREMES else out


_EXTREMES = ("max", "min")


def _ordered(s: Scope, value: Value, kind: str) -> V:
    """The tensor as a fold reads it; `in_order` gives results of an extreme back."""
    return in_order(s, s.value(value), value) if kind in _EXTREMES else s.value(value)


def _with_init(s: Scope, node: Node, out: V, init: Value, kind: Reduction, compute: DType) -> V:
    """The fold's start, which most often is its neutral element."""
    neutral = build.reduction_identity(kind, "i1" if init.dtype == "i1" else init.dtype)
    known = splat(init)
    if known == neutral or (init.dtype == "i1" and known is not None and int(known) == neutral):
        return out
    inputs = [out, _ordered(s, init, kind)]
    return s.pointwise(inputs, lambda m, a, b: combine(m, kind, a, b), compute=compute, result=compute)


def _arg_extreme(s: Scope, node: Node) -> Result:
    """argmax and argmin: the first extreme and its position."""
    value, places = node.operands[:2]
    axes, flow, owner = node.attrs["dimensions"], flow_of(node.regions[0]), places.owner
    counted = owner is not None and owner.op in ("stablehlo.iota", "stablehlo.dynamic_iota")
    along = counted and owner is not None and [owner.attrs["iota_dimension"]] == list(axes)
    largest = flow in (_extreme("GT"), _extreme_of_torch_mlir("GE"))
    least = flow in (_extreme("LT"), _extreme_of_torch_mlir("LE"))
    if not along or not (largest or least) or places.floating:
        raise node.unsupported(
            "a reduction of two tensors at once that is neither argmax nor argmin over one axis; use jnp.argmax or "
            "jnp.argmin, or a lax.reduce for each tensor"
        )
    x = s.value(value)
    index = argmax(s, in_order(s, x, value), axes[0], largest=largest)
    extreme = s.along(x, s.reshape(index, _with_axis(shape_of(index.type), axes[0])), axes[0])
    first = s.reshape(extreme, node.results[0].shape)
    return first, s.cast(index, node.results[1].dtype)


def _with_axis(shape: Sequence[Dim], axis: int) -> list[Dim]:
    return [*shape[:axis], 1, *shape[axis:]]


def argmax(s: Scope, x: V, axis: int, *, largest: bool) -> V:
    """i64; of the smallest, the argmax of the negated values (of ~x for integers, which has no overflow)."""
    dtype = tensor_dtype(x.type)
    if not largest:
        compute = opmath(dtype)

        def turned(m: Scalars, e: V) -> V:
            return m.neg(e) if m.floating else m.sub(m.const(-1), e)

        x = s.pointwise([x], turned, compute=compute, result=dtype)
    shape = shape_of(x.type)
    return s.insert(qc.ArgmaxOp(x, types.tensor([*shape[:axis], *shape[axis + 1 :]], "i64"), axis=axis))


# --- windows ---------------------------------------------------------------------------------------------------------


@lowers("stablehlo.reduce_window")
def _reduce_window(s: Scope, node: Node) -> Result:
    if len(node.results) > 1:
        raise node.unsupported("a reduction of several tensors at once over windows")
    if any(n != 1 for n in node.attrs.get("base_dilations") or ()):
        raise node.unsupported("windows over an image with gaps (base_dilation)")
    value, init = node.operands
    if 0 in node.result.shape:
        return s.full(0, node.result.shape, node.result.dtype)
    fold = "logaddexp" if is_logaddexp(node.regions[0]) else kind_of(node, value)
    neutral = _is_neutral(init, fold)
    sides = itertools.chain(*padding_of(node, value.rank))
    padded = any(not isinstance(size, int) or size > 0 for size in sides)  # a negative one cuts
    if not neutral and (fold == "logaddexp" or (fold not in _IDEMPOTENT and padded)):
        raise node.unsupported(
            "padded windows with another start than the fold's neutral element, which the padding has, too, in "
            "StableHLO, and not in XLA: start with the neutral element, and fold the start into the result"
        )
    running = _running(s, node, value, fold) if neutral else None
    if running is not None:
        return running
    kind, compute = kind_of(node, value), opmath(value.dtype)
    x = _ordered(s, value, kind)
    x = s.cast(x, compute) if value.dtype == "ui8" else x  # its extremes are none of a signed byte's
    out = _windows(s, node, x, kind, compute)
    out = s.cast(out if neutral else _with_init(s, node, out, init, kind, compute), node.result.dtype)
    return in_order(s, out, value) if kind in _EXTREMES else out


_IDEMPOTENT = ("max", "min", "or", "and")
"""Folds to which it makes no difference that the padding of a window has the start as well."""


def _is_neutral(init: Value, kind: str) -> bool:
    """Whether the fold's start changes nothing."""
    while init.known is None and init.owner is not None and init.owner.op == "stablehlo.broadcast_in_dim":
        init = init.owner.operands[0]
    if init.known is None or init.known.size != 1 or init.known.dtype == object:
        return False
    neutral = -math.inf if kind == "logaddexp" else build.reduction_identity(kind, init.dtype)  # type: ignore[arg-type]
    if kind in _EXTREMES and init.unsigned:
        neutral = 0 if kind == "max" else 255 if init.dtype == "ui8" else -1  # wider ones as signed numbers
    return number(signed(init.known).reshape(-1)[0]) == neutral


def _running(s: Scope, node: Node, value: Value, kind: str) -> V | None:
    """A window of the whole axis, padded on one side, is a running fold."""
    a = node.attrs
    wide = [i for i, n in enumerate(a["window_dimensions"]) if n != 1]
    sides = padding_of(node, value.rank)
    if len(wide) != 1 or kind in ("or", "and"):
        return None
    axis, size = wide[0], a["window_dimensions"][wide[0]]
    ones = [1] * value.rank
    plain = (a.get("window_strides") or ones) == ones and (a.get("window_dilations") or ones) == ones
    others = all(pair == (0, 0) for i, pair in enumerate(sides) if i != axis)
    rest = (dim(size) - 1).to_dim()
    if not plain or not others or size != value.shape[axis] or sides[axis] not in ((0, rest), (rest, 0)):
        return None
    backwards = sides[axis][1] != 0
    x = s.cast(_ordered(s, value, kind), opmath(value.dtype))
    x = reversed_along(s, x, axis) if backwards else x
    out = s.insert(qc.CumsumOp(x, x.type, axis=axis, reduce=kind))
    out = s.cast(reversed_along(s, out, axis) if backwards else out, node.result.dtype)
    return in_order(s, out, value) if kind in _EXTREMES else out


def _windows(s: Scope, node: Node, x: V, kind: Reduction, compute: DType) -> V:
    """Loops over the result and the window; a small tensor, which no iteration reads, gives the window's size."""
    a, rank = node.attrs, len(shape_of(x.type))
    ones = [1] * rank
    window, strides = list(a["window_dimensions"]), list(a.get("window_strides") or ones)
    if not all(isinstance(n, int) for n in (*window, *itertools.chain(*padding_of(node, rank)))):
        raise node.unsupported("windows of a symbolic size; a running fold of a whole axis is one (jnp.cumsum)")
    dilations = list(a.get("window_dilations") or ones)
    x = _padded(s, node, x, kind, [(n - 1) * d + 1 for n, d in zip(window, dilations, strict=True)], strides)
    wide = [i for i, n in enumerate(window) if n > 1]
    out = node.result.shape
    places: list[AffineExpr] = []
    for i in range(rank):
        outer: AffineExpr = AffineDimExpr(i) if strides[i] == 1 else AffineDimExpr(i) * strides[i]
        if i in wide:
            step: AffineExpr = AffineDimExpr(rank + wide.index(i))
            outer = outer + (step if dilations[i] == 1 else step * dilations[i])
        places.append(outer)
    loops = rank + len(wide)
    sized = s.full(0, [window[i] for i in wide], "f32")
    maps = [
        AffineMap(loops, 0, tuple(places)),
        AffineMap(loops, 0, tuple(AffineDimExpr(rank + i) for i in range(len(wide)))),
        AffineMap(loops, 0, tuple(AffineDimExpr(i) for i in range(rank))),
    ]
    init = s.full(build.reduction_identity(kind, compute), out, compute)

    def body(inner: Builder, elements: Sequence[SSAValue]) -> SSAValue:
        return combine(Scalars(inner, compute), kind, cast(inner, elements[0], compute), elements[-1])

    iterators: list[Any] = ["parallel"] * rank + ["reduction"] * len(wide)
    return build.generic(s.builder, [x, sized], maps, out, compute, iterators, body, init=init)


def _padded(s: Scope, node: Node, x: V, kind: Reduction, reach: Sequence[int], strides: Sequence[int]) -> V:
    """The neutral element around x, cut to the part that windows read."""
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    padding = [(int(low), int(high)) for low, high in padding_of(node, len(shape))]
    if any(n for pair in padding for n in pair):
        grown = [(max(low, 0), max(high, 0)) for low, high in padding]
        if any(n for pair in grown for n in pair):
            wide = [(dim(n) + low + high).to_dim() for n, (low, high) in zip(shape, grown, strict=True)]
            filled = s.full(build.reduction_identity(kind, dtype), wide, dtype)
            x = build.insert_slice(s.builder, x, filled, [low for low, _ in grown])
        kept = [(dim(n) + low + high).to_dim() for n, (low, high) in zip(shape, padding, strict=True)]
        if kept != list(shape_of(x.type)):  # negative padding cuts
            x = build.extract_slice(s.builder, x, [max(-low, 0) for low, _ in padding], kept)
    for axis, (size, step, out) in enumerate(zip(reach, strides, node.result.shape, strict=True)):
        needed = (dim(out) - 1) * step + size
        if needed != dim(shape_of(x.type)[axis]):
            x = s.slice(x, axis, 0, needed.to_dim())
    return x


__all__ = ["FLOATS", "argmax", "kind_of", "reduction_of"]
