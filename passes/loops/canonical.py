"""Canonical loop nests: constants, neutral operands and casts in bodies, unread inputs, nests that only copy."""

from __future__ import annotations

import numpy as np
from xdsl.dialects import arith
from xdsl.dialects.builtin import AnyFloat, FloatAttr, IndexType, IntegerAttr, IntegerType, Signedness
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation, SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir.interpreter_scalar import constant_value, evaluate_scalar
from qcompiler.ir.scalar_ops import SCALAR_OPS
from qcompiler.passes.loops import loops
from qcompiler.passes.rewriting import Pattern, pattern


@pattern
def drop_widening(op: arith.TruncFOp | arith.TruncIOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Narrowing what was widened from the same type is exact. (Widening what was narrowed is not.)"""
    wider = op.input.owner
    if not isinstance(wider, arith.ExtFOp | arith.ExtSIOp | arith.ExtUIOp):
        return None
    return wider.input if wider.input.type == op.result.type else None


def _is_constant(value: SSAValue, number: float) -> bool:
    owner = value.owner
    if not isinstance(owner, arith.ConstantOp) or not isinstance(owner.value, IntegerAttr | FloatAttr):
        return False
    found = constant_value(owner)
    return bool(found == number) and bool(np.signbit(found) == np.signbit(np.asarray(number).astype(found.dtype)))


_NEUTRAL: dict[type[Operation], float] = {
    arith.MulfOp: 1.0, arith.DivfOp: 1.0, arith.SubfOp: 0.0, arith.AddfOp: -0.0,
    arith.MuliOp: 1, arith.AddiOp: 0, arith.SubiOp: 0,
    arith.MaximumfOp: float("-inf"), arith.MinimumfOp: float("inf"),
}  # fmt: skip
"""The right operand that leaves the left one as it is, to the bit (x + 0.0 is not: it turns -0.0 into 0.0)."""
_COMMUTE = (arith.MulfOp, arith.AddfOp, arith.MuliOp, arith.AddiOp, arith.MaximumfOp, arith.MinimumfOp)


def _drop_neutral(op: Operation, rewriter: PatternRewriter) -> SSAValue | None:
    """An operation with its neutral element is its other operand."""
    neutral = _NEUTRAL[type(op)]
    if _is_constant(op.operands[1], neutral):
        return op.operands[0]
    return op.operands[1] if isinstance(op, _COMMUTE) and _is_constant(op.operands[0], neutral) else None


@pattern
def decide_select(op: arith.SelectOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A choice between two equal values, or by a constant."""
    if op.lhs is op.rhs or _is_constant(op.cond, 1):
        return op.lhs
    return op.rhs if _is_constant(op.cond, 0) else None


def _fold_constants(op: Operation, rewriter: PatternRewriter) -> SSAValue | None:
    """A scalar op whose operands are all constants, by the interpreter's own table."""
    if not op.operands or len(op.results) != 1:
        return None
    owners = [value.owner for value in op.operands]
    if not all(isinstance(o, arith.ConstantOp) and isinstance(o.value, IntegerAttr | FloatAttr) for o in owners):
        return None
    with np.errstate(all="ignore"):
        value = evaluate_scalar(op, tuple(constant_value(o) for o in owners if isinstance(o, arith.ConstantOp)))
    type_ = op.results[0].type
    if value is None or not isinstance(type_, AnyFloat | IntegerType | IndexType):
        return None
    if isinstance(type_, IntegerType) and type_.signedness.data != Signedness.SIGNLESS:
        return None  # a ui8: arith has no constants of that type, only the bitcast of one
    attribute = FloatAttr(float(value), type_) if isinstance(type_, AnyFloat) else IntegerAttr(int(value), type_)
    return rewriter.insert(arith.ConstantOp(attribute)).result


drop_neutral = Pattern(_drop_neutral, _NEUTRAL)
fold_constants = Pattern(_fold_constants, SCALAR_OPS)


# --- nests ------------------------------------------------------------------------------------------------------------


@pattern
def drop_unread_inputs(op: ops.GenericOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Inputs whose scalar the body does not read go, unless the loops' sizes come from them alone."""
    inputs = list(zip(loops.inputs_of(op), op.body.block.args, strict=False))
    kept = [entry for entry, argument in inputs if argument.first_use is not None]
    if len(kept) == len(inputs) or not op.results or not loops.keeps_extents(op, kept):
        return None
    for _, argument in inputs:
        if argument.first_use is None:
            op.body.block.erase_arg(argument)
    loops.set_inputs(op, kept)
    return op.results[0]


@pattern
def drop_copy(op: ops.GenericOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A body that yields an input which is read where the result is written: the nest is that input."""
    last = op.body.block.last_op
    if len(op.results) != 1 or not isinstance(last, ops.YieldOp) or last.prev_op is not None:
        return None
    for (value, index), argument in zip(loops.inputs_of(op), op.body.block.args, strict=False):
        if last.operands[0] is argument and value.type == op.results[0].type:
            return value if index == loops.output_index(op) and loops.is_parallel(op) else None
    return None


PATTERNS = (drop_widening, drop_neutral, decide_select, fold_constants, drop_unread_inputs, drop_copy)
