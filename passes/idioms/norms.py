"""Recognises RMS norm and layer norm in their decomposed forms.

    rms    x * rsqrt(mean(x * x) + eps) [* weight]
    layer  (x - mean(x)) * rsqrt(mean((x - mean(x))²) + eps) [* weight [+ bias]]

The weight may be multiplied with the root first, and the variance may be mean(x * x) - mean(x)², as in Flax.
A division by the square root, a power of two instead of the product, and casts around the statistics are accepted. A
norm of a transposed tensor (heads are transposed before their norm) becomes the norm of the tensor, then a transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.idioms.raised import Raised, insert
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.views.trace import Node, Tracer

_Place = tuple[SSAValue, tuple[int, ...]]
"""A tensor, and for each of its dims the corresponding dim of the result."""


@dataclass(frozen=True)
class _Norm:
    """`x` has the elements before normalisation. Its dim n is dim `order[n]` of the result."""

    kind: str
    x: SSAValue
    order: tuple[int, ...]
    eps: float


def match(value: SSAValue, tracer: Tracer) -> Raised | None:
    """The norm that computes `value`; None if it is none."""
    shape = shape_of(value.type)
    if not shape:
        return None
    root = tracer.element(value)
    for scaled, bias in _with_row(root, "arith.addf", value, tracer):
        for parts, weight in _scaled_parts(scaled, value, tracer):
            found = _match_normed(parts, value, tracer)
            if found is None or (bias is not None and found.kind == "rms"):
                continue
            if found.kind == "rms":
                return insert(value, qc.RmsNormOp(found.x, weight, found.x.type, eps=found.eps), found.order)
            return insert(value, qc.LayerNormOp(found.x, weight, bias, found.x.type, eps=found.eps), found.order)
    return None


def lookalike(value: SSAValue, tracer: Tracer) -> str | None:
    """Why a tensor divided by the root of a sum is no norm: the first condition that fails. None if the value has
    another form."""
    if not shape_of(value.type):
        return None
    for scaled, _ in _with_row(tracer.element(value), "arith.addf", value, tracer):
        for normed, _ in _with_row(scaled, "arith.mulf", value, tracer):
            for centred, variance in _over_root(normed, tracer):
                why = _first_failure(centred, variance, value, tracer)
                if why is not None:
                    return why
    return None


def _first_failure(centred: Node, variance: Node, value: SSAValue, tracer: Tracer) -> str | None:
    """The first condition of `_match_normed` that fails."""
    shifted = next((a for a, b in tracer.either(variance, "arith.addf") if tracer.constant(b) is not None), None)
    if not _has_sum(variance if shifted is None else shifted, tracer):
        return None
    if shifted is None:
        return "no constant is added to the mean under the root"
    square = _mean(shifted, value, tracer)
    if square is None:
        return "what stands under the root is not the mean over the last dim, of a fixed size"
    base = _square_root_of(square[0], tracer)
    if base is None:
        return "the mean under the root is not of squares"
    if _centred(centred, base, square[1], value, tracer) or _same_tensor(centred, base, square[1], value, tracer):
        return "its weight or bias is not a row of the last dim"
    return "what is scaled is not the tensor whose squares are averaged, in the result's type and order"


def _has_sum(node: Node, tracer: Tracer, depth: int = 3) -> bool:
    """Whether the node is a reduction by addition, under at most `depth` products, quotients and sums."""
    found = tracer.head(node)
    if found.op == "sum" or (found.tensor is not None and loops.is_reduction(found.tensor)):
        return True
    inner = found.args if found.op in ("arith.mulf", "arith.divf", "arith.addf") else ()
    return depth > 0 and any(_has_sum(each, tracer, depth - 1) for each in inner)


def _with_row(node: Node, op: str, value: SSAValue, tracer: Tracer) -> Iterator[tuple[Node, SSAValue | None]]:
    """`(rest, row)` if the node is `rest op row` and the row depends on the last dim only; then also `(node, None)`."""
    last = len(shape_of(value.type)) - 1
    for rest, other in tracer.either(node, op):
        for tensor, index in tracer.aliases(other):
            fits = tensor_dtype(tensor.type) in (tensor_dtype(value.type), "f32")
            if index == (loops.dim_expr(last),) and shape_of(tensor.type) == shape_of(value.type)[-1:] and fits:
                yield rest, tensor
                break
    yield node, None


def _scaled_parts(
    node: Node, value: SSAValue, tracer: Tracer
) -> Iterator[tuple[list[tuple[Node, Node]], SSAValue | None]]:
    """`([(a, v), …], weight)` for each way to read the node as a / sqrt(v) * weight, or as a * (rsqrt(v) * weight)."""
    for normed, weight in _with_row(node, "arith.mulf", value, tracer):
        yield list(_over_root(normed, tracer)), weight
    for a, factor in tracer.either(node, "arith.mulf"):
        for root, weight in _with_row(factor, "arith.mulf", value, tracer):
            variance = _under_root(root, tracer)
            if variance is not None and weight is not None:
                yield [(a, variance)], weight


def _match_normed(parts: list[tuple[Node, Node]], value: SSAValue, tracer: Tracer) -> _Norm | None:
    for outer, variance in parts:
        shifted_by = tracer.operands(outer, "arith.subf")
        nothing = shifted_by is not None and tracer.constant(shifted_by[1]) == 0.0  # Flax NNX: a mean that is zeros
        centred = shifted_by[0] if shifted_by is not None and nothing else outer
        for shifted, constant in tracer.either(variance, "arith.addf"):
            eps = tracer.constant(constant)
            if eps is None:
                continue
            fast = _fast_variance(centred, shifted, value, tracer)
            if fast is not None:
                return _Norm("layer", *fast, eps)
            square = _mean(_not_below_zero(shifted, tracer), value, tracer)
            if square is None:
                continue
            element, axis = square
            base = _square_root_of(element, tracer)
            if base is None:
                continue
            # a layer norm first: it is also the RMS norm of the tensor x - mean(x)
            x = _centred(centred, base, axis, value, tracer)
            if x is not None:
                return _Norm("layer", *x, eps)
            x = _same_tensor(centred, base, axis, value, tracer)
            if x is not None:
                return _Norm("rms", *x, eps)
    return None


def _over_root(node: Node, tracer: Tracer) -> Iterator[tuple[Node, Node]]:
    """`(a, v)` if the node is a * rsqrt(v), a * (1 / sqrt(v)) or a / sqrt(v)."""
    for a, b in tracer.either(node, "arith.mulf"):
        variance = _under_root(b, tracer)
        if variance is not None:
            yield a, variance
    pair = tracer.operands(node, "arith.divf")
    if pair is not None:
        root = tracer.head(pair[1])
        if root.op == "math.sqrt":
            yield pair[0], root.args[0]


def _under_root(node: Node, tracer: Tracer) -> Node | None:
    """v, if the node is rsqrt(v), v ** -0.5 or 1 / sqrt(v)."""
    inner = tracer.head(node)
    if inner.op == "math.rsqrt" or (inner.op == "math.powf" and tracer.constant(inner.args[1]) == -0.5):
        return inner.args[0]
    if inner.op == "arith.divf" and tracer.constant(inner.args[0]) == 1.0:
        root = tracer.head(inner.args[1])
        return root.args[0] if root.op == "math.sqrt" else None
    return None


def _not_below_zero(node: Node, tracer: Tracer) -> Node:
    """a, if the node is max(a, 0), as Flax and Equinox have their variances; else the node."""
    return next((a for a, b in tracer.either(node, "arith.maximumf") if tracer.constant(b) == 0.0), node)


def _fast_variance(centred: Node, node: Node, value: SSAValue, tracer: Tracer) -> _Place | None:
    """x, if `centred` is x - mean(x), and the node is mean(x * x) - mean(x) ** 2, or 0 where that is less (Flax)."""
    kept = _not_below_zero(node, tracer)
    outside, inside = tracer.operands(centred, "arith.subf"), tracer.operands(kept, "arith.subf")
    if outside is None or inside is None:
        return None
    square, mean = _mean(inside[0], value, tracer), _square_root_of(inside[1], tracer)
    base = _square_root_of(square[0], tracer) if square is not None else None
    if square is None or base is None or mean is None:
        return None
    x = _same_tensor(outside[0], base, square[1], value, tracer)
    for each in (outside[1], mean):
        found = _mean(each, value, tracer)
        if x is None or found is None or _same_tensor(outside[0], found[0], found[1], value, tracer) != x:
            return None
    return x


def _mean(node: Node, value: SSAValue, tracer: Tracer) -> tuple[Node, int] | None:
    """(element, loop dim) if the node is the mean of the elements over the last dim."""
    size = shape_of(value.type)[-1]
    if not isinstance(size, int):
        return None
    found = tracer.head(node)
    if found.op not in ("arith.divf", "arith.mulf"):
        return None
    pairs = [(found.args[0], found.args[1])]
    if found.op == "arith.mulf":
        pairs.append((found.args[1], found.args[0]))
    for total, factor in pairs:
        number, inner = tracer.constant(factor), tracer.head(total)
        if number is None or inner.op != "sum" or inner.extent != size:
            continue
        if abs(number * (1.0 if found.op == "arith.divf" else size * size) / size - 1.0) < 1e-6:
            return inner.args[0], inner.axis
    return None


def _square_root_of(node: Node, tracer: Tracer) -> Node | None:
    """a, if the node is a * a or a ** 2."""
    found = tracer.head(node)
    if found.op == "arith.mulf" and tracer.head(found.args[0]) is tracer.head(found.args[1]):
        return found.args[0]
    if found.op == "math.powf" and tracer.constant(found.args[1]) == 2.0:
        return found.args[0]
    return None


def _moved(index: Index, axis: int, last: int) -> Index:
    """The index with the reduction's dim in the place of the last dim."""
    return tuple(loops.dim_expr(last) if isinstance(e, AffineDimExpr) and e.position == axis else e for e in index)


def _same_tensor(outer: Node, inner: Node, axis: int, value: SSAValue, tracer: Tracer) -> _Place | None:
    """The tensor, of the result's shape and type, that has `outer` as its element, and `inner` along the reduced
    dim."""
    shape = shape_of(value.type)
    inside = {(t, _moved(i, axis, len(shape) - 1)) for t, i in tracer.aliases(inner)}
    for tensor, index in tracer.aliases(outer):
        order = loops.order_of(index, shape_of(tensor.type), shape)
        if order is None or order[-1] != len(shape) - 1:
            continue
        if tensor_dtype(tensor.type) == tensor_dtype(value.type) and (tensor, index) in inside:
            return tensor, order
    return None


def _centred(outer: Node, inner: Node, axis: int, value: SSAValue, tracer: Tracer) -> _Place | None:
    """x, if outer is x - mean(x), and inner is the same along the reduced dim."""
    outside, inside = tracer.operands(outer, "arith.subf"), tracer.operands(inner, "arith.subf")
    if outside is None or inside is None:
        return None
    x = _same_tensor(outside[0], inside[0], axis, value, tracer)
    if x is None:
        return None
    for mean in (outside[1], inside[1]):
        found = _mean(mean, value, tracer)
        if found is None or _same_tensor(outside[0], found[0], found[1], value, tracer) != x:
            return None
    return x
