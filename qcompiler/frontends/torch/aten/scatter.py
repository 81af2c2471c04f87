"""Writing by index in ATen: scatter and its reductions, index_put, masked_scatter, put, index_reduce, embedding_bag.

All become `qc.scatter` (entries are applied in the order of the index, so equal indices are deterministic) or, for one
list of positions along one axis, `qc.index_update`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import FLOATS, Scalars, opmath
from qcompiler.frontends.torch.aten.index import linear_index, take
from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, broadcast_shapes, lowers
from qcompiler.frontends.torch.aten.views import insert_slice
from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, product
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
V = SSAValue

# --- scatter ---------------------------------------------------------------------------------------------------------

_REDUCE = {
    None: "none", "add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max", "amin": "min",
}  # fmt: skip


def scatter(s: Scope, x: V, index: V, src: V, axis: int, reduce: str = "none") -> V:
    """`qc.scatter`; if the index covers only a part of x, that part is cut out and written back."""
    shape, count = shape_of(x.type), shape_of(index.type)
    if not shape:  # rank 0: one entry
        x, index, src = (s.reshape(v, [1]) for v in (x, index, src))
        return s.reshape(s.insert(qc.ScatterOp(x, index, src, x.type, axis=0, reduce=reduce)), [])
    part = [n for n in range(len(shape)) if n != axis and count[n] != shape[n]]
    target = x
    for n in part:
        target = s.slice(target, n, 0, count[n])
    for n in range(len(shape)):
        if shape_of(src.type)[n] != count[n]:
            src = s.slice(src, n, 0, count[n])
    out = s.insert(qc.ScatterOp(target, index, src, target.type, axis=axis, reduce=reduce))
    return insert_slice(s, out, x, [0] * len(shape), [1] * len(shape)) if part else out


def _axis(a: Args, x: V) -> int:
    return int(a["dim"]) % max(len(shape_of(x.type)), 1)


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
        aten.scatter_add.default)  # fmt: skip
def _scatter(s: Scope, node: fx.Node, a: Args) -> Result:
    x, index = s.value(a["self"]), s.value(a["index"])
    dtype = tensor_dtype(x.type)
    src = s.value(a["src"]) if "src" in a else s.full(a["value"], shape_of(index.type), dtype)
    reduce = "add" if node.target is aten.scatter_add.default else _REDUCE[a.get("reduce")]
    return scatter(s, x, index, src, _axis(a, x), reduce)


@lowers(aten.scatter_reduce.two)
def _scatter_reduce(s: Scope, node: fx.Node, a: Args) -> Result:
    x, index, src = (s.value(a[name]) for name in ("self", "index", "src"))
    return _reduced(s, x, index, src, _axis(a, x), a["reduce"], bool(a["include_self"]))


@lowers(aten.index_reduce.default)
def _index_reduce(s: Scope, node: fx.Node, a: Args) -> Result:
    x, src = s.value(a["self"]), s.value(a["source"])
    axis = _axis(a, x)
    index = _repeated(s, s.value(a["index"]), axis, src)
    return _reduced(s, x, index, src, axis, a["reduce"], bool(a["include_self"]))


def _repeated(s: Scope, index: V, axis: int, src: V) -> V:
    """One list of positions, the same for all other dims of `src`."""
    shape = shape_of(src.type)
    flat = s.reshape(index, [shape[axis] if n == axis else 1 for n in range(len(shape))])
    return s.broadcast(flat, shape)


def _reduced(s: Scope, x: V, index: V, src: V, axis: int, reduce: str, include_self: bool) -> V:
    """torch.scatter_reduce: without `include_self`, written elements first drop their old value."""
    dtype, shape = tensor_dtype(x.type), shape_of(index.type)
    fold = "add" if reduce == "mean" else _REDUCE[reduce]
    start = x
    if not include_self:
        neutral = build.reduction_identity(fold, dtype)  # type: ignore[arg-type]
        start = scatter(s, x, index, s.full(neutral, shape, dtype), axis)
    total = scatter(s, start, index, src, axis, fold)
    if reduce != "mean":
        return total
    ones = s.full(1, shape, "i64")
    counts = scatter(s, s.full(int(include_self), shape_of(x.type), "i64"), index, ones, axis, "add")

    def mean(m: Scalars, value: V, count: V) -> V:
        entries = m.maximum(count, m.const(1))
        if m.floating:
            return m.div(value, entries)
        quotient, remainder = m.div(value, entries), m.rem(value, entries)  # floor, as in torch
        return m.select(m.compare("lt", remainder, m.const(0)), m.sub(quotient, m.const(1)), quotient)

    return s.pointwise([total, counts], mean, compute=opmath(dtype), result=dtype)


@lowers(aten.diagonal_scatter.default)
def _diagonal_scatter(s: Scope, node: fx.Node, a: Args) -> Result:
    """For each row that the diagonal crosses, writes row i at column i + offset."""
    x, src, offset = s.value(a["self"]), s.value(a["src"]), int(a["offset"])
    rank, count = len(shape_of(x.type)), shape_of(src.type)[-1]
    first, second = a["dim1"] % rank, a["dim2"] % rank
    order = [*(i for i in range(rank) if i not in (first, second)), first, second]
    moved = s.transpose(x, order)
    rows = s.slice(moved, rank - 2, max(-offset, 0), count)
    where = (*shape_of(src.type), 1)
    index = s.iota(count, lambda m, i: m.add(i, m.const(max(offset, 0))))
    index = s.broadcast(s.reshape(index, [*([1] * (rank - 2)), count, 1]), where)
    written = scatter(s, rows, index, s.reshape(src, where), rank - 1)
    offsets: list[Dim] = [*([0] * (rank - 2)), max(-offset, 0), 0]
    out = insert_slice(s, written, moved, offsets, [1] * rank)
    return s.transpose(out, [order.index(i) for i in range(rank)])


# --- index_put -------------------------------------------------------------------------------------------------------


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(s: Scope, node: fx.Node, a: Args) -> Result:
    """`x[i, j] = v` (or `+=`): the indexed dims are moved to the front and folded into one, then written along it."""
    x, indices = s.value(a["self"]), list(a["indices"])
    used = [i for i, index in enumerate(indices) if index is not None]
    masks = [i for i in used if s.dtype(indices[i]) in ("i1", "ui8")]
    values = s.cast(s.value(a["values"]), tensor_dtype(x.type))
    if masks:
        if len(used) > 1 or a["accumulate"]:
            raise s.unsupported(node, "a mask beside other indices, or with accumulate=True; use torch.where")
        return _put_mask(s, node, x, s.value(indices[used[0]]), used[0], values)
    return _put(s, x, [s.value(indices[i]) for i in used], used, values, bool(a["accumulate"]))


def _put(s: Scope, x: V, indices: Sequence[V], used: Sequence[int], values: V, accumulate: bool) -> V:
    shape = shape_of(x.type)
    rest = [i for i in range(len(shape)) if i not in used]
    picked = broadcast_shapes([shape_of(i.type) for i in indices])
    neighbours = list(used) == list(range(used[0], used[-1] + 1))
    before = used[0] if neighbours else 0  # torch puts the indexed dims first if they are not neighbours
    lead = [shape[i] for i in rest]
    src = s.broadcast(values, [*lead[:before], *picked, *lead[before:]])
    if len(used) == 1 and len(picked) == 1 and not accumulate:
        index = linear_index(s, indices, [shape[used[0]]])  # index_put counts negative ones from the end
        return s.insert(qc.IndexUpdateOp(x, index, src, x.type, axis=used[0]))
    rank = len(picked)
    src = s.transpose(src, [*range(before, before + rank), *range(before), *range(before + rank, rank + len(rest))])
    count = product(picked).to_dim()
    src = s.reshape(src, [count, *lead])
    index = s.reshape(linear_index(s, indices, [shape[i] for i in used]), [count])
    order = [*used, *rest]
    front = s.transpose(x, order)
    folded = s.reshape(front, [product(shape[i] for i in used).to_dim(), *lead])
    if accumulate:
        index = _repeated(s, index, 0, src)
        out = s.insert(qc.ScatterOp(folded, index, src, folded.type, axis=0, reduce="add"))
    else:
        out = s.insert(qc.IndexUpdateOp(folded, index, src, folded.type, axis=0))
    back = [order.index(n) for n in range(len(shape))]
    return s.transpose(s.reshape(out, [shape[i] for i in order]), back)


def _put_mask(s: Scope, node: fx.Node, x: V, mask: V, first: int, values: V) -> V:
    """`x[mask] = v`: a select if v is one value for all, else the values in order, as in masked_scatter."""
    shape, covered = shape_of(x.type), len(shape_of(mask.type))
    rest = list(shape[first + covered :])
    wide = s.broadcast(s.reshape(mask, [*([1] * first), *shape_of(mask.type), *([1] * len(rest))]), shape)
    given = shape_of(values.type)
    if len(given) <= len(rest) or (len(given) == len(rest) + 1 and given[0] == 1):
        one = s.reshape(values, given[1:]) if len(given) > len(rest) else values
        return _choose(s, wide, one, x)
    if first:
        raise s.unsupported(node, "a mask behind a full slice, with a value for each element; use torch.where")
    places = product(shape_of(mask.type)).to_dim()
    rows = _in_order(s, s.reshape(mask, [places]), s.broadcast(values, [given[0], *rest]))
    return _choose(s, wide, s.reshape(rows, shape), x)


def _choose(s: Scope, mask: V, x: V, y: V) -> V:
    """torch.where in y's type."""
    dtype = tensor_dtype(y.type)
    inputs = [mask, s.cast(x, dtype), y]
    return s.pointwise(
        inputs, lambda m, c, p, q: m.select(m.nonzero(c), p, q), compute=dtype, result=dtype, shape=shape_of(y.type)
    )


def _in_order(s: Scope, mask: V, rows: V) -> V:
    """For each entry of a flat mask its row: the true entries take the rows in order."""
    count = shape_of(mask.type)[0]
    seen = s.insert(qc.CumsumOp(s.cast(mask, "i64"), s.cast(mask, "i64").type, axis=0))
    last = s.extent(shape_of(rows.type)[0])

    def place(m: Scalars, number: V, limit: V) -> V:
        return m.minimum(m.maximum(m.sub(number, m.const(1)), m.const(0)), m.sub(limit, m.const(1)))

    index = s.pointwise([seen, last], place, compute="i64", result="i64", shape=[count])
    return take(s, rows, index, 0)


@lowers(aten.masked_scatter.default)
def _masked_scatter(s: Scope, node: fx.Node, a: Args) -> Result:
    """Writes the values of `source` in order where the mask is true; if there are too few, the last one repeats."""
    x, source = s.value(a["self"]), s.value(a["source"])
    out = s.shape(node)
    mask = s.broadcast(s.value(a["mask"]), out)
    flat = s.reshape(source, [product(shape_of(source.type)).to_dim()])
    values = _in_order(s, s.reshape(mask, [product(out).to_dim()]), flat)
    return _choose(s, mask, s.reshape(values, out), s.broadcast(x, out))


@lowers(aten.put.default)
def _flat_put(s: Scope, node: fx.Node, a: Args) -> Result:
    """x.view(-1)[index] = source"""
    x, index, source = (s.value(a[name]) for name in ("self", "index", "source"))
    count = product(shape_of(index.type)).to_dim()
    flat = s.reshape(x, [product(shape_of(x.type)).to_dim()])
    out = _put(s, flat, [s.reshape(index, [count])], [0], s.reshape(source, [count]), bool(a["accumulate"]))
    return s.reshape(out, shape_of(x.type))


# --- embedding_bag ---------------------------------------------------------------------------------------------------


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(s: Scope, node: fx.Node, a: Args) -> Result:
    """Rows of a table, summed (mode 0), averaged (1) or their maximum (2) within bags that begin at `offsets`."""
    table, ids, offsets = (s.value(a[name]) for name in ("weight", "indices", "offsets"))
    out = s.symbols.shape(node.meta["val"][0].shape)
    (count,), dtype = shape_of(ids.type), tensor_dtype(table.type)
    compute = opmath(dtype)
    rows: V = s.cast(take(s, table, ids, 0), compute)
    if a.get("per_sample_weights") is not None:
        weights = s.reshape(s.value(a["per_sample_weights"]), [count, 1])
        rows = s.pointwise([rows, weights], lambda m, x, w: m.mul(x, w), compute=compute, result=compute)
    keep = s.full(1, [count], "i64")
    skipped = int(a["padding_idx"])
    if skipped >= 0:
        keep = s.pointwise(
            [ids], lambda m, i: m.select(m.compare("eq", i, m.const(skipped)), m.const(0), m.const(1)),
            compute="i64", result="i64",
        )  # fmt: skip
    bags = _bag_of(s, count, offsets)
    fold, neutral = ("max", float("-inf")) if a["mode"] == 2 else ("add", 0.0)
    rows = _choose(s, s.broadcast(s.reshape(s.cast(keep, "i1"), [count, 1]), shape_of(rows.type)),
                   rows, s.full(neutral, shape_of(rows.type), compute))  # fmt: skip
    total = s.insert(
        qc.ScatterOp(
            start := s.full(neutral, out, compute), _repeated(s, bags, 0, rows), rows, start.type, axis=0, reduce=fold
        )
    )
    empty = s.full(0, [out[0]], "i64")
    sizes = s.insert(qc.ScatterOp(empty, bags, keep, empty.type, axis=0, reduce="add"))
    result = _finish_bags(s, total, s.reshape(sizes, [out[0], 1]), int(a["mode"]))
    return (s.cast(result, dtype), None, None, None)


def _bag_of(s: Scope, count: Dim, offsets: V) -> V:
    """The bag of each of `count` rows: the number of bags that have begun, minus one."""
    bags = shape_of(offsets.type)[0]
    rows = s.iota(count, lambda m, i: i)
    inputs = [s.reshape(rows, [count, 1]), s.reshape(offsets, [1, bags])]

    def term(m: Scalars, row: V, begin: V) -> V:
        return m.select(m.compare("le", begin, row), m.const(1), m.const(0))

    begun = s.fold(inputs, [count, bags], (1,), "add", compute="i64", term=term)
    return s.pointwise([begun], lambda m, n: m.sub(n, m.const(1)), compute="i64", result="i64")


def _finish_bags(s: Scope, total: V, sizes: V, mode: int) -> V:
    """The mean's division; empty bags are 0."""
    compute: DType = tensor_dtype(total.type)
    assert compute in FLOATS

    def body(m: Scalars, value: V, size: V) -> V:
        filled = m.compare("gt", size, m.const(0))
        if mode == 1:
            value = m.div(value, m.maximum(size, m.const(1)))
        return m.select(filled, value, m.const(0))

    return s.pointwise([total, sizes], body, compute=compute, result=compute)
