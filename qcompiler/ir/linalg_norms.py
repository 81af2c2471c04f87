"""Lowers norms, and statistics of rows, to linalg."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineMap

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import (
    LinalgLowering,
    Rule,
    Scalars,
    accumulator,
    beside,
    convert,
    dims,
    groups_folded,
    indices,
    mean_of,
    points,
    rounded,
)
from qcompiler.ir.qc_norm import kind_of
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.kernel import DType
from qcompiler.plan.row_statistics import GROUP


def _scaled(
    b: Builder, x: SSAValue, spread: SSAValue, affine: Sequence[SSAValue | None], eps: float, dtype: DType
) -> SSAValue:
    """`x / sqrt(spread + eps) * weight + bias`, rounded; `spread` lacks the last dim."""
    shape, acc = shape_of(x.type), tensor_dtype(x.type)
    rank = len(shape)
    given = [value for value in affine if value is not None]
    maps = [AffineMap.identity(rank), AffineMap(rank, 0, dims(*range(rank - 1)))]
    maps += [AffineMap(rank, 0, dims(rank - 1))] * len(given) + [AffineMap.identity(rank)]

    def body(i: Builder, s: Scalars) -> SSAValue:
        total = i.insert(arith.AddfOp(s[1], build.scalar(i, eps, acc))).result
        value = i.insert(arith.DivfOp(s[0], i.insert(math.SqrtOp(total)).result)).result
        rest = list(s[2:-1])
        if affine[0] is not None:
            value = i.insert(arith.MulfOp(value, convert(i, rest.pop(0), acc))).result
        if len(affine) > 1 and affine[1] is not None:
            value = i.insert(arith.AddfOp(value, convert(i, rest.pop(0), acc))).result
        return convert(i, value, dtype)

    return build.generic(b, [x, spread, *given], maps, shape, dtype, ["parallel"] * rank, body)


def _mean_square(b: Builder, x: SSAValue) -> SSAValue:
    shape, acc = shape_of(x.type), tensor_dtype(x.type)
    squares = build.pointwise(b, [x], shape, acc, lambda i, s: i.insert(arith.MulfOp(s[0], s[0])))
    return mean_of(b, build.reduce(b, squares, [len(shape) - 1], "add"), shape[-1], acc)


def _layer_norm(op: qc.LayerNormOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, accumulator(op.x)
    x, axis = rounded(b, op.x, acc), len(shape_of(op.x.type)) - 1
    if op.statistics is None:
        mean = mean_of(b, build.reduce(b, x, [axis], "add"), shape_of(x.type)[-1], acc)
    else:
        mean, square = _given(b, op, op.statistics)
    centred = beside(b, [x], [mean], axis, acc, lambda i, s: i.insert(arith.SubfOp(s[0], convert(i, s[1], acc))))
    if op.statistics is None:
        square = _mean_square(b, centred)
    affine, dtype = [op.weight, op.bias], tensor_dtype(op.result.type)
    return [_added(b, op, _scaled(b, centred, square, affine, op.eps.value.data, dtype))]


def _rms_norm(op: qc.RmsNormOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, accumulator(op.x)
    x = rounded(b, op.x, acc)
    square = _mean_square(b, x) if op.statistics is None else _given(b, op, op.statistics)[1]
    made = _scaled(b, x, square, [op.weight], op.eps.value.data, tensor_dtype(op.result.type))
    return [_added(b, op, made)]


def _added(b: Builder, op: qc.LayerNormOp | qc.RmsNormOp, norm: SSAValue) -> SSAValue:
    """The norm, added to its residual if it has one."""
    if op.residual is None:
        return norm
    dtype, acc = tensor_dtype(norm.type), accumulator(op.x)
    return points(
        b, [op.residual, norm], shape_of(norm.type), dtype, lambda _, s: (s[0].to(acc) + s[1].to(acc)).to(dtype)
    )


# --- statistics of rows in parts (plan/row_statistics.py) ------------------------------------------------------------


def _count(code: Code, group: Scalar, columns: int) -> Scalar:
    """The number of elements in a group, as a float."""
    return (code.constant(columns, "index") - group * GROUP).minimum(GROUP).to("f32")


def _given(b: Builder, op: qc.LayerNormOp | qc.RmsNormOp, parts: SSAValue) -> tuple[SSAValue, SSAValue]:
    """The mean, and the mean square of the distances from it, of rows whose statistics are given, both f32 (…)."""
    *lead, _ = shape_of(parts.type)
    rank, columns = len(lead), int(shape_of(op.x.type)[-1])
    if kind_of(op) == "rms":
        total = build.reduce(b, parts, [rank], "add")
        return total, mean_of(b, total, columns, "f32")
    groups = (*lead, -(-columns // GROUP))

    def weighted(code: Code, _: Sequence[Scalar]) -> Scalar:
        group = code.index(rank)
        return _count(code, group, columns) * code.read(parts, *indices(code, rank), group * 2)

    mean = mean_of(b, build.reduce(b, points(b, [], groups, "f32", weighted), [rank], "add"), columns, "f32")

    def spread(code: Code, _: Sequence[Scalar]) -> Scalar:
        place, group = indices(code, rank), code.index(rank)
        middle, square = (code.read(parts, *place, group * 2 + n) for n in (0, 1))
        distance = middle - code.read(mean, *place)
        return square + _count(code, group, columns) * (distance * distance)

    total = build.reduce(b, points(b, [], groups, "f32", spread), [rank], "add")
    return mean, mean_of(b, total, columns, "f32")


def parts_of(b: Builder, rows: SSAValue, kind: str) -> SSAValue:
    """The statistics, in parts, of rows (…, columns)."""
    if kind == "rms":
        return groups_folded(b, rows, GROUP, "f32", lambda _, s: s[1] + s[0] * s[0])
    *lead, size = shape_of(rows.type)
    rank, columns = len(lead), int(size)
    total = groups_folded(b, rows, GROUP, "f32", lambda _, s: s[1] + s[0])
    groups = shape_of(total.type)
    mean = points(b, [total], groups, "f32", lambda code, s: s[0] / _count(code, code.index(rank), columns))

    def squared(code: Code, s: Sequence[Scalar]) -> Scalar:
        distance = s[0] - code.read(mean, *indices(code, rank + 1))
        return s[1] + distance * distance

    square = groups_folded(b, rows, GROUP, "f32", squared)

    def both(code: Code, _: Sequence[Scalar]) -> Scalar:
        place, number = indices(code, rank), code.index(rank)
        first, second = (code.read(each, *place, number // 2) for each in (mean, square))
        return where((number % 2).equals(0), first, second)

    return points(b, [], (*lead, 2 * int(groups[-1])), "f32", both)


NORMS: dict[type[Operation], Rule] = {qc.LayerNormOp: _layer_norm, qc.RmsNormOp: _rms_norm}
