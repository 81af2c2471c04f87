"""Reductions of StableHLO: reduce, argmax and argmin, reduce_window, and the running folds that JAX writes with it.

reduce(x, init) applies add                   a reduction loop
reduce((x, iota), …) with a comparison        qc.argmax
reduce_window of the whole axis, padded by    qc.cumsum
  n - 1 before (or behind: from the end)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap

from qcompiler.frontends.common.scalars import cast
from qcompiler.frontends.jax.graph import Body, Node, Value
from qcompiler.frontends.jax.pointwise import is_wide_unsigned
from qcompiler.frontends.jax.scope import FLOATS, Result, Scalars, Scope, V, combine, lowers, opmath, splat
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


_LOGADDEXP = ["abs", "add", "add", "compare", "exponential", "log_plus_one", "maximum", "negate", "select", "subtract"]


def is_logaddexp(body: Body) -> bool:
    """Whether a region is jnp.logaddexp of its two arguments, by the ops that JAX writes it with."""
    return sorted(node.op.removeprefix("stablehlo.") for node in body.nodes) == _LOGADDEXP


def kind_of(node: Node, value: Value) -> Reduction:
    """The fold of the node's region. UnsupportedOperatorError for another one, or for one that needs unsigned order."""
    kind = reduction_of(node.regions[0])
    if kind is None:
        raise node.unsupported("a reduction by another function than add, mul, max, min, and, or")
    if is_wide_unsigned(value) and kind in ("max", "min"):
        raise node.unsupported("the maximum or minimum of unsigned integers; convert to int32 or int64")
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
    out = s.reduce(s.value(value), tuple(node.attrs["dimensions"]), kind, compute=compute)
    return s.cast(_with_init(s, node, out, init, kind, compute), node.result.dtype)


def _with_init(s: Scope, node: Node, out: V, init: Value, kind: Reduction, compute: DType) -> V:
    """The fold's start, which most often is its neutral element."""
    neutral = build.reduction_identity(kind, "i1" if init.dtype == "i1" else init.dtype)
    known = splat(init)
    if known == neutral or (init.dtype == "i1" and known is not None and int(known) == neutral):
        return out
    inputs = [out, s.value(init)]
    return s.pointwise(inputs, lambda m, a, b: combine(m, kind, a, b), compute=compute, result=compute)


def _arg_extreme(s: Scope, node: Node) -> Result:
    """argmax and argmin: the first extreme and its position."""
    value, places = node.operands[:2]
    axes = node.attrs["dimensions"]
    counted = places.owner is not None and places.owner.op in ("stablehlo.iota", "stablehlo.dynamic_iota")
    compared = {n.attrs["comparison_direction"] for n in node.regions[0].nodes if n.op == "stablehlo.compare"}
    order = compared & {"GT", "LT"}
    if len(axes) != 1 or not counted or places.floating or not order or is_wide_unsigned(value):
        raise node.unsupported("a reduction of two tensors that is neither argmax nor argmin over one axis")
    largest = _prefers_larger(node.regions[0])
    x = s.value(value)
    index = argmax(s, x, axes[0], largest=largest)
    extreme = s.along(x, s.reshape(index, _with_axis(shape_of(index.type), axes[0])), axes[0])
    first = s.reshape(extreme, node.results[0].shape)
    return first, s.cast(index, node.results[1].dtype)


def _prefers_larger(body: Body) -> bool:
    """Whether the first value of a region is kept if it is larger: the comparison of values that is no tie."""
    for node in body.nodes:
        if node.op == "stablehlo.compare" and node.operands == [body.arguments[0], body.arguments[2]]:
            if node.attrs["comparison_direction"] in ("GT", "LT"):
                return bool(node.attrs["comparison_direction"] == "GT")
            if node.attrs["comparison_direction"] in ("GE", "LE"):
                return bool(node.attrs["comparison_direction"] == "GE")
    return True


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
    fold = "logaddexp" if is_logaddexp(node.regions[0]) else kind_of(node, value)
    running = _running(s, node, value, fold)
    if running is not None:
        return running
    kind = kind_of(node, value)
    neutral = build.reduction_identity(kind, value.dtype)
    if splat(init) != neutral:
        raise node.unsupported("windows with another start than the fold's neutral element")
    return s.cast(_windows(s, node, s.value(value), kind, opmath(value.dtype)), node.result.dtype)


def _running(s: Scope, node: Node, value: Value, kind: str) -> V | None:
    """A window of the whole axis, padded on one side, is a running fold."""
    a = node.attrs
    wide = [i for i, n in enumerate(a["window_dimensions"]) if n != 1]
    padding = a.get("padding")
    if len(wide) != 1 or padding is None or kind in ("or", "and"):
        return None
    axis, size = wide[0], a["window_dimensions"][wide[0]]
    ones = [1] * value.rank
    plain = (a.get("window_strides") or ones) == ones and (a.get("window_dilations") or ones) == ones
    sides = [[int(n) for n in pair] for pair in padding]
    others = all(pair == [0, 0] for i, pair in enumerate(sides) if i != axis)
    if not plain or not others or size != value.shape[axis] or sorted(sides[axis]) != [0, size - 1]:
        return None
    backwards = sides[axis][1] > 0
    x = s.cast(s.value(value), opmath(value.dtype))
    x = reversed_along(s, x, axis) if backwards else x
    out = s.insert(qc.CumsumOp(x, x.type, axis=axis, reduce=kind))
    return s.cast(reversed_along(s, out, axis) if backwards else out, node.result.dtype)


def _windows(s: Scope, node: Node, x: V, kind: Reduction, compute: DType) -> V:
    """Loops over the result and the window; a small tensor, which no iteration reads, gives the window's size."""
    a, rank = node.attrs, len(shape_of(x.type))
    ones = [1] * rank
    window, strides = list(a["window_dimensions"]), list(a.get("window_strides") or ones)
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
    given = node.attrs.get("padding")
    padding = [[int(n) for n in pair] for pair in given] if given is not None else [[0, 0]] * len(shape)
    if any(n for pair in padding for n in pair):
        wide = [(dim(n) + low + high).to_dim() for n, (low, high) in zip(shape, padding, strict=True)]
        filled = s.full(build.reduction_identity(kind, dtype), wide, dtype)
        x = build.insert_slice(s.builder, x, filled, [low for low, _ in padding])
    for axis, (size, step, out) in enumerate(zip(reach, strides, node.result.shape, strict=True)):
        needed = (dim(out) - 1) * step + size
        if needed != dim(shape_of(x.type)[axis]):
            x = s.slice(x, axis, 0, needed.to_dim())
    return x


__all__ = ["FLOATS", "argmax", "kind_of", "reduction_of"]
