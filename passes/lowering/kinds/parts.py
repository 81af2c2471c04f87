"""Several loops in one launch, as merge-launches writes them: one region with an op for each part.

%0 = linalg.generic ins(%q, %cos) outs(%out0)           a loop
%1 = qc.index_update %cache, %at, %v                    a row that is copied
%2 = linalg.generic ins(%k, %cos) outs(%empty)          a loop
%3 = tensor.collapse_shape %2                           …whose result is
%4 = qc.index_update %keys, %at, %3                     written to a row
rt.yield %0, %1, %4

A loop may read the result of a norm in the same region, reshaped; the norm and the loop are one part then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import msgspec
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.tensor import CollapseShapeOp, ExpandShapeOp
from xdsl.ir import Block, BlockArgument, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc, rt
from qcompiler.ir.qc_norm import NORMS
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.lowering.drafts import ValueMemory
from qcompiler.passes.lowering.kinds import loop, norm
from qcompiler.passes.lowering.rule import Lowering, Operands
from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.kernel import Operand, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.parts import Part, PartNorm, PartsKernel


def draft(op: object, memory: ValueMemory) -> NoReturn:
    raise KernelSelectionError("no op is a kernel of several parts; merge-launches makes them of kernels")


def body(block: Block, operands: Operands, serves: str) -> PartsKernel:
    """The parts, from the values that a region yields, one for each written operand and in the order of those."""
    last = block.last_op
    assert isinstance(last, rt.YieldOp)
    parts: list[Part] = []
    done: set[object] = set()
    for value in last.values:
        op = value.owner
        if op not in done:
            parts.append(_part(op, operands, serves))
        done.add(op)
    return PartsKernel(parts=tuple(parts))


def _part(op: object, operands: Operands, serves: str) -> Part:
    match op:
        case GenericOp():
            numbers, read = _read(op, operands)
            written = [_number(value) for value in op.outputs]
            made = loop.body(op, [*read, *(operands[n] for n in written)], serves)
            return Part(operands=(*numbers, *written), loop=made, norm=_norm(op, operands))
        case qc.IndexUpdateOp():
            return _row(op, operands, serves)
    raise KernelSelectionError(f"a part of a launch at '{serves}' is {op}; parts are loops and rows that are written")


def _read(op: GenericOp, operands: Operands) -> tuple[list[int], list[Operand]]:
    """The operands of a launch that a loop reads, and what each is to the loop: of a norm, the result."""
    numbers, read = list[int](), list[Operand]()
    for value in op.inputs:
        normed = _source(value).owner
        if isinstance(normed, NORMS):
            shape = shape_of(value.type)
            numbers.append(_number(normed.x))
            result = Operand(
                name="rows", dtype=tensor_dtype(value.type), access="r", shape=shape, strides=contiguous_strides(shape)
            )
            read.append(result)
        else:
            numbers.append(_number(value))
            read.append(operands[numbers[-1]])
    return numbers, read


def _norm(op: GenericOp, operands: Operands) -> PartNorm | None:
    """The norm whose result a loop reads."""
    owners = [_source(value).owner for value in op.inputs]
    inputs = tuple(i for i, owner in enumerate(owners) if isinstance(owner, NORMS))
    if not inputs:
        return None
    made = owners[inputs[0]]
    assert isinstance(made, NORMS)
    x, *affine = made.operands
    named = msgspec.structs.replace(operands[_number(x)], name="x")
    return PartNorm(body=norm.body(made, [named], ""), inputs=inputs, affine=tuple(_number(each) for each in affine))


def _row(op: qc.IndexUpdateOp, operands: Operands, serves: str) -> Part:
    """A row of x: what a loop computes, or a copy of an operand."""
    x, index = _number(op.x), _number(op.index)
    written = operands[x]
    lengths, strides = (written.shape[0], 1, written.shape[2]), written.strides
    made = _source(op.src)
    if isinstance(made.owner, GenericOp):
        generic = made.owner
        numbers, read = _read(generic, operands)
        shape = shape_of(generic.results[0].type)
        split = split_strides(shape, lengths, strides)
        assert split is not None
        out = msgspec.structs.replace(written, access="w", shape=shape, strides=split)
        made_loop = loop.body(generic, [*read, out], serves)
        return Part(operands=(*numbers, x), loop=made_loop, index=index, norm=_norm(generic, operands))
    number = _number(op.src)
    return Part(operands=(number, x), loop=_copied(operands[number], written), index=index)


def _copied(source: Operand, x: Operand) -> LoopKernel:
    program = ScalarProgram(inputs=(("a", source.dtype), ("b", x.dtype)), ops=(), yields=("a",))
    steps = ((source.strides[0], source.strides[2]), (x.strides[0], x.strides[2]))
    return LoopKernel(
        extents=(x.shape[0], x.shape[2]),
        iterators=("parallel", "parallel"),
        accesses=tuple(AffineAccess(offset=0, coefficients=each) for each in steps),
        body=program,
    )


def _source(value: SSAValue) -> SSAValue:
    while isinstance(value.owner, CollapseShapeOp | ExpandShapeOp):
        value = value.owner.src
    return value


def _number(value: SSAValue) -> int:
    assert isinstance(value, BlockArgument)
    return value.index


def split_strides(shape: Sequence[Dim], over: Sequence[Dim], strides: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The strides of a tensor of `shape` that lies as one of the shape `over` with these strides: each dim of `over` is
    split into consecutive dims of `shape`, units left out. None if it is not, or for sizes that are symbols."""
    if not all(isinstance(each, int) and each > 0 for each in (*shape, *over, *strides)):
        return None
    found: list[int] = []
    left = [int(each) for each in shape]
    for size, stride in zip((int(each) for each in over), (int(each) for each in strides), strict=True):
        sizes: list[int] = []
        while left and (left[0] == 1 or math.prod(sizes) < size):
            sizes.append(left.pop(0))
        if math.prod(sizes) != size:
            return None
        found += [step * stride for step in contiguous_strides(tuple(sizes)) if isinstance(step, int)]
    return None if left else tuple(found)


LOWERING = Lowering(PartsKernel, (), draft, body)
