"""Operands read over another tensor's dims, as views with one dim for each of those, of size 1 where the operand
repeats."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.loops.loops import Index, dim_expr
from qcompiler.plan.dims import Dim


def can_be_extra(value: SSAValue, index: Index) -> bool:
    """Whether `index` uses each dim of the result at most once, and reads every other dim at 0 of size 1."""
    if not isinstance(value.type, TensorType):
        return False
    positions = [e.position for e in index if isinstance(e, AffineDimExpr)]
    shape = shape_of(value.type)
    units = all(
        isinstance(e, AffineDimExpr) or (isinstance(e, AffineConstantExpr) and e.value == 0 and size == 1)
        for e, size in zip(index, shape, strict=True)
    )
    return units and len(set(positions)) == len(positions)


def as_extra(before: Operation, value: SSAValue, index: Index, out_shape: Sequence[Dim]) -> SSAValue:
    """`value` as a view with one dim per dim of the result, of size 1 where it repeats. Made before the op `before`."""
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    if len(index) == len(out_shape) and all(
        isinstance(e, AffineConstantExpr) or e == dim_expr(n) for n, e in enumerate(index)
    ):
        return value
    kept = [(n, e.position) for n, e in enumerate(index) if isinstance(e, AffineDimExpr)]
    shape = shape_of(value.type)
    source = build.reshape(builder, value, [shape[n] for n, _ in kept])
    order = sorted(range(len(kept)), key=lambda n: kept[n][1])
    source = build.transpose(builder, source, order)
    axes = {position for _, position in kept}
    by_axis = {position: shape[n] for n, position in kept}
    return build.reshape(builder, source, [by_axis[n] if n in axes else 1 for n in range(len(out_shape))])
