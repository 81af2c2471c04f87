"""Pooling of ATen: windows as one reduction loop, adaptive windows as a gather and a masked reduction.

    max_pool2d(x, 3, stride=2)      out[n, c, h, w] = max over (i, j) of x[n, c, 2*h + i, 2*w + j]

The loops over the window need an operand that determines their size: a small constant tensor of the window's shape,
which no iteration reads (the convention of MLIR's own pooling ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap

from qcompiler.frontends.common.scalars import FLOATS, Scalars, cast, opmath
from qcompiler.frontends.torch.aten.scope import Args, Number, Result, Scope, Shape, combine, lowers, overload
from qcompiler.frontends.torch.aten.views import insert_slice
from qcompiler.ir import build, qc, types
from qcompiler.ir.build import Reduction
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
V = SSAValue

# --- windows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Windows over the last `len(kernel)` dims of the padded `x`: window w starts at `w * stride`."""

    x: V
    lead: Shape
    out: Shape
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of parallel loops: the leading dims and one for each dim of the windows."""
        return len(self.lead) + len(self.out)


def numbers(value: Any, count: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    """torch's argument (one number per dim, one for all, or none for the default) as one number per dim."""
    if isinstance(value, int):
        return (value,) * count
    given = tuple(int(v) for v in value or ())
    return tuple(default) if not given else given * count if len(given) == 1 else given


def pad(s: Scope, x: V, before: Sequence[int], after: Sequence[int], value: Number) -> V:
    """Pads the last dims of `x` with a constant; amounts must not be negative."""
    if not any(before) and not any(after):
        return x
    shape = list(shape_of(x.type))
    lead = len(shape) - len(before)
    sizes = [*shape[:lead], *((dim(n) + a + b).to_dim() for n, a, b in zip(shape[lead:], before, after, strict=True))]
    filled = s.full(value, sizes, tensor_dtype(x.type))
    return insert_slice(s, x, filled, [*([0] * lead), *before], [1] * len(shape))


def windows(s: Scope, x: V, out: Sequence[Dim], a: Args, fill: Number, dilation: Any = 1) -> Windows:
    """The windows of `kernel_size`, `stride`, `padding` and `ceil_mode`; the value outside x is `fill`."""
    count = len(a["kernel_size"]) if not isinstance(a["kernel_size"], int) else len(out) - 1
    kernel = numbers(a["kernel_size"], count)
    count = len(kernel)
    stride, padding = numbers(a["stride"], count, kernel), numbers(a["padding"], count)
    steps = numbers(dilation, count)
    extra = [n - 1 if a.get("ceil_mode") else 0 for n in stride]
    padded = pad(s, x, padding, [p + e for p, e in zip(padding, extra, strict=True)], fill)
    spatial = tuple(out[len(out) - count :])
    shape = shape_of(padded.type)
    for i in range(count):  # cut to the part that windows read, so no access needs a proof about the division
        reach = (dim(spatial[i]) - 1) * stride[i] + ((kernel[i] - 1) * steps[i] + 1)
        axis = len(shape) - count + i
        if reach != dim(shape[axis]):
            padded = s.slice(padded, axis, 0, reach.to_dim())
    return Windows(padded, tuple(out[: len(out) - count]), spatial, kernel, stride, padding, steps)


def reduce_windows(
    s: Scope, w: Windows, kind: Reduction, compute: DType, extra: Sequence[V | Number] = (), term: Any = None
) -> V:
    """One value for each window, in `compute`.

    `term(scalars, element, *extra)` is the value that is reduced (default: the element); the `extra` inputs are
    numbers, or tensors of the result's shape or of rank 0.
    """
    tensors = [v for v in extra if isinstance(v, SSAValue)]
    lead, count = len(w.lead), len(w.out)
    loops = w.rank + count
    sized = s.full(0, w.kernel, "f32")
    places: list[AffineExpr] = [AffineDimExpr(i) for i in range(lead)]
    for i in range(count):
        first, step = AffineDimExpr(lead + i), AffineDimExpr(w.rank + i)
        outer = first if w.stride[i] == 1 else first * w.stride[i]
        places.append(outer + (step if w.dilation[i] == 1 else step * w.dilation[i]))
    result = AffineMap(loops, 0, tuple(AffineDimExpr(i) for i in range(w.rank)))
    over = AffineMap(loops, 0, tuple(AffineDimExpr(w.rank + i) for i in range(count)))
    maps = [AffineMap(loops, 0, tuple(places)), over]
    maps += [result if shape_of(v.type) else AffineMap(loops, 0, ()) for v in tensors]
    out = [*w.lead, *w.out]
    init = build.fill(s.builder, build.reduction_identity(kind, compute), out, compute)

    def body(inner: Builder, arguments: Sequence[V]) -> V:
        m = Scalars(inner, compute)
        element, _, *given, accumulator = arguments
        rest = iter(given)
        more = [next(rest) if isinstance(v, SSAValue) else m.const(v) for v in extra]
        value = cast(inner, element, compute) if term is None else term(m, element, *more)
        return combine(m, kind, value, accumulator)

    kinds: list[build.Iterator] = ["parallel"] * w.rank
    kinds += ["reduction"] * count
    inputs = [w.x, sized, *tensors]
    return build.generic(s.builder, inputs, [*maps, result], out, compute, kinds, body, init=init)


# --- max -------------------------------------------------------------------------------------------------------------


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
        aten.max_pool2d.default, aten.max_pool3d.default, aten.max_pool1d.default)  # fmt: skip
def _max_pool(s: Scope, node: fx.Node, a: Args) -> Result:
    """The largest value of each window, and its position (only if that is used)."""
    x = s.value(a["self"])
    both = overload(node).endswith("with_indices.default")
    dtype = tensor_dtype(x.type)
    meta = node.meta["val"][0] if both else node.meta["val"]
    w = windows(s, x, s.symbols.shape(meta.shape), a, build.reduction_identity("max", dtype), a["dilation"])
    best = reduce_windows(s, w, "max", dtype)
    if not both:
        return best
    wanted = any(user.args[1] == 1 for user in node.users)
    return best, _positions(s, w, best, shape_of(x.type)) if wanted else None


def _positions(s: Scope, w: Windows, best: V, shape: Shape) -> V:
    """The position of each window's maximum in the unpadded, flattened dims: the first one, or the last NaN."""
    lead, count, dtype = len(w.lead), len(w.out), tensor_dtype(w.x.type)

    def term(m: Scalars, element: V, top: V, *extents: V) -> V:
        flat = m.const(0)
        for i in range(count):
            start = m.mul(m.index(lead + i), m.const(w.stride[i]))
            offset = m.sub(m.mul(m.index(w.rank + i), m.const(w.dilation[i])), m.const(w.padding[i]))
            flat = m.add(m.mul(flat, extents[i]), m.add(start, offset))
        values = Scalars(m.builder, dtype)
        place = m.select(values.compare("eq", element, top), flat, m.const(2**63 - 1))
        if dtype not in FLOATS:
            return place
        return m.select(values.is_nan(element), m.sub(m.const(-1), flat), place)  # so the minimum is the last NaN

    key = reduce_windows(s, w, "min", "i64", [best, *map(s.extent, shape[lead:])], term)
    if dtype not in FLOATS:
        return key

    def decode(m: Scalars, value: V) -> V:
        return m.select(m.compare("lt", value, m.const(0)), m.sub(m.const(-1), value), value)

    return s.pointwise([key], decode, compute="i64", result="i64")


# --- average ---------------------------------------------------------------------------------------------------------


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(s: Scope, node: fx.Node, a: Args) -> Result:
    """The sum of each window divided by the number of its elements inside x, or inside x and its padding."""
    x, dtype = s.value(a["self"]), s.dtype(node)
    compute = opmath(dtype)
    w = windows(s, x, s.shape(node), a, 0)
    total = reduce_windows(s, w, "add", compute)
    if a.get("divisor_override"):
        return _divide(s, total, [float(a["divisor_override"])], dtype)
    if not a.get("ceil_mode") and (a["count_include_pad"] or not any(w.padding)):
        whole = 1
        for n in w.kernel:
            whole *= n
        return _divide(s, total, [float(whole)], dtype)
    sizes = shape_of(x.type)[len(w.lead) :]
    counts = [_count(s, w, i, size, bool(a["count_include_pad"]), compute) for i, size in enumerate(sizes)]
    return _divide(s, total, counts, dtype)


def _divide(s: Scope, total: V, counts: Sequence[V | Number], dtype: DType) -> V:
    def body(m: Scalars, value: V, *sizes: V) -> V:
        whole = sizes[0]
        for size in sizes[1:]:
            whole = m.mul(whole, size)
        return m.div(value, whole)

    return s.pointwise([total, *counts], body, compute=opmath(dtype), result=dtype)


def _count(s: Scope, w: Windows, i: int, size: Dim, with_padding: bool, compute: DType) -> V:
    """The number of elements of dim i that each window counts, shaped to broadcast against the result."""
    padding, kernel, stride = w.padding[i], w.kernel[i], w.stride[i]

    def body(m: Scalars, extent: V) -> V:
        start = m.sub(m.mul(m.index(0), m.const(stride)), m.const(padding))
        end = m.minimum(m.add(start, m.const(kernel)), m.add(extent, m.const(padding)))
        if not with_padding:
            start, end = m.maximum(start, m.const(0)), m.minimum(end, extent)
        return m.sub(end, start)

    counted = s.pointwise([s.extent(size)], body, compute="i64", result=compute, shape=[w.out[i]])
    return s.reshape(counted, [w.out[i], *([1] * (len(w.out) - 1 - i))])


# --- adaptive --------------------------------------------------------------------------------------------------------


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool1d.default)
def _adaptive_avg_pool(s: Scope, node: fx.Node, a: Args) -> Result:
    x, dtype, shape = s.value(a["self"]), s.dtype(node), s.shape(node)
    compute, count = opmath(dtype), len(a["output_size"])
    lead = len(shape) - count
    blocks = _blocks(shape_of(x.type)[lead:], shape[lead:])
    if blocks is not None:
        total = _reduce_blocks(s, x, lead, shape[lead:], blocks, "add", compute)
        return _divide(s, total, [s.extent(n) for n in blocks], dtype)
    counts: list[V | Number] = []
    for axis in range(lead, len(shape)):
        size, out = shape_of(x.type)[axis], shape[axis]
        x = _reduce_spans(s, x, axis, out, "add", compute)
        span = s.pointwise([s.extent(size), s.extent(out)], _span_size, compute="i64", result=compute, shape=[out])
        counts.append(s.reshape(span, [out, *([1] * (len(shape) - 1 - axis))]))
    return _divide(s, x, counts, dtype)


@lowers(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(s: Scope, node: fx.Node, a: Args) -> Result:
    """The values; the positions have no lowering."""
    x = s.value(a["self"])
    shape, dtype = s.symbols.shape(node.meta["val"][0].shape), tensor_dtype(x.type)
    lead = len(shape) - len(a["output_size"])
    blocks = _blocks(shape_of(x.type)[lead:], shape[lead:])
    if blocks is not None:
        return s.reshape(_reduce_blocks(s, x, lead, shape[lead:], blocks, "max", dtype), shape), None
    for axis in range(lead, len(shape)):
        x = _reduce_spans(s, x, axis, shape[axis], "max", dtype)
    return x, None


def _blocks(sizes: Shape, out: Shape) -> list[Dim] | None:
    """The size of equal blocks along each dim, or None if they differ."""
    found: list[Dim] = []
    for size, count in zip(sizes, out, strict=True):
        if count == 1:
            found.append(size)
        elif isinstance(size, int) and isinstance(count, int) and size % count == 0:
            found.append(size // count)
        else:
            return None
    return found


def _reduce_blocks(s: Scope, x: V, lead: int, out: Shape, blocks: Sequence[Dim], kind: Reduction, compute: DType) -> V:
    """(h, w) viewed as (h', h / h', w', w / w'), with the blocks reduced."""
    shape = shape_of(x.type)
    split = [*shape[:lead], *(size for pair in zip(out, blocks, strict=True) for size in pair)]
    axes = tuple(range(lead + 1, len(split), 2))
    return s.reduce(s.reshape(x, split), axes, kind, compute=compute)


def _start(m: Scalars, i: V, size: V, out: V) -> V:
    """floor(i * size / out)"""
    return m.div(m.mul(i, size), out)


def _end(m: Scalars, i: V, size: V, out: V) -> V:
    """ceil((i + 1) * size / out)"""
    reach = m.mul(m.add(i, m.const(1)), size)
    return m.div(m.add(reach, m.sub(out, m.const(1))), out)


def _span_size(m: Scalars, size: V, out: V) -> V:
    i = m.index(0)
    return m.sub(_end(m, i, size, out), _start(m, i, size, out))


def _in_span(m: Scalars, size: V, out: V) -> V:
    return m.compare("lt", m.index(1), _span_size(m, size, out))


def _reduce_spans(s: Scope, x: V, axis: int, out: Dim, kind: Reduction, compute: DType) -> V:
    """Spans of different sizes along one axis: gathered at the largest size, reduced up to their own size."""
    shape = shape_of(x.type)
    size, dtype = shape[axis], tensor_dtype(x.type)
    longest = ((dim(size) + (dim(out) - 1)) // dim(out) + 1).to_dim()
    extents = [s.extent(size), s.extent(out)]

    def index(m: Scalars, n: V, count: V) -> V:
        at = m.add(_start(m, m.index(0), n, count), m.index(1))
        return m.minimum(at, m.sub(n, m.const(1)))

    where = s.pointwise(extents, index, compute="i64", result="i64", shape=[out, longest])
    wide = (*shape[:axis], out, longest, *shape[axis + 1 :])
    picked = s.insert(qc.GatherOp(x, where, types.tensor(wide, dtype), axis=axis))
    neutral = build.reduction_identity(kind, compute)

    inside = s.pointwise(extents, _in_span, compute="i64", result="i1", shape=[out, longest])
    inside = s.reshape(inside, [out, longest, *([1] * (len(shape) - 1 - axis))])
    neutral = build.reduction_identity(kind, compute)

    def masked(m: Scalars, value: V, keep: V) -> V:
        return m.select(m.nonzero(keep), value, m.const(neutral))

    kept = s.pointwise([picked, inside], masked, compute=compute, result=compute, shape=wide)
    return s.reduce(kept, (axis + 1,), kind, compute=compute)
