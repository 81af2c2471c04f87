"""gather, scatter, dynamic_slice and dynamic_update_slice, in every form that indexing in jax.numpy makes.

The dims that an index, a batch or a part of a window picks are moved to the front and folded into one; one linear index
picks along it:

    gather(x (V, D), ids)                 qc.gather along V
    x[i, :, j]                            x as (d0*d2, d1), index i*d2 + j
    dynamic_slice(x, start, size)         index start + (0 … size-1) along each axis that is cut
    x.at[i].add(y)                        qc.scatter of the same linear index

StableHLO clamps the starts of a gather and of a dynamic slice, and drops updates out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from qcompiler.frontends.common.loops import combine
from qcompiler.frontends.jax.fold import entries_of, scalar_of
from qcompiler.frontends.jax.folds import flow_of, reduction_of
from qcompiler.frontends.jax.graph import Node, Value
from qcompiler.frontends.jax.pointwise import in_order
from qcompiler.frontends.jax.scope import Result, Scalars, Scope, V, lowers, opmath
from qcompiler.frontends.jax.weight_views import is_row_gather
from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim, product

# --- a linear index --------------------------------------------------------------------------------------------------


@dataclass
class Picked:
    """The dims of the operand that are picked by index, and the size of the window along each."""

    axes: list[int]
    windows: list[Dim]
    rest: list[int]
    starts: dict[int, V]
    """For an axis with an index: starts of the batch's shape (i64). Other axes start at 0."""
    batch: list[Dim]


def _starts(s: Scope, indices: Value, vector_dim: int, index_map: Sequence[int]) -> tuple[dict[int, V], list[Dim]]:
    """By operand dim, the starts of all entries of the batch, in i64."""
    x = s.cast(s.value(indices), "i64")
    shape = list(indices.shape)
    batch = [size for i, size in enumerate(shape) if i != vector_dim]
    if vector_dim == len(shape):
        return ({index_map[0]: x} if index_map else {}), batch
    found = {}
    for number, axis in enumerate(index_map):
        found[axis] = s.reshape(s.slice(x, vector_dim, number, 1), batch)
    return found, batch


def _batch_starts(s: Scope, starts: dict[int, V], batch: list[Dim], pairs: list[tuple[int, int]]) -> None:
    """Adds the dims that the operand and the indices have in common: entry i of the batch reads entry i."""
    for axis, position in pairs:
        counted = s.iota(batch[position], lambda m, i: i)
        starts[axis] = build.broadcast_in(s.builder, counted, batch, [position])


def _linear(s: Scope, picked: Picked, shape: Sequence[Dim], *, clamped: bool) -> V:
    """i64 of shape (*batch, *windows): the position in the folded dims; -1 for one out of bounds if not clamped."""
    b, out = len(picked.batch), [*picked.batch, *picked.windows]
    tensors = [picked.starts[a] for a in picked.axes if a in picked.starts]
    given = [s.reshape(t, [*picked.batch, *([1] * len(picked.windows))]) for t in tensors]
    sizes: list[Any] = [s.extent(shape[a]) for a in picked.axes]
    lasts: list[Any] = [s.extent((dim(shape[a]) - dim(w)).to_dim()) for a, w in zip(picked.axes, picked.windows,
                                                                                     strict=True)]  # fmt: skip

    def body(m: Scalars, *elements: V) -> V:
        starts, numbers = iter(elements[: len(given)]), elements[len(given) :]
        total, inside = m.const(0), None
        for n, axis in enumerate(picked.axes):
            size, last = numbers[n], numbers[len(picked.axes) + n]
            at = m.const(0)
            if axis in picked.starts:
                at = next(starts)
                if clamped:
                    at = m.minimum(m.maximum(at, m.const(0)), last)
                else:
                    fits = m.bitwise("and", m.compare("ge", at, m.const(0)), m.compare("le", at, last))
                    inside = fits if inside is None else m.bitwise("and", inside, fits)
            if picked.windows[n] != 1:
                at = m.add(at, m.index(b + n))
            total = m.add(m.mul(total, size), at)
        return total if inside is None else m.select(inside, total, m.const(-1))

    return s.pointwise([*given, *sizes, *lasts], body, compute="i64", result="i64", shape=out)


def _folded(s: Scope, x: V, picked: Picked) -> V:
    """The picked dims as one first dim."""
    shape = shape_of(x.type)
    front = s.transpose(x, [*picked.axes, *picked.rest])
    return s.reshape(front, [product([shape[a] for a in picked.axes]).to_dim(), *(shape[a] for a in picked.rest)])


# --- reading ---------------------------------------------------------------------------------------------------------


@lowers("stablehlo.gather", "stablehlo.dynamic_gather")
def _gather(s: Scope, node: Node) -> Result:
    numbers, (operand, indices) = node.attrs["dimension_numbers"], node.operands[:2]
    sizes = node.attrs.get("slice_sizes") or entries_of(node.operands[2])
    if sizes is None:
        raise node.unsupported("a gather of a size that depends on values")
    if 0 in node.result.shape:
        return s.full(0, node.result.shape, node.result.dtype)
    x = s.value(operand)
    if is_row_gather(node):
        return s.take(x, _from_start(s, node) if node.attrs.get("checked") else row_index(s, node), 0)
    starts, batch = _starts(s, indices, numbers["index_vector_dim"], numbers["start_index_map"])
    where = [i for i in range(indices.rank) if i != numbers["index_vector_dim"]]
    pairs = zip(numbers["operand_batching_dims"], numbers["start_indices_batching_dims"], strict=True)
    _batch_starts(s, starts, batch, [(axis, where.index(position)) for axis, position in pairs])
    axes = [a for a in range(operand.rank) if a in starts or sizes[a] != operand.shape[a]]
    picked = Picked(axes, [sizes[a] for a in axes], [a for a in range(operand.rank) if a not in axes], starts, batch)
    cut = _cut_at_known(s, x, indices, picked, node)
    if not axes:
        out = build.broadcast_to(s.builder, x, [*batch, *operand.shape])
    elif cut is not None:
        out = cut
    else:
        out = s.take(_folded(s, x, picked), _linear(s, picked, operand.shape, clamped=True), 0)
    return _placed(s, node, out, picked, sizes)


def _cut_at_known(s: Scope, x: V, indices: Value, picked: Picked, node: Node) -> V | None:
    """A gather at known places as a slice, (*batch, *windows, *rest): x[:, 2:5], and x[:, 0::2] with a step. JAX writes
    slices as gathers where another dim is symbolic. None for other places."""
    shape, numbers = shape_of(x.type), node.attrs["dimension_numbers"]
    if indices.known is None or indices.known.dtype == object or numbers["operand_batching_dims"]:
        return None
    vector, known = numbers["index_vector_dim"], indices.known.astype(np.int64)
    places = np.moveaxis(known, vector, -1) if vector < known.ndim else known[..., None]
    places = places.reshape(-1, places.shape[-1])
    at = dict(zip(numbers["start_index_map"], places.T, strict=True))
    starts = [at.get(axis, np.zeros(len(places), np.int64)) for axis in picked.axes]
    for n, (axis, size) in enumerate(zip(picked.axes, picked.windows, strict=True)):
        room = (dim(shape[axis]) - dim(size)).to_dim()
        if not isinstance(room, int) and bool((starts[n] > 0).any()):
            return None
        starts[n] = np.clip(starts[n], 0, room if isinstance(room, int) else 0)
    front = [*picked.axes, *picked.rest]
    if not picked.batch:
        for axis, start, size in zip(picked.axes, starts, picked.windows, strict=True):
            x = s.slice(x, axis, int(start[0]), size)
        return s.transpose(x, front)
    steps = set(np.diff(starts[0]).tolist() or [1]) if len(starts) == 1 else set()  # one place has no step
    if len(picked.batch) != 1 or picked.windows != [1] or len(steps) != 1 or min(steps) < 1:
        return None
    offsets, wide, strides = [0] * len(shape), list(shape), [1] * len(shape)
    axis = picked.axes[0]
    offsets[axis], wide[axis], strides[axis] = int(starts[0][0]), picked.batch[0], steps.pop()
    return s.transpose(build.extract_slice(s.builder, x, offsets, wide, strides), front)


def row_index(s: Scope, node: Node) -> V:
    """The ids of a gather of rows in the shape of the result's leading dims: clamped, or as they are if checked."""
    table, indices = node.operands[:2]
    ids = s.reshape(s.value(indices), node.result.shape[:-1])
    if node.attrs.get("checked"):
        return s.cast(ids, "i64")
    last = s.extent((dim(table.shape[0]) - 1).to_dim())
    return s.pointwise(
        [s.cast(ids, "i64"), last], lambda m, i, n: m.minimum(m.maximum(i, m.const(0)), n), compute="i64", result="i64"
    )


def _from_start(s: Scope, node: Node) -> V:
    """Ids of rows that must be in range: a negative one is out of it also for an op that counts from the end."""
    size = s.extent(node.operands[0].shape[0])

    def body(m: Scalars, i: V, n: V) -> V:
        return m.select(m.compare("lt", i, m.const(0)), m.sub(i, n), i)

    return s.pointwise([row_index(s, node), size], body, compute="i64", result="i64")


def _placed(s: Scope, node: Node, out: V, picked: Picked, sizes: Sequence[Dim]) -> V:
    """(*batch, *windows, *rest) to the result's order: window dims in the operand's order at `offset_dims`."""
    numbers, b = node.attrs["dimension_numbers"], len(picked.batch)
    dims = [*picked.axes, *picked.rest]  # behind the batch
    gone = {*numbers["collapsed_slice_dims"], *numbers["operand_batching_dims"]}
    kept = [a for a in dims if a not in gone]
    out = s.reshape(out, [*picked.batch, *(sizes[a] for a in kept)])
    offsets = iter([b + kept.index(a) for a in sorted(kept)])
    lead = iter(range(b))
    order = [next(offsets) if i in numbers["offset_dims"] else next(lead) for i in range(node.result.rank)]
    return s.transpose(out, order)


@lowers("stablehlo.dynamic_slice")
def _dynamic_slice(s: Scope, node: Node) -> Result:
    x, sizes = s.value(node.operands[0]), node.result.shape
    for axis, size in enumerate(sizes):
        if size != shape_of(x.type)[axis]:
            x = _cut(s, x, axis, node.operands[1 + axis], size)
    return x


def _cut(s: Scope, x: V, axis: int, start: Value, size: Dim) -> V:
    known, total = scalar_of(start), shape_of(x.type)[axis]
    if isinstance(known, int) and isinstance(total, int) and isinstance(size, int):
        return s.slice(x, axis, min(max(known, 0), total - size), size)
    return s.take(x, _run(s, start, total, size), axis)


def _run(s: Scope, start: Value, total: Dim, size: Dim) -> V:
    """start, start + 1, …: `size` places, clamped so that the last one is inside."""
    last = s.extent((dim(total) - dim(size)).to_dim())
    at = s.cast(s.value(start), "i64")

    def body(m: Scalars, begin: V, end: V) -> V:
        begin = m.minimum(m.maximum(begin, m.const(0)), end)
        return begin if size == 1 else m.add(begin, m.index(0))

    return s.pointwise([at, last], body, compute="i64", result="i64", shape=[size])


# --- writing ---------------------------------------------------------------------------------------------------------


@lowers("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(s: Scope, node: Node) -> Result:
    operand, update = node.operands[:2]
    starts = node.operands[2:]
    axes = [a for a in range(operand.rank) if update.shape[a] != operand.shape[a]]
    return _updated(s, s.value(operand), s.value(update), starts, axes)


def _updated(s: Scope, x: V, update: V, starts: Sequence[Value], axes: Sequence[int]) -> V:
    """`x` with `update` written at the starts: one axis by index, more axes one inside the other."""
    if not axes:
        return update
    shape, sizes = shape_of(x.type), shape_of(update.type)
    known = [scalar_of(starts[a]) for a in axes]
    if all(isinstance(k, int) for k in known) and all(isinstance(n, int) for n in (*shape, *sizes)):
        offsets: list[Dim] = [0] * len(shape)
        for a, k in zip(axes, known, strict=True):
            offsets[a] = min(max(int(k), 0), int(shape[a]) - int(sizes[a]))  # type: ignore[arg-type]
        return build.insert_slice(s.builder, update, x, offsets)
    axis = axes[0]
    index = _run(s, starts[axis], shape[axis], sizes[axis])
    if len(axes) > 1:
        rows = s.take(x, index, axis)
        update = _updated(s, rows, update, starts, axes[1:])
    return s.insert(qc.IndexUpdateOp(x, index, update, x.type, axis=axis))


@lowers("stablehlo.scatter")
def _scatter(s: Scope, node: Node) -> Result:
    """Folds the picked dims into one, adds a row that takes what is out of bounds, and writes along it."""
    if len(node.results) > 1:
        raise node.unsupported("a scatter into several tensors at once")
    operand, indices, updates = node.operands
    numbers = node.attrs["scatter_dimension_numbers"]
    reduce = _reduce_of(node)
    starts, batch = _starts(s, indices, numbers["index_vector_dim"], numbers["scattered_dims_to_operand_dims"])
    where = [i for i in range(indices.rank) if i != numbers["index_vector_dim"]]
    pairs = zip(numbers["input_batching_dims"], numbers["scatter_indices_batching_dims"], strict=True)
    _batch_starts(s, starts, batch, [(axis, where.index(position)) for axis, position in pairs])
    gone = {*numbers["inserted_window_dims"], *numbers["input_batching_dims"]}
    kept = [a for a in range(operand.rank) if a not in gone]
    window = {a: updates.shape[p] for a, p in zip(kept, sorted(numbers["update_window_dims"]), strict=True)}
    sizes: list[Dim] = [window.get(a, 1) for a in range(operand.rank)]
    axes = [a for a in range(operand.rank) if a in starts or sizes[a] != operand.shape[a]]
    picked = Picked(axes, [sizes[a] for a in axes], [a for a in range(operand.rank) if a not in axes], starts, batch)
    if not axes and batch:
        raise node.unsupported("several updates of the whole array; use the value itself")
    lead = [i for i in range(updates.rank) if i not in numbers["update_window_dims"]]
    at = dict(zip(kept, sorted(numbers["update_window_dims"]), strict=True))
    extreme = reduce in ("max", "min")
    given = in_order(s, s.value(updates), operand) if extreme else s.value(updates)
    x = in_order(s, s.value(operand), operand) if extreme else s.value(operand)
    if reduce == "sub":
        given = s.pointwise([given], lambda m, e: m.neg(e), compute=opmath(updates.dtype), result=updates.dtype)
        reduce = "add"
    src = s.transpose(given, [*lead, *(at[a] for a in (*axes, *picked.rest) if a in at)])
    out = _written(s, x, src, picked, reduce) if axes else _whole(s, x, s.reshape(src, operand.shape), reduce)
    return in_order(s, out, operand) if extreme else out


def _whole(s: Scope, x: V, update: V, reduce: str) -> V:
    """A scatter that updates each element once: x.at[...].add(y)."""
    dtype = tensor_dtype(x.type)
    if reduce == "none":
        return s.cast(update, dtype)
    kind = cast("build.Reduction", reduce)
    return s.pointwise([x, update], lambda m, a, b: combine(m, kind, b, a), compute=opmath(dtype), result=dtype)


def _reduce_of(node: Node) -> str:
    """ "none" for a region that returns the update."""
    body = node.regions[0]
    if not body.nodes and body.returned == [body.arguments[1]]:
        return "none"
    if flow_of(body) == [("subtract", None, 0, 1)]:
        return "sub"
    kind = reduction_of(body)
    if kind not in ("add", "mul", "max", "min"):
        raise node.unsupported(
            "a scatter that applies another function than set, add, subtract, multiply, max and min; read the places "
            "with x[i], compute, and write them back with x.at[i].set"
        )
    return kind


def _written(s: Scope, x: V, src: V, picked: Picked, reduce: str) -> V:
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    rest = [shape[a] for a in picked.rest]
    count = product([*picked.batch, *picked.windows]).to_dim()
    src = s.reshape(s.cast(src, dtype), [count, *rest])
    folded = _folded(s, x, picked)
    total = shape_of(folded.type)[0]
    wide = build.concat(s.builder, [folded, s.full(0, [1, *rest], dtype)], 0)
    index = s.reshape(_linear(s, picked, shape, clamped=False), [count])
    beyond = s.extent(total)

    def row(m: Scalars, at: V, last: V) -> V:
        return m.select(m.compare("lt", at, m.const(0)), last, at)

    index = s.pointwise([index, beyond], row, compute="i64", result="i64")
    if reduce == "none":
        out = s.insert(qc.IndexUpdateOp(wide, index, src, wide.type, axis=0))
    else:
        spread = s.broadcast(s.reshape(index, [count, *([1] * len(rest))]), [count, *rest])
        out = s.insert(qc.ScatterOp(wide, spread, src, wide.type, axis=0, reduce=reduce))
    out = s.slice(out, 0, 0, total)
    order = [*picked.axes, *picked.rest]
    return s.transpose(s.reshape(out, [shape[a] for a in order]), [order.index(n) for n in range(len(shape))])
