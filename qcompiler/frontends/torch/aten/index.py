"""Picking by index, and index_copy: embedding, gather, index, take.

`x[i, j]` with index tensors becomes one gather over linear indices.  Masks of transformers index by ranges that were
unsqueezed to broadcast (`mask[arange(b)[:, None, None, None], arange(s)]`); import recognises such an index and makes a
view instead of a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.errors import DataDependentShapeError
from qcompiler.frontends.common.scalars import Scalars
from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, broadcast_shapes, is_tensor, lowers
from qcompiler.frontends.torch.common.origins import describe
from qcompiler.ir import build, qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, product

aten = torch.ops.aten
V = SSAValue


def take(s: Scope, x: V, index: V, axis: int) -> V:
    """numpy.take: an index of any rank replaces the axis."""
    shape = shape_of(x.type)
    out = (*shape[:axis], *shape_of(index.type), *shape[axis + 1 :])
    return s.insert(qc.GatherOp(x, index, types.tensor(out, tensor_dtype(x.type)), axis=axis))


@lowers(aten.embedding.default)
def _embedding(s: Scope, node: fx.Node, a: Args) -> Result:
    table, ids = s.value(a["weight"]), s.value(a["indices"])
    if not isinstance(table.owner, qc.ConstOp | qc.DequantizeOp):
        return take(s, table, ids, 0)
    return s.insert(qc.EmbeddingOp(ids, table, types.tensor(s.shape(node), s.dtype(node))))


@lowers(aten.index_select.default)
def _index_select(s: Scope, node: fx.Node, a: Args) -> Result:
    x = at_least_1d(s, s.value(a["self"]))
    return s.reshape(take(s, x, s.value(a["index"]), a["dim"] % len(shape_of(x.type))), s.shape(node))


def at_least_1d(s: Scope, x: V) -> V:
    """A tensor of rank 0 as a vector with one element: torch treats it so for dimension 0."""
    return x if shape_of(x.type) else s.reshape(x, [1])


@lowers(aten.take.default)
def _take(s: Scope, node: fx.Node, a: Args) -> Result:
    """x.view(-1)[index]."""
    x = s.value(a["self"])
    flat = s.reshape(x, [product(shape_of(x.type)).to_dim()])
    return s.reshape(take(s, flat, s.value(a["index"]), 0), s.shape(node))


@lowers(aten.gather.default)
def _gather(s: Scope, node: fx.Node, a: Args) -> Result:
    """torch.gather; its index may be smaller than x in the other dims, so x is cut first."""
    if 0 in s.shape(node):  # an index without elements may have any rank
        return s.full(0, s.shape(node), s.dtype(node))
    x, index = (at_least_1d(s, s.value(a[name])) for name in ("self", "index"))
    shape = shape_of(index.type)
    axis = a["dim"] % len(shape)
    for i, size in enumerate(shape):
        if i != axis and shape_of(x.type)[i] != size:
            x = s.slice(x, i, 0, size)
    out = s.insert(qc.GatherOp(x, index, types.tensor(shape, tensor_dtype(x.type)), axis=axis, mode="along"))
    return s.reshape(out, s.shape(node))


# --- x[i, j] ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """A tensor whose values are `start + position` along one axis of a given rank; its other axes have size 1."""

    axis: int
    rank: int
    start: int
    size: Dim


_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.to.dtype)


def _as_range(s: Scope, node: Any) -> _Range | None:
    """Recognises a range through arange, + constant, unsqueeze, casts and copies."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    args = node.args
    if node.target is aten.arange.default:
        return _Range(0, 1, 0, s.shape(node)[0])
    if node.target in (aten.arange.start, aten.arange.start_step):
        plain = isinstance(args[0], int) and (len(args) < 3 or args[2] == 1)
        return _Range(0, 1, args[0], s.shape(node)[0]) if plain else None
    inner = _as_range(s, args[0]) if args else None
    if inner is None:
        return None
    if node.target in _COPIES:
        return inner if s.dtype(node) in ("i64", "i32") else None
    if node.target in (aten.add.Tensor, aten.add.Scalar) and isinstance(args[1], int) and not node.kwargs:
        return _Range(inner.axis, inner.rank, inner.start + args[1], inner.size)
    if node.target is aten.unsqueeze.default:
        axis = args[1] % (inner.rank + 1)
        return _Range(inner.axis + (axis <= inner.axis), inner.rank + 1, inner.start, inner.size)
    return None


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(s: Scope, node: fx.Node, a: Args) -> Result:
    x, indices = s.value(a["self"]), list(a["indices"])
    for index in indices:
        if index is not None and s.dtype(index) in ("i1", "ui8"):
            raise DataDependentShapeError(
                f"indexing by a mask gives a size that depends on its values{describe(node)}; use torch.where"
            )
    return _index_by_ranges(s, x, indices) or _index_by_gather(s, x, indices)


def _index_by_ranges(s: Scope, x: V, indices: Sequence[Any]) -> V | None:
    """A view, if the leading dims are indexed by ranges on axes of their own; else None."""
    shape = shape_of(x.type)
    ranges = [_as_range(s, index) for index in indices]
    if not ranges or any(r is None or r.start < 0 for r in ranges):
        return None
    known = [r for r in ranges if r is not None]
    wide = broadcast_shapes([s.shape(index) for index in indices])
    axes = [len(wide) - r.rank + r.axis for r in known]
    if len(set(axes)) != len(axes):
        return None
    for i, r in enumerate(known):
        size, low = shape[i], s.low(r.size)
        fits = size == r.size or (isinstance(size, int) and low >= 0)  # torch has checked r.start + r.size <= size
        if not fits:
            return None
        x = s.slice(x, i, r.start, r.size)
    order = sorted(range(len(known)), key=lambda i: axes[i])
    count = len(known)
    x = s.transpose(x, [*order, *range(count, len(shape))])
    places = [*sorted(axes), *range(len(wide), len(wide) + len(shape) - count)]
    return build.broadcast_in(s.builder, x, [*wide, *shape[count:]], places)


def _index_by_gather(s: Scope, x: V, indices: Sequence[Any]) -> V:
    """Moves indexed dims to the front and folds them into one; gathers by linear indices; moves the result back."""
    shape = shape_of(x.type)
    used = [i for i, index in enumerate(indices) if index is not None]
    values = [s.value(indices[i]) for i in used]
    if len(used) == 1:
        return take(s, x, values[0], used[0])
    rest = [i for i in range(len(shape)) if i not in used]
    linear = linear_index(s, values, [shape[i] for i in used])
    folded = s.reshape(
        s.transpose(x, [*used, *rest]), [product(shape[i] for i in used).to_dim(), *(shape[i] for i in rest)]
    )
    out = take(s, folded, linear, 0)
    if used != list(range(used[0], used[-1] + 1)):
        return out  # torch puts the indexed dims first if they are not neighbours
    rank, before = len(shape_of(linear.type)), used[0]
    order = [*range(rank, rank + before), *range(rank), *range(rank + before, len(shape_of(out.type)))]
    return s.transpose(out, order)


def linear_index(s: Scope, indices: Sequence[V], sizes: Sequence[Dim]) -> V:
    """((i0 * n1) + i1) * n2 + …, after negative indices were made positive."""
    numbers: list[V | int] = [size if isinstance(size, int) else s.symbolic(size) for size in sizes]

    def body(m: Scalars, *elements: V) -> V:
        count = len(indices)
        total: V | None = None
        for index, size in zip(elements[:count], elements[count:], strict=True):
            wrapped = m.select(m.compare("lt", index, m.const(0)), m.add(index, size), index)
            total = wrapped if total is None else m.add(m.mul(total, size), wrapped)
        assert total is not None
        return total

    shape = broadcast_shapes([shape_of(i.type) for i in indices])
    return s.pointwise([*indices, *numbers], body, compute="i64", result="i64", shape=shape)


# --- writing ---------------------------------------------------------------------------------------------------------


@lowers(aten.index_copy.default)
def _index_copy(s: Scope, node: fx.Node, a: Args) -> Result:
    x, src = (at_least_1d(s, s.value(a[name])) for name in ("self", "source"))
    axis = a["dim"] % len(shape_of(x.type))
    index = s.reshape(s.value(a["index"]), [shape_of(src.type)[axis]])
    return s.reshape(s.insert(qc.IndexUpdateOp(x, index, src, x.type, axis=axis)), s.shape(node))
