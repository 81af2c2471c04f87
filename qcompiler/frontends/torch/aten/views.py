"""ATen operators that only move or make values: reshapes, slices, joins, and tensors made from nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap

from qcompiler.errors import NarrowedDimError
from qcompiler.frontends.common.scalars import Scalars
from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, Shape, listed_axes, lowers
from qcompiler.frontends.torch.common.origins import describe
from qcompiler.ir import build, types
from qcompiler.ir.qc import GatherOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType

aten = torch.ops.aten

# --- reshapes --------------------------------------------------------------------------------------------------------


@lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
        aten.flatten.using_ints, aten.unflatten.int)  # fmt: skip
def _reshape(s: Scope, node: fx.Node, a: Args) -> Result:
    return s.reshape(s.value(a["self"]), s.shape(node))


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(s: Scope, node: fx.Node, a: Args) -> Result:
    """torch decides by the size at run time; a graph can do so only if the size cannot be both 1 and something else."""
    shape = s.shape(a["self"])
    asked = listed_axes(a["dim"] if "dim" in a else list(range(len(shape))), len(shape))
    for axis in asked:
        if not isinstance(shape[axis], int) and s.low(shape[axis]) <= 1:
            raise NarrowedDimError(
                f"{node.target} would drop dimension {axis} only where '{shape[axis]}' is 1{describe(node)}. Name the "
                "dimensions of fixed size 1 (squeeze(dim)), or use reshape"
            )
    return s.reshape(s.value(a["self"]), s.shape(node))


@lowers(aten.expand.default)
def _expand(s: Scope, node: fx.Node, a: Args) -> Result:
    return s.broadcast(s.value(a["self"]), s.shape(node))


@lowers(aten.permute.default)
def _permute(s: Scope, node: fx.Node, a: Args) -> Result:
    rank = len(s.shape(node))
    return s.transpose(s.value(a["self"]), [d % rank for d in a["dims"]])


@lowers(aten.transpose.int, aten.t.default)
def _transpose(s: Scope, node: fx.Node, a: Args) -> Result:
    rank = len(s.shape(node))
    if rank < 2:
        return s.value(a["self"])
    first, second = (a["dim0"] % rank, a["dim1"] % rank) if "dim0" in a else (0, 1)
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return s.transpose(s.value(a["self"]), order)


@lowers(aten.repeat.default)
def _repeat(s: Scope, node: fx.Node, a: Args) -> Result:
    """(d0, d1) repeated (r0, r1): to (r0, d0, r1, d1) by broadcast, then back to (r0*d0, r1*d1)."""
    value = s.value(a["self"])
    shape = shape_of(value.type)
    repeats = [s.dim(r) for r in a["repeats"]]
    padded: Shape = (*([1] * (len(repeats) - len(shape))), *shape)
    wide = [size for pair in zip(repeats, padded, strict=True) for size in pair]
    thin = [size for each in padded for size in (1, each)]
    return s.reshape(s.broadcast(s.reshape(value, thin), wide), s.shape(node))


# --- parts -----------------------------------------------------------------------------------------------------------


@lowers(aten.slice.Tensor)
def _slice(s: Scope, node: fx.Node, a: Args) -> Result:
    value = s.value(a["self"])
    shape = shape_of(value.type)
    axis = a["dim"] % len(shape)
    start = _from_start(s, a.get("start"), shape[axis])
    return s.slice(value, axis, start, s.shape(node)[axis], a["step"])


def _from_start(s: Scope, start: Any, size: Dim) -> Dim:
    """A start as torch reads it: None is 0, negative counts from the end, and both ends are clamped."""
    begin = dim(s.dim(start)) if start is not None else dim(0)
    low, high = begin.bounds(s.ranges)
    if high < 0:
        begin = (dim(size) + begin).maximum(0) if s.low((dim(size) + begin).to_dim()) < 0 else dim(size) + begin
    elif low < 0:
        raise NarrowedDimError(f"the start '{begin}' of a slice may be negative or not")
    return begin.minimum(dim(size)).to_dim() if isinstance(size, int) and begin.is_static else begin.to_dim()


@lowers(aten.select.int)
def _select(s: Scope, node: fx.Node, a: Args) -> Result:
    value = s.value(a["self"])
    shape = shape_of(value.type)
    axis, index = a["dim"] % len(shape), dim(s.dim(a["index"]))
    if index.bounds(s.ranges)[1] < 0:
        index = index + dim(shape[axis])
    return s.reshape(s.slice(value, axis, index.to_dim(), 1), s.shape(node))


@lowers(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.chunk.default,
        aten.unbind.int)  # fmt: skip
def _split(s: Scope, node: fx.Node, a: Args) -> Result:
    """Consecutive slices, their sizes from the trace."""
    value = s.value(a["self"])
    axis = a["dim"] % len(shape_of(value.type))
    unbind = node.target is aten.unbind.int
    parts: list[SSAValue] = []
    offset = dim(0)
    for part in node.meta["val"]:
        shape = s.symbols.shape(part.shape)
        size: Dim = 1 if unbind else shape[axis]
        piece = s.slice(value, axis, offset.to_dim(), size)
        parts.append(s.reshape(piece, shape))
        offset = offset + dim(size)
    return tuple(parts)


@lowers(operator.getitem)
def _getitem(s: Scope, node: fx.Node, a: Args) -> Result:
    source, index = a["source"], a["index"]
    parts = s.values[source]
    assert isinstance(parts, tuple)
    part = parts[index]
    if part is None:
        raise s.unsupported(source, f"its result {index} is used, which has no lowering")
    return part


# --- overlapping or diagonal parts: loops that read at sums of their indices ------------------------------------------


def _read_at(s: Scope, value: SSAValue, places: Sequence[AffineExpr], out: Shape) -> SSAValue:
    """out[d0, d1, …] = value[places]"""
    maps = [AffineMap(len(out), 0, tuple(places)), AffineMap.identity(len(out))]
    dtype = tensor_dtype(value.type)
    return build.generic(s.builder, [value], maps, out, dtype, ["parallel"] * len(out), lambda _, e: e[0])


@lowers(aten.unfold.default)
def _unfold(s: Scope, node: fx.Node, a: Args) -> Result:
    """Windows of `size` along a dim, `step` apart, as a new last dim."""
    value, out = s.value(a["self"]), s.shape(node)
    rank = len(shape_of(value.type))
    if not rank:
        return s.reshape(value, out)
    axis, step = a["dimension"] % rank, int(a["step"])
    reach = (dim(out[axis]) - 1) * step + int(a["size"])
    value = s.slice(value, axis, 0, reach.to_dim())
    places: list[AffineExpr] = [AffineDimExpr(i) for i in range(rank)]
    places[axis] = (places[axis] if step == 1 else places[axis] * step) + AffineDimExpr(rank)
    return _read_at(s, value, places, out)


@lowers(aten.diagonal.default)
def _diagonal(s: Scope, node: fx.Node, a: Args) -> Result:
    """x[i, i + offset] of two dims, as a new last dim."""
    value, out = s.value(a["self"]), s.shape(node)
    rank = len(shape_of(value.type))
    first, second, offset = a["dim1"] % rank, a["dim2"] % rank, int(a["offset"])
    for axis, start in ((first, max(-offset, 0)), (second, max(offset, 0))):
        value = s.slice(value, axis, start, out[-1])
    kept = iter(range(rank - 2))
    places: list[AffineExpr] = [
        AffineDimExpr(rank - 2) if i in (first, second) else AffineDimExpr(next(kept)) for i in range(rank)
    ]
    return _read_at(s, value, places, out)


@lowers(aten.as_strided.default)
def _as_strided(s: Scope, node: fx.Node, a: Args) -> Result:
    """For a tensor that owns its memory, with fixed sizes: an element at offset + sum of index * stride."""
    meta, out = a["self"].meta["val"], s.shape(node)
    value, numbers = s.value(a["self"]), [*a["size"], *a["stride"], a.get("storage_offset") or 0]
    whole = isinstance(meta.numel(), int) and meta.is_contiguous() and meta.storage_offset() == 0
    if not whole or not all(isinstance(n, int) for n in numbers) or 0 in out:
        raise s.unsupported(node, "strides into a tensor that is a view of another, or sizes that are not fixed")
    flat = s.reshape(value, [int(meta.numel())])
    place: AffineExpr = AffineConstantExpr(a.get("storage_offset") or 0)
    for i, stride in enumerate(a["stride"]):
        place = place + AffineDimExpr(i) * stride if out[i] != 1 else place
    return _read_at(s, flat, [place], out)


@lowers(aten.view.dtype)
def _bitcast(s: Scope, node: fx.Node, a: Args) -> Result:
    """The same bits as another type of the same width."""
    value, target = s.value(a["self"]), s.dtype(node)
    source = tensor_dtype(value.type)
    pairs = ({"f32", "i32"}, {"f64", "i64"}, {"i8", "ui8"})
    if source == target:
        return value
    if {source, target} not in pairs:
        raise s.unsupported(node, f"the bits of {source} as {target}; only f32 and i32, f64 and i64, i8 and ui8")

    def body(inner: Builder, elements: Sequence[SSAValue]) -> SSAValue:
        return inner.insert(arith.BitcastOp(elements[0], types.ELEMENT_TYPES[target])).results[0]

    return build.pointwise(s.builder, [value], s.shape(node), target, body)


# --- joins -----------------------------------------------------------------------------------------------------------


@lowers(aten.cat.default)
def _cat(s: Scope, node: fx.Node, a: Args) -> Result:
    rank, dtype = len(s.shape(node)), s.dtype(node)
    given = [t for t in a["tensors"] if s.shape(t) != (0,) or rank == 1]  # torch skips empty 1-D tensors
    values = [s.cast(s.value(t), dtype) for t in given if 0 not in s.shape(t)]
    if not values:  # all inputs are empty
        return s.full(0, s.shape(node), dtype)
    return build.concat(s.builder, values, a["dim"] % rank)


@lowers(aten.stack.default)
def _stack(s: Scope, node: fx.Node, a: Args) -> Result:
    shape, dtype = s.shape(node), s.dtype(node)
    axis = a["dim"] % len(shape)
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    return build.concat(s.builder, [s.reshape(s.cast(s.value(t), dtype), one) for t in a["tensors"]], axis)


def insert_slice(s: Scope, part: SSAValue, into: SSAValue, offsets: Sequence[Dim], steps: list[int]) -> SSAValue:
    """`into` with `part` written at `offsets`."""
    return build.insert_slice(s.builder, part, into, offsets, steps)


@lowers(aten.slice_scatter.default, aten.select_scatter.default)
def _scatter_slice(s: Scope, node: fx.Node, a: Args) -> Result:
    into, part = s.value(a["self"]), s.value(a["src"])
    shape = list(shape_of(into.type))
    axis = a["dim"] % len(shape)
    offsets: list[Dim] = [0] * len(shape)
    steps = [1] * len(shape)
    if node.target is aten.select_scatter.default:
        offsets[axis] = _from_start(s, a["index"], shape[axis])
        part = s.reshape(part, [*shape[:axis], 1, *shape[axis + 1 :]])
    else:
        offsets[axis], steps[axis] = _from_start(s, a.get("start"), shape[axis]), a["step"]
    return insert_slice(s, s.cast(part, tensor_dtype(into.type)), into, offsets, steps)


@lowers(aten.constant_pad_nd.default)
def _pad(s: Scope, node: fx.Node, a: Args) -> Result:
    """Pads from the last dimension on; negative amounts cut."""
    value, shape = s.value(a["self"]), s.shape(node)
    pads = [int(p) for p in a["pad"]]
    offsets: list[Dim] = [0] * len(shape)
    for i in range(len(pads) // 2):
        axis, before, after = len(shape) - 1 - i, pads[2 * i], pads[2 * i + 1]
        if before < 0 or after < 0:
            cut = min(before, 0) + min(after, 0)
            size = (dim(shape_of(value.type)[axis]) + cut).to_dim()
            value = s.slice(value, axis, max(-before, 0), size)
        offsets[axis] = max(before, 0)
    if shape_of(value.type) == shape:
        return value
    filled = s.full(a["value"] or 0, shape, s.dtype(node))
    return insert_slice(s, value, filled, offsets, [1] * len(shape))


@lowers(aten.flip.default)
def _flip(s: Scope, node: fx.Node, a: Args) -> Result:
    value = s.value(a["self"])
    for axis in listed_axes(a["dims"], len(shape_of(value.type))):
        size = shape_of(value.type)[axis]
        index = s.iota(size, lambda m, i: m.sub(m.const(-1), i))  # gather counts negative indices from the end
        value = s.insert(GatherOp(value, index, value.type, axis=axis))
    return value


# --- new values ------------------------------------------------------------------------------------------------------


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(s: Scope, node: fx.Node, a: Args) -> Result:
    """start + index * step; floats compute in f64 and round once, as torch does."""
    start, step, dtype = a.get("start", 0), a.get("step", 1), s.dtype(node)
    floating = dtype in ("f32", "f64", "f16", "bf16")
    compute: DType = "f64" if floating else "i64"
    symbolic = isinstance(start, fx.Node) or isinstance(step, fx.Node)
    if symbolic and (isinstance(step, fx.Node) or floating):
        raise s.unsupported(node, "a symbolic step, or a symbolic start of a float range")

    def body(m: Scalars, i: SSAValue) -> SSAValue:
        scaled = i if step == 1 else m.mul(i, m.const(step))
        return scaled if symbolic or start == 0 else m.add(m.const(start), scaled)

    counted = s.iota(s.shape(node)[0], body, compute)
    if symbolic:
        counted = s.pointwise([counted, s.value(start)], lambda m, x, y: m.add(x, y), compute="i64", result="i64")
    return s.cast(counted, dtype)


@lowers(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)
def _full(s: Scope, node: fx.Node, a: Args) -> Result:
    value = a["s"] if node.target is aten.scalar_tensor.default else a["fill_value"]
    if isinstance(value, fx.Node):
        return s.cast(s.broadcast(s.value(value), s.shape(node)), s.dtype(node))
    return s.full(value, s.shape(node), s.dtype(node))


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(s: Scope, node: fx.Node, a: Args) -> Result:
    return s.full(0, s.shape(node), s.dtype(node))


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(s: Scope, node: fx.Node, a: Args) -> Result:
    return s.full(1, s.shape(node), s.dtype(node))


@lowers(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_permuted.default)
def _empty(s: Scope, node: fx.Node, a: Args) -> Result:
    """Uninitialised memory has no defined value; zero is valid, and the same every time."""
    return s.full(0, s.shape(node), s.dtype(node))
