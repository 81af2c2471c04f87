"""Lowers scans and orders to linalg: cumsum, sort, topk, argmax, route, top_p.

A place in an order is the number of entries that come before, so sorting is two loops over all pairs: quadratic, and
without control flow.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_attention import softmax_over
from qcompiler.ir.linalg_base import LinalgLowering, Rule, accumulator, dims, folded, indices, points, rounded
from qcompiler.ir.linalg_positions import fold_pair, fold_type
from qcompiler.ir.qc_index import RouteOp, TopPOp
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType
from qcompiler.plan.kinds.top_p import SHARE_BITS, SHARE_OF_ALL, WEIGHT_BITS

_WHOLE_BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8}


def _along(rank: int, axis: int) -> tuple[int, ...]:
    """Loops of an operand whose axis runs with the reduction loop."""
    return (*range(axis), rank, *range(axis + 1, rank))


# --- running folds ---------------------------------------------------------------------------------------------------


def _start_of(kind: str, acc: DType) -> float | int:
    if kind == "logaddexp":
        return float("-inf")
    if acc == "i1":
        return int(kind in ("mul", "min"))
    if acc in _WHOLE_BITS and kind in ("max", "min"):
        bits = _WHOLE_BITS[acc]
        return -(1 << (bits - 1)) if kind == "max" else (1 << (bits - 1)) - 1
    return {"add": 0, "mul": 1, "max": float("-inf"), "min": float("inf")}[kind]


def _cumsum(op: qc.CumsumOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """The fold of x[j] over all j <= i, in their order: simple and quadratic."""
    b, axis, shape = lowering.builder, op.axis.value.data, shape_of(op.x.type)
    dtype, rank = tensor_dtype(op.result.type), len(shape)
    acc = fold_type(dtype, op.x)

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        before = code.index(rank) <= code.index(axis)
        return where(before, fold_pair(op.fold, acc, s[1], s[0].to(acc)), s[1])

    made = folded(b, [(op.x, dims(*_along(rank, axis)))], shape, acc, body, start=_start_of(op.fold, acc))
    return [rounded(b, made, dtype)]


# --- orders ----------------------------------------------------------------------------------------------------------


def _comparable(value: Scalar) -> Scalar:
    """The entry as a type whose numbers compare: f32 for 16-bit floats, i32 for booleans."""
    if value.floats:
        return value.to("f64") if str(value.type) == "f64" else value.to("f32")
    return value.to("i32") if str(value.type) in ("i1", "ui8") else value


def _comes_before(a: Scalar, b: Scalar, *, descending: bool) -> Scalar:
    """Whether a stands strictly before b. NaN counts as the largest value."""
    if descending:
        a, b = b, a
    less = a < b
    return less | (b.is_nan() & a.is_nan().negated()) if a.floats else less


def ranks(b: Builder, x: SSAValue, axis: int, *, descending: bool) -> SSAValue:
    """The place of each entry in the stable order along an axis: i64, the shape of x."""
    shape = shape_of(x.type)
    rank = len(shape)

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        other, mine = _comparable(s[0]), _comparable(s[1])
        earlier = code.index(rank) < code.index(axis)
        level = (
            _comes_before(other, mine, descending=descending) | _comes_before(mine, other, descending=descending)
        ).negated()
        before = _comes_before(other, mine, descending=descending) | (level & earlier)
        return s[2] + before.to("i64")

    return folded(b, [(x, dims(*_along(rank, axis))), (x, dims(*range(rank)))], shape, "i64", body, start=0)


def ordered(b: Builder, x: SSAValue, axis: int, count: Dim, *, descending: bool) -> tuple[SSAValue, SSAValue]:
    """The first `count` entries in order along an axis, and their places (i64)."""
    places, shape = ranks(b, x, axis, descending=descending), list(shape_of(x.type))
    rank = len(shape)
    shape[axis] = count

    def found(code: Code, s: Sequence[Scalar]) -> Scalar:
        here = s[0].equals(code.index(axis).to("i64"))
        return where(here, code.index(rank).to("i64"), s[1])

    order = folded(b, [(places, dims(*_along(rank, axis)))], shape, "i64", found, start=0)
    return _picked(b, x, order, axis), order


def _picked(b: Builder, x: SSAValue, order: SSAValue, axis: int) -> SSAValue:
    shape = shape_of(order.type)

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        place = indices(code, len(shape))
        place[axis] = s[0].to("index")
        return code.read(x, *place)

    return points(b, [order], shape, tensor_dtype(x.type), body)


def _sort(op: qc.SortOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    axis, descending = op.axis.value.data, bool(op.descending.value.data)
    return ordered(lowering.builder, op.x, axis, shape_of(op.x.type)[axis], descending=descending)


def _topk(op: qc.TopkOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    return ordered(lowering.builder, op.x, op.axis.value.data, op.k.value.data, descending=True)


def first_largest(b: Builder, x: SSAValue, axis: int) -> SSAValue:
    """The index of the first maximum along an axis, which is dropped: i64. NaN is the largest value."""
    shape = shape_of(x.type)
    rank, out = len(shape), (*shape[:axis], *shape[axis + 1 :])
    wide: dict[str, DType] = {"i1": "i32", "ui8": "i32", "bf16": "f32", "f16": "f32"}
    x = rounded(b, x, wide.get(tensor_dtype(x.type), tensor_dtype(x.type)))
    peak = build.reduce(b, x, [axis], "max")
    loops = [*range(axis), rank - 1, *range(axis, rank - 1)]  # the axis is the reduction loop

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        mine = s[0].equals(s[1])
        mine = mine | s[0].is_nan() if s[0].floats else mine
        return s[2].minimum(where(mine, code.index(rank - 1).to("i64"), (1 << 63) - 1))

    reads = [(x, dims(*loops)), (peak, dims(*range(rank - 1)))]
    return folded(b, reads, out, "i64", body, start=(1 << 63) - 1)


def _argmax(op: qc.ArgmaxOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    return [first_largest(lowering.builder, op.x, op.axis.value.data)]


def _route(op: RouteOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, k = lowering.builder, op.k.value.data
    axis, acc = len(shape_of(op.x.type)) - 1, accumulator(op.x)
    scores = rounded(b, op.x, acc)
    if op.kind_of_scores == "all":
        weights, chosen = ordered(b, softmax_over(b, scores, axis, empty_rows=False), axis, k, descending=True)
    else:
        weights, chosen = ordered(b, scores, axis, k, descending=True)
        weights = softmax_over(b, weights, axis, empty_rows=False)
    if op.normalise is not None:
        total = build.reduce(b, weights, [axis], "add")
        shape = shape_of(weights.type)
        total = build.reshape(b, total, (*shape[:-1], 1))
        weights = points(b, [weights, total], shape, acc, lambda _, s: s[0] / s[1])
    return [rounded(b, weights, tensor_dtype(op.weights.type)), chosen]


# --- draws from probabilities ----------------------------------------------------------------------------------------


def part_of(total: Scalar, share: Scalar, bits: int) -> Scalar:
    """`total * share / 2^bits` of i64 numbers, in two halves, without overflow. The share is at most 2^bits."""
    mask = (1 << bits) - 1
    return (total >> bits) * share + ((total & mask) * share >> bits)


def row_sum(b: Builder, x: SSAValue) -> SSAValue:
    """The sums of rows of i64: (…, 1)."""
    shape = shape_of(x.type)
    total = build.reduce(b, x, [len(shape) - 1], "add")
    return build.reshape(b, total, (*shape[:-1], 1))


def first_beyond(b: Builder, weights: SSAValue, limit: SSAValue) -> SSAValue:
    """The first index of each row (…, n) at which the running sum is above `limit` (…, 1); 0 if there is none."""
    shape = shape_of(weights.type)
    rank = len(shape)

    def running(code: Code, s: Sequence[Scalar]) -> Scalar:
        return s[1] + where(code.index(rank) <= code.index(rank - 1), s[0], 0)

    sums = folded(b, [(weights, dims(*_along(rank, rank - 1)))], shape, "i64", running, start=0)
    largest = (1 << 63) - 1

    def first(code: Code, s: Sequence[Scalar]) -> Scalar:
        beyond = s[0] > code.read(limit, *indices(code, rank - 1), code.constant(0, "index"))
        return s[1].minimum(where(beyond, code.index(rank - 1).to("i64"), largest))

    found = folded(b, [(sums, dims(*range(rank)))], shape[:-1], "i64", first, start=largest)
    return points(b, [found], shape[:-1], "i64", lambda _, s: where(s[0].equals(largest), s[0].of(0), s[0]))


def _top_p(op: TopPOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, shape = lowering.builder, shape_of(op.x.type)
    rank, one = len(shape), (*shape[:-1], 1)

    def weight(_: Code, s: Sequence[Scalar]) -> Scalar:
        p = s[0].to("f32")
        return (where(p > 0, p.minimum(1.0), 0) * float(1 << WEIGHT_BITS)).to("i64")

    weights = points(b, [op.x], shape, "i64", weight)

    def share(_: Code, s: Sequence[Scalar]) -> Scalar:
        inside = where(s[0] > 0, s[0].minimum(1.0), 0)  # NaN counts as 0
        return (inside * float(SHARE_OF_ALL)).to("i64")

    top, draw = (build.reshape(b, points(b, [v], shape[:-1], "i64", share), one) for v in (op.top, op.draw))

    def at_least(_: Code, s: Sequence[Scalar]) -> Scalar:
        return s[2] + where(s[0] >= s[1], s[0], 0)

    reads = [(weights, dims(*_along(rank, rank - 1))), (weights, dims(*range(rank)))]
    heavier = folded(b, reads, shape, "i64", at_least, start=0)
    wanted = points(b, [row_sum(b, weights), top], one, "i64", lambda _, s: part_of(s[0], s[1], SHARE_BITS).maximum(1))
    enough = points(b, [weights, heavier, wanted], shape, "i64", lambda _, s: where(s[1] >= s[2], s[0], -1))
    least = build.reshape(b, build.reduce(b, enough, [rank - 1], "max"), one)
    kept = points(b, [weights, least], shape, "i64", lambda _, s: where(s[0] >= s[1], s[0], 0))
    beyond = points(
        b, [row_sum(b, kept), draw], one, "i64",
        lambda _, s: part_of(s[0], s[1].minimum(SHARE_OF_ALL - 1), SHARE_BITS),
    )  # fmt: skip
    return [first_beyond(b, kept, beyond)]


ORDERS: dict[type[Operation], Rule] = {
    qc.CumsumOp: _cumsum,
    qc.SortOp: _sort,
    qc.TopkOp: _topk,
    qc.ArgmaxOp: _argmax,
    RouteOp: _route,
    TopPOp: _top_p,
}
