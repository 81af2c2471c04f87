"""canonicalize: one spelling for what can be spelled in several ways, without changing a bit of any result.

    %1 = linalg.transpose %0 [1, 0]                    %2 = %0
    %2 = linalg.transpose %1 [1, 0]
    %4 = tensor.expand_shape (tensor.collapse_shape %3)     ->     one reshape of %3, or %3 itself
    %6 = arith.truncf (arith.extf %5 : bf16 to f32)                %5
    %9 = arith.mulf %7, %8 (two constants)                         arith.constant

A `linalg.generic` loses inputs that its body does not read, and one that only copies is replaced by its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import (
    AnyFloat,
    DenseArrayBase,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    Signedness,
    i64,
)
from xdsl.dialects.linalg.ops import BroadcastOp, GenericOp, TransposeOp, YieldOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineDimExpr
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.interpreter_scalar import constant_value, evaluate_scalar
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.checks.numerics import Exact, Numerics

Rule = Callable[[Any], SSAValue | None]


@dataclass(frozen=True)
class CanonicalizePass(ModulePass):
    """Folds views that cancel, casts that cancel, constants, and copies."""

    name = "canonicalize"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            canonicalize_block(function.body.block)


def canonicalize_block(block: Block) -> None:
    """Forward over the block, bodies first: by the time an op is looked at, its operands are in canonical form."""
    for op in list(block.ops):
        if op.parent is None:
            continue
        for region in op.regions:
            for inner in region.blocks:
                canonicalize_block(inner)
        if isinstance(op, GenericOp):
            op = _drop_unread_inputs(op)  # noqa: PLW2901
        rule = _RULES.get(type(op), _fold_constants)
        value = rule(op)
        if value is not None:
            op.results[0].replace_all_uses_with(value)
            erase_if_dead(op)


def _builder(op: Operation) -> Builder:
    return build.with_path(InsertPoint.before(op), path_of(op))


# --- views -----------------------------------------------------------------------------------------------------------


def _transpose(op: TransposeOp) -> SSAValue | None:
    permutation, source = [int(p) for p in op.permutation.get_values()], op.inputs[0]
    while isinstance(source.owner, TransposeOp):
        inner = source.owner.permutation.get_values()
        permutation, source = [int(inner[p]) for p in permutation], source.owner.inputs[0]
    if permutation == sorted(permutation):
        return source
    return None if source is op.inputs[0] else build.transpose(_builder(op), source, permutation)


def _reshape(op: tensor.CollapseShapeOp | tensor.ExpandShapeOp) -> SSAValue | None:
    source, count = op.src, 1
    while isinstance(source.owner, tensor.CollapseShapeOp | tensor.ExpandShapeOp):
        source, count = source.owner.src, count + 1
    if source.type == op.result.type:
        return source
    groups = build.reshape_groups(shape_of(source.type), shape_of(op.result.type))
    needed = any(s1 - s0 > 1 for (s0, s1), _ in groups) + any(t1 - t0 > 1 for _, (t0, t1) in groups)
    if count <= needed:
        return None
    return build.reshape(_builder(op), source, shape_of(op.result.type))


def _extract_slice(op: tensor.ExtractSliceOp) -> SSAValue | None:
    whole = op.source.type == op.result.type and not op.offsets and not op.strides
    if not whole or any(op.static_offsets.get_values()) or any(s != 1 for s in op.static_strides.get_values()):
        return None
    return op.source


def _broadcast(op: BroadcastOp) -> SSAValue | None:
    """No added dims: the input. A broadcast of a broadcast: one of both."""
    added, source = [int(d) for d in op.dimensions.get_values()], op.input
    if not added:
        return source
    if not isinstance(source.owner, BroadcastOp):
        return None
    kept = [axis for axis in range(len(shape_of(op.init.type))) if axis not in added]
    inner = {int(d) for d in source.owner.dimensions.get_values()}
    both = sorted([*added, *(axis for i, axis in enumerate(kept) if i in inner)])
    merged = BroadcastOp(source.owner.input, op.init, DenseArrayBase.from_list(i64, both))
    return _builder(op).insert(merged).results[0]


def _same_type(op: tensor.CastOp) -> SSAValue | None:
    return op.source if op.source.type == op.dest.type else None


def _concat(op: tensor.ConcatOp) -> SSAValue | None:
    return op.inputs[0] if len(op.inputs) == 1 else None


# --- scalars ---------------------------------------------------------------------------------------------------------


def _narrow(op: arith.TruncFOp | arith.TruncIOp) -> SSAValue | None:
    """Narrowing what was widened from the same type: exact. (Widening what was narrowed is not.)"""
    wider = op.input.owner
    if isinstance(wider, arith.ExtFOp | arith.ExtSIOp | arith.ExtUIOp) and wider.input.type == op.result.type:
        return wider.input
    return _fold_constants(op)


def _is_constant(value: SSAValue, number: float) -> bool:
    owner = value.owner
    if not isinstance(owner, arith.ConstantOp) or not isinstance(owner.value, IntegerAttr | FloatAttr):
        return False
    found = constant_value(owner)
    return bool(found == number) and bool(np.signbit(found) == np.signbit(np.asarray(number).astype(found.dtype)))


_NEUTRAL: dict[type[Operation], float] = {
    arith.MulfOp: 1.0, arith.DivfOp: 1.0, arith.SubfOp: 0.0, arith.AddfOp: -0.0,
    arith.MuliOp: 1, arith.AddiOp: 0, arith.SubiOp: 0,
}  # fmt: skip
"""The right operand that leaves the left one as it is, to the bit (x + 0.0 is not: it turns -0.0 into 0.0)."""


def _binary(op: Operation) -> SSAValue | None:
    if _is_constant(op.operands[1], _NEUTRAL[type(op)]):
        return op.operands[0]
    commutes = isinstance(op, arith.MulfOp | arith.AddfOp | arith.MuliOp | arith.AddiOp)
    if commutes and _is_constant(op.operands[0], _NEUTRAL[type(op)]):
        return op.operands[1]
    return _fold_constants(op)


def _select(op: arith.SelectOp) -> SSAValue | None:
    if op.lhs is op.rhs or _is_constant(op.cond, 1):
        return op.lhs
    return op.rhs if _is_constant(op.cond, 0) else None


def _fold_constants(op: Operation) -> SSAValue | None:
    """A scalar op whose operands are all constants, by the interpreter's own table."""
    if not op.operands or not op.name.startswith(("arith.", "math.")) or len(op.results) != 1:
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
    return _builder(op).insert(arith.ConstantOp(attribute)).result


# --- linalg.generic --------------------------------------------------------------------------------------------------


def _drop_unread_inputs(op: GenericOp) -> GenericOp:
    """The op without inputs whose scalar its body does not read, unless the loops' sizes come from them alone."""
    maps = [attribute.data for attribute in op.indexing_maps]
    count = len(op.inputs)
    kept = [i for i in range(count) if op.body.block.args[i].first_use is not None]
    sizing = [expr for i in [*kept, *range(count, len(maps))] for expr in maps[i].results]
    covered = {expr.position for expr in sizing if isinstance(expr, AffineDimExpr)}  # 2 * d0 + d1 sizes neither loop
    if len(kept) == count or len(covered) < maps[0].num_dims:
        return op
    for i in reversed(range(count)):
        if i not in kept:
            op.body.block.erase_arg(op.body.block.args[i])
    remaining = [op.indexing_maps.data[i] for i in [*kept, *range(count, len(maps))]]
    body = op.detach_region(op.body)
    smaller = GenericOp(
        [op.inputs[i] for i in kept], list(op.outputs), body, remaining, op.iterator_types,
        [result.type for result in op.results], op.doc, op.library_call,
    )  # fmt: skip
    smaller.attributes = dict(op.attributes)
    block = op.parent
    assert block is not None
    block.insert_op_before(smaller, op)
    for old, new in zip(op.results, smaller.results, strict=True):
        old.replace_all_uses_with(new)
    block.erase_op(op)
    return smaller


def _generic(op: GenericOp) -> SSAValue | None:
    """A body that yields its input under identity maps is that input."""
    last = op.body.block.last_op
    if len(op.results) != 1 or not isinstance(last, YieldOp) or last.prev_op is not None:
        return None
    for i, value in enumerate(op.inputs):
        if last.operands[0] is op.body.block.args[i] and value.type == op.results[0].type:
            same = op.indexing_maps.data[i] == op.indexing_maps.data[-1]
            return value if same and not any(k.data == "reduction" for k in op.iterator_types) else None
    return None


_RULES: dict[type[Operation], Rule] = {
    TransposeOp: _transpose,
    tensor.CollapseShapeOp: _reshape,
    tensor.ExpandShapeOp: _reshape,
    tensor.ExtractSliceOp: _extract_slice,
    BroadcastOp: _broadcast,
    tensor.CastOp: _same_type,
    tensor.ConcatOp: _concat,
    arith.TruncFOp: _narrow,
    arith.TruncIOp: _narrow,
    arith.SelectOp: _select,
    GenericOp: _generic,
    **dict.fromkeys(_NEUTRAL, _binary),
}
