"""Resizing and padding of ATen: rows selected by a computed index, and weighted sums of such rows.

    upsample_nearest2d(x, scale 2)   a broadcast: (h, w) -> (h, 2, w, 2) -> (2h, 2w)
    upsample_bilinear2d(x)           per axis: (1 - t) * x[i] + t * x[i + 1], the last axis first
    reflection_pad2d(x, p)           per axis: x[|i - p|], and the same at the other end

Positions are computed in fp32, as torch's CPU kernels do (in f64 for f64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import Scalars
from qcompiler.frontends.torch.aten.scope import Args, Number, Result, Scope, lowers, overload
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
V = SSAValue


def take(s: Scope, x: V, index: V, axis: int) -> V:
    """Entries of one axis, selected by a rank-1 index."""
    shape = shape_of(x.type)
    out = (*shape[:axis], *shape_of(index.type), *shape[axis + 1 :])
    return s.insert(qc.GatherOp(x, index, types.tensor(out, tensor_dtype(x.type)), axis=axis))


def _image(a: Args) -> Any:
    """The resized tensor: `self`, or `input` in the forms with scale factors."""
    return a["self"] if "self" in a else a["input"]


# --- scales ----------------------------------------------------------------------------------------------------------


def _factors(a: Args, count: int) -> list[float | None]:
    """The scale factor of each axis as given by the caller; None if the sizes decide."""
    if "scale_factors" in a:
        given = a["scale_factors"]
        return list(given) if given else [None] * count
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[count]
    return [a.get(name) for name in names]


def _scale(s: Scope, size: Dim, out: Dim, factor: float | None, align: bool, compute: DType) -> V | Number:
    """The step in x for one step of the result, rounded to the type in which positions are computed."""
    if align:
        if isinstance(size, int) and isinstance(out, int):
            return _round((size - 1) / (out - 1), compute) if out > 1 else 0.0
        return s.pointwise([s.extent(size), s.extent(out)], _aligned_scale, compute=compute, result=compute, shape=[])
    if factor is not None and factor > 0:
        return _round(1.0 / factor, compute)
    if isinstance(size, int) and isinstance(out, int):
        return _round(np.float32(size) / np.float32(out) if compute == "f32" else size / out, compute)
    sizes = [s.extent(size), s.extent(out)]
    return s.pointwise(sizes, lambda m, n, k: m.div(n, k), compute=compute, result=compute, shape=[])


def _aligned_scale(m: Scalars, size: V, out: V) -> V:
    """(size - 1) / (out - 1), or 0 for one output."""
    one = m.const(1)
    step = m.div(m.sub(size, one), m.sub(out, one))
    return m.select(m.compare("gt", out, one), step, m.const(0))


def _round(value: Any, compute: DType) -> float:
    return float(np.float32(value)) if compute == "f32" else float(value)


def _positions_type(dtype: DType) -> DType:
    return "f64" if dtype == "f64" else "f32"


# --- nearest ---------------------------------------------------------------------------------------------------------

_NEAREST = {
    op: (count, exact)
    for count in (1, 2, 3)
    for name, exact in ((f"upsample_nearest{count}d", False), (f"_upsample_nearest_exact{count}d", True))
    for op in (getattr(aten, name).default, getattr(aten, name).vec)
}


@lowers(*_NEAREST)
def _nearest(s: Scope, node: fx.Node, a: Args) -> Result:
    """Integer factors repeat each element; any other scale selects floor(i * scale), or floor((i + 1/2) * scale)."""
    count, exact = _NEAREST[node.target]
    x, out = s.value(_image(a)), s.shape(node)
    lead = len(out) - count
    factors = _factors(a, count)
    repeats = [_whole_factor(s, shape_of(x.type)[lead + i], out[lead + i], factors[i], exact) for i in range(count)]
    for i in range(count):
        if repeats[i] is None:
            x = take(s, x, _nearest_index(s, shape_of(x.type)[lead + i], out[lead + i], factors[i], exact), lead + i)
    shape = shape_of(x.type)
    if shape == out:
        return x
    thin: list[Dim] = [*shape[:lead]]
    wide: list[Dim] = [*shape[:lead]]
    for size, repeat in zip(shape[lead:], repeats, strict=True):
        thin += [size, 1]
        wide += [size, repeat or 1]
    return s.reshape(s.broadcast(s.reshape(x, thin), wide), out)


def _whole_factor(s: Scope, size: Dim, out: Dim, factor: float | None, exact: bool) -> int | None:
    """k if the result repeats each of the `size` entries k times at fp32 positions; else None."""
    if size == out and factor in (None, 1.0):
        return 1
    low = max(s.low(size), 1)
    k = dim(out).bounds({n: (r[0], r[0]) for n, r in s.ranges.items()})[0] // low
    if k < 1 or dim(size) * k != dim(out):
        return None
    most = dim(out).bounds(s.ranges)[1]
    scale = np.float32(1.0 / factor) if factor else np.float32(1) / np.float32(k)
    index = np.arange(most, dtype=np.float32) + np.float32(0.5 if exact else 0)
    return k if np.array_equal(np.floor(index * scale).astype(np.int64), np.arange(most) // k) else None


def _nearest_index(s: Scope, size: Dim, out: Dim, factor: float | None, exact: bool) -> V:
    def body(m: Scalars, step: V, extent: V) -> V:
        i = m.index(0)
        at = m.call("floor", m.mul(m.add(i, m.const(0.5)) if exact else i, step))
        return m.minimum(at, m.sub(extent, m.const(1)))

    step = _scale(s, size, out, factor, False, "f32")
    return s.pointwise([step, s.extent(size)], body, compute="f32", result="i64", shape=[out])


# --- linear and cubic ------------------------------------------------------------------------------------------------

_LINEAR = {
    op: count
    for count, name in ((1, "upsample_linear1d"), (2, "upsample_bilinear2d"), (3, "upsample_trilinear3d"))
    for op in (getattr(aten, name).default, getattr(aten, name).vec)
}


@lowers(*_LINEAR)
def _linear(s: Scope, node: fx.Node, a: Args) -> Result:
    return _weighted(s, node, a, _LINEAR[node.target], 2)


@lowers(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec)
def _cubic(s: Scope, node: fx.Node, a: Args) -> Result:
    return _weighted(s, node, a, 2, 4)


def _weighted(s: Scope, node: fx.Node, a: Args, count: int, taps: int) -> V:
    """Per axis, the last one first: the sum of `taps` selected entries times their weights."""
    x, out, dtype = s.value(_image(a)), s.shape(node), s.dtype(node)
    lead, compute = len(out) - count, _positions_type(s.dtype(node))
    factors = _factors(a, count)
    for i in reversed(range(count)):
        axis, size = lead + i, shape_of(x.type)[lead + i]
        if size == out[axis] and factors[i] in (None, 1.0):
            continue
        step = _scale(s, size, out[axis], factors[i], bool(a["align_corners"]), compute)
        x = _weighted_axis(s, x, axis, out[axis], step, bool(a["align_corners"]), taps, compute)
    return s.cast(x, dtype)


def _weighted_axis(s: Scope, x: V, axis: int, out: Dim, step: V | Number, align: bool, taps: int, compute: DType) -> V:
    shape = shape_of(x.type)
    size = s.extent(shape[axis])

    def source(m: Scalars, scale: V) -> V:
        """The position in x of result i."""
        i = m.index(0)
        if align:
            return m.mul(i, scale)
        at = m.sub(m.mul(scale, m.add(i, m.const(0.5))), m.const(0.5))
        return m.maximum(at, m.const(0)) if taps == 2 else at

    def index(tap: int) -> Callable[..., V]:
        def body(m: Scalars, scale: V, extent: V) -> V:
            at = m.add(m.call("floor", source(m, scale)), m.const(tap))
            return m.maximum(m.minimum(at, m.sub(extent, m.const(1))), m.const(0))

        return body

    def fraction(m: Scalars, scale: V) -> V:
        at = source(m, scale)
        return m.sub(at, m.call("floor", at))

    t = s.pointwise([step], fraction, compute=compute, result=compute, shape=[out])
    t = s.reshape(t, [out, *([1] * (len(shape) - 1 - axis))])
    first = 0 if taps == 2 else -1
    picked = [
        take(s, x, s.pointwise([step, size], index(first + n), compute=compute, result="i64", shape=[out]), axis)
        for n in range(taps)
    ]
    weights = _linear_weights if taps == 2 else _cubic_weights

    def combine(m: Scalars, part: V, *elements: V) -> V:
        total: V | None = None
        for weight, element in zip(weights(m, part), elements, strict=True):
            term = m.mul(weight, element)
            total = term if total is None else m.add(total, term)
        assert total is not None
        return total

    return s.pointwise([t, *picked], combine, compute=compute, result=compute, shape=shape_of(picked[0].type))


def _linear_weights(m: Scalars, t: V) -> list[V]:
    return [m.sub(m.const(1), t), t]


def _cubic_weights(m: Scalars, t: V) -> list[V]:
    """Keys' cubic convolution with A = -0.75, torch's choice."""
    a = -0.75

    def inner(x: V) -> V:
        """((A + 2) x - (A + 3)) x² + 1, for x <= 1"""
        scaled = m.sub(m.mul(m.const(a + 2), x), m.const(a + 3))
        return m.add(m.mul(m.mul(scaled, x), x), m.const(1))

    def outer(x: V) -> V:
        """((A x - 5A) x + 8A) x - 4A, for 1 < x < 2"""
        scaled = m.add(m.mul(m.sub(m.mul(m.const(a), x), m.const(5 * a)), x), m.const(8 * a))
        return m.sub(m.mul(scaled, x), m.const(4 * a))

    one = m.const(1)
    rest = m.sub(one, t)
    return [outer(m.add(t, one)), inner(t), inner(rest), outer(m.add(rest, one))]


# --- antialiased: a filter over all covered entries ------------------------------------------------------------------


@lowers(aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa.vec,
        aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa.vec)  # fmt: skip
def _antialiased(s: Scope, node: fx.Node, a: Args) -> Result:
    """A filter as wide as the step between results, per axis, the last one first; sizes must be fixed."""
    x, out, dtype = s.value(_image(a)), s.shape(node), s.dtype(node)
    compute, cubic = _positions_type(dtype), "bicubic" in overload(node)
    factors = _factors(a, 2)
    for i in (1, 0):
        axis = len(out) - 2 + i
        size, count = shape_of(x.type)[axis], out[axis]
        if not isinstance(size, int) or not isinstance(count, int):
            raise s.unsupported(node, f"resizing {size} to {count} with antialias=True; fix the size")
        if size != count or factors[i] not in (None, 1.0):
            step = _scale(s, size, count, factors[i], bool(a["align_corners"]), compute)
            assert isinstance(step, float)
            x = _filter_axis(s, x, axis, count, step, cubic, compute)
    return s.cast(x, dtype)


def _filter_axis(s: Scope, x: V, axis: int, out: int, step: float, cubic: bool, compute: DType) -> V:
    """out[i] = sum of w[i, j] * x[first[i] + j], the weights normalised to 1."""
    shape = shape_of(x.type)
    size, half = int(shape[axis]), 2.0 if cubic else 1.0
    support, shrink = half * max(step, 1.0), 1.0 / max(step, 1.0)
    taps = int(np.ceil(support)) * 2 + 1

    def first(m: Scalars, axis_of_result: int) -> tuple[V, V, V]:
        """The centre of result i, its first entry, and the entry after its last."""
        centre = m.mul(m.const(step), m.add(m.index(axis_of_result), m.const(0.5)))
        begin = m.call("trunc", m.add(m.sub(centre, m.const(support)), m.const(0.5)))
        end = m.call("trunc", m.add(m.add(centre, m.const(support)), m.const(0.5)))
        return centre, m.maximum(begin, m.const(0)), m.minimum(end, m.const(size))

    def place(m: Scalars) -> V:
        _, begin, _ = first(m, 0)
        return m.minimum(m.add(begin, m.index(1)), m.const(size - 1))

    def weight(m: Scalars) -> V:
        centre, begin, end = first(m, 0)
        at = m.add(begin, m.index(1))
        distance = m.abs(m.mul(m.add(m.sub(at, centre), m.const(0.5)), m.const(shrink)))
        value = _cubic_filter(m, distance) if cubic else m.maximum(m.sub(m.const(1), distance), m.const(0))
        return m.select(m.compare("lt", at, end), value, m.const(0))

    index = s.pointwise([], place, compute=compute, result="i64", shape=[out, taps])
    raw = s.pointwise([], weight, compute=compute, result=compute, shape=[out, taps])
    total = s.reshape(s.reduce(raw, (1,), "add", compute=compute), [out, 1])
    weights = s.pointwise([raw, total], lambda m, w, t: m.div(w, t), compute=compute, result=compute)
    picked = take(s, x, index, axis)
    wide = shape_of(picked.type)
    spread = s.reshape(weights, [out, taps, *([1] * (len(shape) - 1 - axis))])
    return s.fold([picked, spread], wide, (axis + 1,), "add", compute=compute, term=lambda m, v, w: m.mul(v, w))


def _cubic_filter(m: Scalars, x: V) -> V:
    """Keys' kernel with A = -0.5 at a distance >= 0, torch's choice for antialiased resizing."""
    a = -0.5
    near = m.add(m.mul(m.mul(m.sub(m.mul(m.const(a + 2), x), m.const(a + 3)), x), x), m.const(1))
    far = m.mul(m.const(a), m.sub(m.mul(m.add(m.mul(m.sub(x, m.const(5)), x), m.const(8)), x), m.const(4)))
    inside = m.select(m.compare("lt", x, m.const(1)), near, far)
    return m.select(m.compare("lt", x, m.const(2)), inside, m.const(0))


# --- padding and shuffling -------------------------------------------------------------------------------------------

_PADS = {
    op: kind
    for kind in ("reflection", "replication")
    for count in (1, 2, 3)
    for op in (getattr(aten, f"{kind}_pad{count}d").default,)
}


@lowers(*_PADS)
def _pad_by_index(s: Scope, node: fx.Node, a: Args) -> Result:
    """Per axis: the index is mirrored, or clamped, at both ends."""
    x, out = s.value(a["self"]), s.shape(node)
    pads = [int(p) for p in a["padding"]]
    mirror = _PADS[node.target] == "reflection"
    for n in range(len(pads) // 2):
        axis, before = len(out) - 1 - n, pads[2 * n]
        if before == 0 and pads[2 * n + 1] == 0:
            continue

        def body(m: Scalars, extent: V, before: int = before) -> V:
            at, last = m.sub(m.index(0), m.const(before)), m.sub(extent, m.const(1))
            if mirror:
                return m.sub(last, m.abs(m.sub(last, m.abs(at))))
            return m.minimum(m.maximum(at, m.const(0)), last)

        size = s.extent(shape_of(x.type)[axis])
        x = take(s, x, s.pointwise([size], body, compute="i64", result="i64", shape=[out[axis]]), axis)
    return x


@lowers(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def _pixel_shuffle(s: Scope, node: fx.Node, a: Args) -> Result:
    """(c r r, h, w) to (c, h r, w r), or back: a view."""
    x = s.value(a["self"])
    shuffle = overload(node) == "pixel_shuffle.default"
    r = int(a["upscale_factor"] if shuffle else a["downscale_factor"])
    out = s.shape(node)
    *lead, c, h, w = shape_of(x.type) if shuffle else out
    n = len(lead)
    channels = dim(c).divide_exact(r * r).to_dim()
    if shuffle:
        split: Sequence[Dim] = [*lead, channels, r, r, h, w]
        order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    else:
        split = [*lead, channels, h, r, w, r]
        order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return s.reshape(s.transpose(s.reshape(x, split), order), out)
