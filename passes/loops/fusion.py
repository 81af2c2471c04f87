"""Moves pointwise producers into the loop nests that read them. The fusion passes share this code."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith, math
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.scalar_ops import ARITH_OPS, RemFOp
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index

MAX_INPUTS = 24  # pointers of one kernel; with more, an inner loop spills its addresses
MAX_BODY = 512  # scalar ops of one body; with more, host compilers no longer keep the values in registers

_CHEAP_MATH = (math.AbsFOp,)
_DEAR_ARITH = (arith.DivfOp, arith.DivSIOp, arith.DivUIOp, arith.RemSIOp, arith.RemUIOp, arith.FloorDivSIOp, RemFOp)


Fits = Callable[[ops.GenericOp, ops.GenericOp, Index], bool]
"""Whether it pays to compute a producer inside a consumer that reads it at this index."""


def absorb_producers(consumer: ops.GenericOp, fits: Fits) -> int:
    """Fuses every producer that fits into one nest. Returns the number of rounding pairs deleted."""
    loops.merge_equal_inputs(consumer)
    fused = False
    while _absorb_one(consumer, fits):
        fused = True
    if not fused:
        return 0
    pairs = loops.delete_rounding_pairs(consumer.body.block)
    loops.tidy_body(consumer.body.block)
    loops.merge_equal_inputs(consumer)
    return pairs


def _absorb_one(consumer: ops.GenericOp, fits: Fits) -> bool:
    inputs = loops.inputs_of(consumer)
    for place, (value, index) in enumerate(inputs):
        source = loops.producer(value)
        done = False
        if isinstance(source, ops.FillOp) and loops.constant_of(source.inputs[0]) is not None:
            done = _absorb_fill(consumer, place, inputs, source)
        elif isinstance(source, ops.GenericOp) and _can_fuse(source, consumer) and fits(source, consumer, index):
            done = _fuse(consumer, place, inputs)
        if done:
            return True
    return False


def _absorb_fill(consumer: ops.GenericOp, place: int, inputs: list[tuple[SSAValue, Index]], source: ops.FillOp) -> bool:
    """A tensor that holds one constant becomes that constant in the body."""
    rest = [*inputs[:place], *inputs[place + 1 :]]
    if not loops.keeps_extents(consumer, rest):
        return False
    constant = loops.producer(source.inputs[0])
    assert constant is not None
    body = consumer.body.block
    copy = constant.clone()
    body.insert_op_before(copy, body.first_op) if body.first_op else body.add_op(copy)
    body.args[place].replace_all_uses_with(copy.results[0])
    body.erase_arg(body.args[place])
    loops.set_inputs(consumer, rest)
    erase_if_dead(source)
    return True


def _can_fuse(source: ops.GenericOp, consumer: ops.GenericOp) -> bool:
    if source.parent is not consumer.parent or not loops.is_pointwise(source):
        return False
    return len(source.inputs) + len(consumer.inputs) - 1 <= MAX_INPUTS


def worth_fusing(source: ops.GenericOp, consumer: ops.GenericOp, index: Index) -> bool:
    """Whether the only reader reads each element once, or computing the producer again is trivial."""
    return (source.res[0].has_one_use() and not _repeats(consumer, index)) or is_trivial(source)


def in_step(source: ops.GenericOp, consumer: ops.GenericOp, index: Index) -> bool:
    """Like `worth_fusing`, for pointwise nests that visit the same elements in the same order."""
    if not loops.is_pointwise(consumer) or index != loops.output_index(consumer):
        return False
    if not source.res[0].has_one_use() and _ends_a_linear(source):
        return False
    return worth_fusing(source, consumer, index)


def _ends_a_linear(source: ops.GenericOp) -> bool:
    """Whether a nest can join the epilogue of a linear. A copy of it elsewhere would be a second reader of that
    linear."""
    for value in source.inputs:
        made = loops.producer(value) if value.has_one_use() else None
        if isinstance(made, qc.LinearOp) or (isinstance(made, ops.GenericOp) and _ends_a_linear(made)):
            return True
    return False


def _repeats(consumer: ops.GenericOp, index: Index) -> bool:
    """Whether more than one iteration reads the same element at `index`. A sum of loop dims (im2col) counts as such."""
    if any(len(expr.used_dims()) > 1 for expr in index):
        return True
    used = {position for expr in index for position in expr.used_dims()}
    return any(size != 1 for n, size in enumerate(loops.loop_extents(consumer)) if n not in used)


def is_trivial(source: ops.GenericOp) -> bool:
    """Whether computing again is cheaper than storing: a little index arithmetic without operands, or at most two cheap
    ops on one operand."""
    cost = loops.cost_of_body(source)
    if not all(_is_cheap(op) for op in source.body.block.ops):
        return False
    return cost <= 6 if not source.inputs else (len(source.inputs) == 1 and cost <= 2)


def _is_cheap(op: Operation) -> bool:
    if isinstance(op, _DEAR_ARITH):
        return False
    return isinstance(op, (*_CHEAP_MATH, ops.IndexOp, ops.YieldOp)) or type(op) in ARITH_OPS


def _fuse(consumer: ops.GenericOp, place: int, inputs: list[tuple[SSAValue, Index]]) -> bool:
    """Moves the producer of input `place` into the consumer's body. Returns False if a loop would lose its size."""
    value, index = inputs[place]
    source = loops.producer(value)
    assert isinstance(source, ops.GenericOp)
    inverse = loops.inverse_permutation(loops.output_index(source))
    assert inverse is not None
    at = loops.compose(inverse, index)  # the producer's loop dims in terms of the consumer's
    added = [(v, loops.compose(i, at)) for v, i in loops.inputs_of(source)]
    merged = [*inputs[:place], *added, *inputs[place + 1 :]]
    body, from_body = consumer.body.block, source.body.block
    if not loops.keeps_extents(consumer, merged) or _size(body) + _size(from_body) > MAX_BODY:
        return False
    arguments = [body.insert_arg(a.type, place + n) for n, a in enumerate(from_body.args[:-1])]
    old = body.args[place + len(added)]
    first = body.first_op
    assert first is not None
    alone = source.res[0].has_one_use()
    result = loops.inline_body(from_body, arguments, at, first, move=alone)
    old.replace_all_uses_with(result)
    body.erase_arg(old)
    loops.set_inputs(consumer, merged)
    loops.merge_equal_inputs(consumer)
    if alone:
        erase_if_dead(source)
    return True


def _size(block: Block) -> int:
    return len(block.ops)
