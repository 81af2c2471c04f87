"""Nests that sum along one dim, and the dims that an access walks."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import FloatAttr
from xdsl.dialects.linalg import ops
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr

from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index


def reduced(op: ops.GenericOp) -> list[int]:
    """The loop dims that a nest folds."""
    return [n for n, each in enumerate(op.iterator_types.data) if each.data is IteratorType.REDUCTION]


def adds_from_zero(op: ops.GenericOp) -> bool:
    """Whether a nest folds one dim to one f32 result that begins at 0, and asks for no place in it."""
    if any(isinstance(each, ops.IndexOp) for each in op.body.block.ops):
        return False
    if len(op.res) != 1 or len(reduced(op)) != 1 or tensor_dtype(op.res[0].type) != "f32":
        return False
    start = op.outputs[0].owner
    zero = loops.constant_of(start.inputs[0]) if isinstance(start, ops.FillOp) else None
    return isinstance(zero, FloatAttr) and zero.value.data == 0.0


def dims_of(value: SSAValue, index: Index) -> list[int] | None:
    """The loop dims that index the value's dims of a size other than 1, in order. None for any other expression."""
    found = [expr for expr, size in zip(index, shape_of(value.type), strict=True) if size != 1]
    return [e.position for e in found if isinstance(e, AffineDimExpr)] if _all_dims(found) else None


def _all_dims(index: Sequence[object]) -> bool:
    return all(isinstance(expr, AffineDimExpr) for expr in index)
