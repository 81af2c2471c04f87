"""Lowers softmax and attention to linalg."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IndexType, IntegerType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Operation, SSAValue

from qcompiler.errors import QCompilerError
from qcompiler.formats import cache_rows
from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import (
    LinalgLowering,
    Rule,
    Scalars,
    accumulator,
    beside,
    contract,
    convert,
    dims,
    rounded,
)
from qcompiler.ir.linalg_rows import cache_values
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.kernel import DType


def softmax_over(b: Builder, x: SSAValue, axis: int, *, empty_rows: bool, sinks: SSAValue | None = None) -> SSAValue:
    """exp(x - max) / sum in the type of `x`; with `empty_rows` a row of -inf gives zeros instead of NaN. `sinks`, with
    size 1 along the axis, are one more number of each row, of which there is no result."""
    acc = tensor_dtype(x.type)
    peak = build.reduce(b, x, [axis], "max")
    lone = None
    if sinks is not None:
        rows = shape_of(peak.type)
        lone = build.broadcast_to(b, sinks, [1 if n == axis else size for n, size in enumerate(shape_of(x.type))])
        lone = rounded(b, build.reshape(b, lone, rows), acc)
        peak = build.pointwise(b, [peak, lone], rows, acc, lambda i, s: i.insert(arith.MaximumfOp(s[0], s[1])).result)

    def shifted(i: Builder, s: Scalars) -> Operation:
        top = _unless_lowest(i, s[1], acc) if empty_rows else s[1]
        return i.insert(math.ExpOp(i.insert(arith.SubfOp(s[0], top)).result))

    powers = beside(b, [x], [peak], axis, acc, shifted)
    total = build.reduce(b, powers, [axis], "add")
    if lone is not None:
        parts = [total, lone, peak]
        total = build.pointwise(b, parts, shape_of(total.type), acc, lambda i, s: _with_sink(i, s, acc).result)

    def divided(i: Builder, s: Scalars) -> Operation:
        bottom = s[1]
        if empty_rows:
            nothing = i.insert(arith.CmpfOp(bottom, build.scalar(i, 0.0, acc), "oeq")).result
            bottom = i.insert(arith.SelectOp(nothing, build.scalar(i, 1.0, acc), bottom)).result
        return i.insert(arith.DivfOp(s[0], bottom))

    return beside(b, [powers], [total], axis, acc, divided)


def _with_sink(i: Builder, s: Scalars, acc: DType) -> arith.AddfOp:
    """The total of the weights and of exp(sink - max); a maximum of -inf shifts nothing."""
    total, sink, peak, *_ = s
    shifted = i.insert(arith.SubfOp(sink, _unless_lowest(i, peak, acc)))
    return i.insert(arith.AddfOp(total, i.insert(math.ExpOp(shifted.result)).result))


def _unless_lowest(i: Builder, peak: SSAValue, acc: DType) -> SSAValue:
    """The maximum of a row; 0 if the row is all -inf."""
    nothing = i.insert(arith.CmpfOp(peak, build.scalar(i, float("-inf"), acc), "oeq")).result
    return i.insert(arith.SelectOp(nothing, build.scalar(i, 0.0, acc), peak)).result


def _softmax(op: qc.SoftmaxOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, accumulator(op.x)
    out = softmax_over(b, rounded(b, op.x, acc), op.axis.value.data, empty_rows=False)
    return [rounded(b, out, tensor_dtype(op.result.type))]


def _attention(op: qc.AttentionOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, keys, values = lowering.builder, op.k, op.v
    if op.parts is not None:
        why = "split-attention divided its keys for the kernels of a GPU: take the text of a stage before that one"
        raise QCompilerError(f"{op.name} at '{path_of(op) or '?'}' cannot be lowered to linalg: {why}")
    if op.rows_of is not None:
        kind, sizes = cache_rows.kind_of(op.rows_of), (shape_of(op.q.type)[3], shape_of(op.result.type)[3])
        keys, values = (cache_values(b, rows, int(n), kind) for rows, n in zip((keys, values), sizes, strict=True))
    acc = accumulator(op.q, keys, values)
    q, k, v = (shape_of(t.type) for t in (op.q, keys, values))
    full, shared = (q[0], q[1], q[2], k[2]), (q[0], k[1], int(q[1]) // int(k[1]), q[2])
    # loops: batch, head of keys, query's head among those that share it, query, key, then the columns of a head
    grouped = build.reshape(b, op.q, (*shared, q[3]))
    scores = contract(b, [grouped, keys], [dims(0, 1, 2, 3, 5), dims(0, 1, 4, 5)], (*shared, k[2]), acc)
    scores = build.reshape(b, scores, full)
    masks = [op.mask] if op.mask is not None else []
    lasts = []
    if op.last is not None:
        batch, queries = shape_of(op.last.type)
        lasts = [build.reshape(b, op.last, (batch, 1, queries, 1))]

    def masked(i: Builder, s: Scalars) -> SSAValue:
        score = i.insert(arith.MulfOp(s[0], build.scalar(i, op.scale.value.data, acc))).result
        if op.cap is not None:
            cap = build.scalar(i, op.cap, acc)
            capped = i.insert(math.TanhOp(i.insert(arith.DivfOp(score, cap)).result)).result
            score = i.insert(arith.MulfOp(cap, capped)).result
        lowest = build.scalar(i, float("-inf"), acc)
        if masks:
            if isinstance(s[1].type, IntegerType):
                score = i.insert(arith.SelectOp(s[1], score, lowest)).result
            else:
                score = i.insert(arith.AddfOp(score, convert(i, s[1], acc))).result
        row: SSAValue = i.insert(IndexOp(2)).result
        column = i.insert(IndexOp(3)).result
        if lasts:
            row = i.insert(arith.IndexCastOp(s[-2], IndexType())).result  # behind it is the output
        return _visible(i, op, score, lowest, row, column)

    scores = build.pointwise(b, [scores, *masks, *lasts], full, acc, masked)
    weights = softmax_over(b, scores, 3, empty_rows=True, sinks=op.sinks)
    # loops: as before, with the columns of a value instead of keys, then keys
    grouped = build.reshape(b, weights, (*shared, k[2]))
    total = contract(b, [grouped, values], [dims(0, 1, 2, 3, 5), dims(0, 1, 5, 4)], (*shared, v[3]), acc)
    return [rounded(b, build.reshape(b, total, shape_of(op.result.type)), tensor_dtype(op.result.type))]


def _visible(
    i: Builder, op: qc.AttentionOp, score: SSAValue, hidden: SSAValue, row: SSAValue, column: SSAValue
) -> SSAValue:
    """`score`, or `hidden` if the query at position `row` does not see the key."""
    if op.causal is not None or op.last is not None:
        score = i.insert(arith.SelectOp(i.insert(arith.CmpiOp(column, row, "sle")).result, score, hidden)).result
    if op.ring is not None and op.keys_back is not None:
        behind = i.insert(arith.SubiOp(row, column)).result  # keys behind the query are hidden already
        behind = i.insert(arith.RemSIOp(behind, build.index_constant(i, int(shape_of(op.k.type)[2])))).result
        near = i.insert(arith.CmpiOp(behind, build.index_constant(i, op.keys_back), "slt")).result
        return i.insert(arith.SelectOp(near, score, hidden)).result
    if op.keys_back is not None:
        ahead = i.insert(arith.AddiOp(column, build.index_constant(i, op.keys_back))).result
        near = i.insert(arith.CmpiOp(ahead, row, "sgt")).result
        score = i.insert(arith.SelectOp(near, score, hidden)).result
    return score


ATTENTION: dict[type[Operation], Rule] = {qc.SoftmaxOp: _softmax, qc.AttentionOp: _attention}
