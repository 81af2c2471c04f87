"""Orders and running folds of ATen: sort, top-k, medians, searches in sorted rows, histograms, cumulative operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from xdsl.ir import Operation, SSAValue

from qcompiler.frontends.common.loops import round_number
from qcompiler.frontends.common.scalars import FLOATS, Scalars, cast, opmath
from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, Shape, lowers, overload
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
V = SSAValue

# --- sort and top-k --------------------------------------------------------------------------------------------------


def sort(s: Scope, x: V, axis: int, *, descending: bool = False) -> tuple[V, V]:
    """Values and positions along an axis, stable, NaN the largest; rank 0 is sorted already."""
    shape = shape_of(x.type)
    if not shape:
        return x, s.full(0, [], "i64")
    op = qc.SortOp(x, [x.type, types.tensor(shape, "i64")], axis=axis % len(shape), descending=descending)
    return _pair(s.builder.insert(op))


def _pair(op: Operation) -> tuple[V, V]:
    return op.results[0], op.results[1]


@lowers(aten.sort.default, aten.sort.stable)
def _sort(s: Scope, node: fx.Node, a: Args) -> Result:
    return sort(s, s.value(a["self"]), a["dim"], descending=bool(a["descending"]))


@lowers(aten.argsort.default, aten.argsort.stable)
def _argsort(s: Scope, node: fx.Node, a: Args) -> Result:
    return sort(s, s.value(a["self"]), a["dim"], descending=bool(a["descending"]))[1]


@lowers(aten.topk.default)
def _topk(s: Scope, node: fx.Node, a: Args) -> Result:
    """The k largest, best first, also with sorted=False. The k smallest are the start of the sorted row."""
    x, k = s.value(a["self"]), s.dim(a["k"])
    shape = shape_of(x.type)
    if not shape:
        return x, s.full(0, [], "i64")
    axis = a["dim"] % len(shape)
    if not a["largest"] or not isinstance(k, int) or k == 0:
        values, indices = sort(s, x, axis, descending=bool(a["largest"]))
        return s.slice(values, axis, 0, k), s.slice(indices, axis, 0, k)
    out = (*shape[:axis], k, *shape[axis + 1 :])
    kinds = [types.tensor(out, tensor_dtype(x.type)), types.tensor(out, "i64")]
    return _pair(s.builder.insert(qc.TopkOp(x, kinds, k=k, axis=axis)))


@lowers(aten.kthvalue.default)
def _kthvalue(s: Scope, node: fx.Node, a: Args) -> Result:
    x = s.value(a["self"])
    values, indices = sort(s, x, a["dim"])
    if shape_of(x.type):
        axis = a["dim"] % len(shape_of(x.type))
        values, indices = (s.slice(v, axis, int(a["k"]) - 1, 1) for v in (values, indices))
    shape = s.symbols.shape(node.meta["val"][0].shape)
    return s.reshape(values, shape), s.reshape(indices, shape)


# --- medians ---------------------------------------------------------------------------------------------------------


@lowers(aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim)
def _median(s: Scope, node: fx.Node, a: Args) -> Result:
    """The lower of two middle values. `median` of a row with NaN is its first NaN; `nanmedian` does not count NaN."""
    x = s.value(a["self"])
    ignore = overload(node).startswith("nanmedian")
    if "dim" not in a or not shape_of(x.type):
        flat = s.reshape(x, [product(shape_of(x.type)).to_dim()])
        value, index = (s.reshape(v, []) for v in _median_along(s, flat, 0, ignore))
        return value if "dim" not in a else (value, index)
    axis = a["dim"] % len(shape_of(x.type))
    shape = s.symbols.shape(node.meta["val"][0].shape)
    value, index = _median_along(s, x, axis, ignore)
    return s.reshape(value, shape), s.reshape(index, shape)


def _median_along(s: Scope, x: V, axis: int, ignore: bool) -> tuple[V, V]:
    """Values and positions; the axis stays with size 1."""
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    values, order = sort(s, x, axis)
    last = (dim(shape[axis]) - 1).to_dim()
    if dtype not in FLOATS:
        middle = (dim(last) // 2).to_dim()
        return s.slice(values, axis, middle, 1), s.slice(order, axis, middle, 1)

    element = opmath(dtype)

    def one_for_nan(m: Scalars, value: V) -> V:
        return m.select(Scalars(m.builder, element).is_nan(value), m.const(1), m.const(0))

    missing = s.fold([x], shape, (axis,), "add", compute="i64", elements=element, term=one_for_nan)
    missing = s.keep_axes(missing, shape, (axis,))

    def place(m: Scalars, nans: V, end: V) -> V:
        """The middle of the values that count; if NaN counts, the first NaN (NaNs are at the end of the sorted row)."""
        if ignore:
            return m.maximum(m.div(m.sub(end, nans), m.const(2)), m.const(0))
        first_nan = m.add(m.sub(end, nans), m.const(1))
        return m.select(m.compare("gt", nans, m.const(0)), first_nan, m.div(end, m.const(2)))

    at = s.pointwise([missing, s.extent(last)], place, compute="i64", result="i64")
    return _along(s, values, at, axis), _along(s, order, at, axis)


def _along(s: Scope, x: V, index: V, axis: int) -> V:
    type_ = types.tensor(shape_of(index.type), tensor_dtype(x.type))
    return s.insert(qc.GatherOp(x, index, type_, axis=axis, mode="along"))


# --- searches and histograms -----------------------------------------------------------------------------------------


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(s: Scope, node: fx.Node, a: Args) -> Result:
    return _search(s, node, a["self"], s.value(a["boundaries"]), bool(a["right"]))


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(s: Scope, node: fx.Node, a: Args) -> Result:
    if a.get("sorter") is not None:
        raise s.unsupported(node, "a sorter; sort the sequence first: sequence.gather(-1, sorter)")
    right = bool(a["right"]) or a.get("side") == "right"
    return _search(s, node, a["self"], s.value(a["sorted_sequence"]), right)


def _search(s: Scope, node: fx.Node, values: Any, edges: V, right: bool) -> V:
    """The number of edges before each value: those that are not >= it (not > it, from the right), as a binary search.

    The whole row is counted: no search branches on data, and rows of edges are short.
    """
    x = s.value(values) if isinstance(values, fx.Node) else s.full(values, [], tensor_dtype(edges.type))
    common = opmath(_promoted(tensor_dtype(x.type), tensor_dtype(edges.type)))
    shape = shape_of(x.type)
    row = shape_of(edges.type)
    wide: Shape = (*shape, row[-1])
    if len(row) == 1:
        spread = s.reshape(edges, [*([1] * len(shape)), row[0]])
    else:
        spread = s.reshape(edges, [*row[:-1], 1, row[-1]])

    def term(m: Scalars, value: V, edge: V) -> V:
        numbers = Scalars(m.builder, common)
        before = numbers.compare("gt" if right else "ge", edge, value)
        return m.select(before, m.const(0), m.const(1))

    inputs = [s.reshape(x, [*shape, 1]), spread]
    found = s.fold(inputs, wide, (len(shape),), "add", compute="i64", elements=common, term=term)
    return s.cast(s.reshape(found, s.shape(node)), s.dtype(node))


def _promoted(x: DType, y: DType) -> DType:
    floats = [d for d in (x, y) if d in FLOATS]
    if len(floats) == 1:
        return floats[0]
    return "f64" if "f64" in (x, y) else "f32" if floats and x != y else x if x == y else "i64"


@lowers(aten.histc.default)
def _histc(s: Scope, node: fx.Node, a: Args) -> Result:
    """Counts in equal bins of [min, max]; every bin reads every value. torch rounds each step to x's type."""
    low, high, bins = float(a["min"]), float(a["max"]), int(a["bins"])
    if low == high:
        raise s.unsupported(node, "bins over the range of the data; give min and max")
    x = s.value(a["self"])
    flat = s.reshape(x, [1, product(shape_of(x.type)).to_dim()])
    dtype = tensor_dtype(x.type)
    compute = opmath(dtype)
    compute = compute if compute in FLOATS else "f64"
    if dtype in ("bf16", "f16"):
        low, high = float(round_number(low, dtype)), float(round_number(high, dtype))

    def term(m: Scalars, value: V) -> V:
        def narrow(value: V) -> V:
            return cast(m.builder, cast(m.builder, value, dtype), m.dtype) if dtype in ("bf16", "f16") else value

        inside = m.bitwise("and", m.compare("ge", value, m.const(low)), m.compare("le", value, m.const(high)))
        scaled = narrow(m.mul(narrow(m.sub(value, m.const(low))), narrow(m.const(bins))))
        place = narrow(m.div(scaled, narrow(m.const(high - low))))
        last = m.minimum(m.call("floor", place), m.const(bins - 1))
        hit = m.bitwise("and", inside, m.compare("eq", last, m.index(0)))
        return m.select(hit, m.const(1), m.const(0))

    sized = s.full(0, [bins, 1], "i1")  # determines the size of the loop over bins
    shape = [bins, shape_of(flat.type)[1]]
    counted = s.fold([flat, sized], shape, (1,), "add", compute=compute, term=lambda m, v, _: term(m, v))
    return s.cast(counted, s.dtype(node))


# --- running folds ---------------------------------------------------------------------------------------------------


@lowers(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
def _running(s: Scope, node: fx.Node, a: Args) -> Result:
    """Accumulates in the opmath of the result's type and rounds at the end."""
    folds = {"cumsum": "add", "cumprod": "mul", "logcumsumexp": "logaddexp"}
    dtype = s.dtype(node)
    x = s.cast(s.value(a["self"]), opmath(dtype))
    return s.cast(_scan(s, x, a["dim"], folds[overload(node).partition(".")[0]]), dtype)


def _scan(s: Scope, x: V, axis: int, fold: str) -> V:
    rank = len(shape_of(x.type))
    return s.insert(qc.CumsumOp(x, x.type, axis=axis % rank, reduce=fold)) if rank else x


@lowers(aten.cummax.default, aten.cummin.default)
def _running_extreme(s: Scope, node: fx.Node, a: Args) -> Result:
    """The extreme so far, and the last position that has it: the running maximum of the positions of hits."""
    x = s.value(a["self"])
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    if not shape:
        return x, s.full(0, [], "i64")
    axis = a["dim"] % len(shape)
    best = _scan(s, x, axis, "max" if overload(node).startswith("cummax") else "min")
    compute = opmath(dtype)

    def position(m: Scalars, value: V, extreme: V) -> V:
        hit = m.compare("eq", value, extreme)
        if m.floating:
            hit = m.bitwise("or", hit, m.is_nan(value))
        number = Scalars(m.builder, "i64")
        return number.select(hit, number.index(axis), number.const(0))

    hits = s.pointwise([x, best], position, compute=compute, result="i64")
    return best, _scan(s, hits, axis, "max")
