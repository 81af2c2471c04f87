"""linalg.generic after fusion, and a linalg.fill whose result an op reads as a value."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import FillOp, GenericOp, YieldOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineBinaryOpExpr, AffineBinaryOpKind, AffineConstantExpr, AffineDimExpr, AffineExpr

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, parallel
from qcompiler.passes.lowering.rule import Lowering, Operands
from qcompiler.passes.lowering.scalar_body import constant_text, program_of
from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import Operand, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel


def draft(op: GenericOp, memory: ValueMemory) -> Draft:
    reduces = any(kind.data == IteratorType.REDUCTION for kind in op.iterator_types)
    result = Draft("reduce" if reduces else "loop", path_of(op))
    inputs = [result.add(f"in{i}", "r", memory.view(value)) for i, value in enumerate(op.inputs)]
    outputs: list[SSAValue] = []
    for index, (value, initial) in enumerate(zip(op.results, op.outputs, strict=True)):
        argument = result.add(f"out{index}", "w", memory.result(value, shape_of(value.type)))
        fill = initial.owner
        if isinstance(fill, FillOp):
            constant = fill.inputs[0].owner
            assert isinstance(constant, Operation)
            scalar = constant.clone()
            result.body.add_op(scalar)
            result.body.add_op(FillOp([scalar.results[0]], [argument], [argument.type]))
            argument = result.body.last_op.results[0]  # type: ignore[union-attr]
        elif reduces and op.body.block.args[len(inputs) + index].uses:
            raise KernelSelectionError(f"the reduction at '{path_of(op)}' starts from a tensor; only a fill is lowered")
        outputs.append(argument)
    result.body.add_op(
        GenericOp(
            inputs, outputs, op.body.clone(), op.indexing_maps, op.iterator_types, [value.type for value in outputs]
        )
    )
    return result


def fill(op: FillOp, memory: ValueMemory) -> Draft:
    """A constant tensor that some op reads as a value."""
    result = Draft("fill", path_of(op))
    value = op.results[0]
    out = result.add("out0", "w", memory.result(value, shape_of(value.type)))
    constant = op.inputs[0].owner
    assert isinstance(constant, Operation)
    type_ = value.type
    assert isinstance(type_, TensorType)
    block = Block(arg_types=[type_.element_type])
    scalar = constant.clone()
    block.add_ops([scalar, YieldOp(scalar.results[0])])
    result.body.add_op(parallel([], [out], block, len(shape_of(type_))))
    return result


def body(op: GenericOp, operands: Operands, serves: str) -> LoopKernel:
    kinds = [kind.data for kind in op.iterator_types]
    maps = [attribute.data for attribute in op.indexing_maps]
    # Parallel iterators first, so that templates have to deal with one order only.
    order = sorted(range(len(kinds)), key=lambda i: kinds[i] != IteratorType.PARALLEL)
    accesses = [_access(m.results, operand, order) for m, operand in zip(maps, operands, strict=True)]
    extents = _extents([m.results for m in maps], operands, len(kinds), serves)
    program = program_of(op.body.block, serves)
    if order != list(range(len(order))):
        position = {old: new for new, old in enumerate(order)}
        program = _with_axes(program, position)
    return LoopKernel(
        extents=tuple(extents[i] for i in order),
        iterators=tuple("parallel" if kinds[i] == IteratorType.PARALLEL else "reduction" for i in order),
        accesses=tuple(accesses),
        body=program,
        init=tuple(text for value in op.outputs if (text := _initial(value)) is not None),
    )


def _with_axes(body: ScalarProgram, position: dict[int, int]) -> ScalarProgram:
    ops = tuple(op if op.axis is None else msgspec.structs.replace(op, axis=position[op.axis]) for op in body.ops)
    return msgspec.structs.replace(body, ops=ops)


def _initial(value: SSAValue) -> str | None:
    """The constant an output starts from, or None if it is not filled."""
    fill = value.owner
    if not isinstance(fill, FillOp):
        return None
    constant = fill.inputs[0].owner
    assert isinstance(constant, arith.ConstantOp)
    return constant_text(constant.value)


def _access(results: Sequence[AffineExpr], operand: Operand, order: Sequence[int]) -> AffineAccess:
    """Element offset of an operand over the loop nest: its map composed with its strides."""
    offset = Expr.constant(0)
    coefficients = [Expr.constant(0)] * len(order)
    for expression, stride in zip(results, operand.strides, strict=True):
        constant, by_dim = _linear_form(expression)
        offset = offset + dim(stride) * constant
        for axis, factor in by_dim.items():
            coefficients[axis] = coefficients[axis] + dim(stride) * factor
    return AffineAccess(offset=offset.to_dim(), coefficients=tuple(coefficients[i].to_dim() for i in order))


def _linear_form(expression: AffineExpr) -> tuple[int, dict[int, int]]:
    """An affine expression as (constant, factor of each dim)."""
    if isinstance(expression, AffineConstantExpr):
        return expression.value, {}
    if isinstance(expression, AffineDimExpr):
        return 0, {expression.position: 1}
    if isinstance(expression, AffineBinaryOpExpr):
        (a, left), (b, right) = _linear_form(expression.lhs), _linear_form(expression.rhs)
        if expression.kind == AffineBinaryOpKind.Add:
            return a + b, {axis: left.get(axis, 0) + right.get(axis, 0) for axis in {*left, *right}}
        if expression.kind == AffineBinaryOpKind.Mul and not (left and right):
            factor, form, constant = (b, left, a) if not right else (a, right, b)
            return constant * factor, {axis: value * factor for axis, value in form.items()}
    raise KernelSelectionError(f"the indexing map result {expression} is not affine with constant factors")


def _extents(maps: Sequence[Sequence[AffineExpr]], operands: Operands, rank: int, serves: str) -> list[Dim]:
    """The extent of each loop: the size of a dim that is indexed by this loop alone, preferably of an output."""
    found: dict[int, Dim] = {}
    for results, operand in reversed(list(zip(maps, operands, strict=True))):
        for expression, size in zip(results, operand.shape, strict=True):
            if isinstance(expression, AffineDimExpr):
                found.setdefault(expression.position, size)
    missing = [axis for axis in range(rank) if axis not in found]
    if missing:
        raise KernelSelectionError(
            f"loop {missing[0]} of the linalg.generic at '{serves}' has no operand that sizes it"
        )
    return [found[axis] for axis in range(rank)]


LOWERING = Lowering(LoopKernel, (GenericOp,), draft, body, written_as={FillOp: fill})
