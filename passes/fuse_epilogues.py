"""fuse-epilogues: pointwise consumers of `qc.linear` become its epilogue.

    %1 = qc.linear %x, %w, %b                             %2 = qc.linear %x, %w, %b extras(%res) {
    %2 = linalg.generic ins(%1, %res) {              ->   ^bb0(%acc: f32, %r: f32):
      arith.addf }                                          arith.addf; qc.yield }

An activation that consists of several nests is joined first. The consumer must be the only reader of the linear, have
the same shape, and read the linear element by element. Its other inputs become extras: views with the result's rank and
unit dims where they repeat. If a consumer reads two linears, the later one takes it. A constant row that is added to a
linear without a bias becomes its bias. The only numeric change is that a `truncf` -> `extf` pair between accumulator
and consumer is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Region, SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of, set_path
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.passes.checks.numerics import Numerics, Ulps
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.loops.fusion import absorb_producers, in_step
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.views import views
from qcompiler.passes.views.view_rules import fold_views

MAX_EXTRAS = 8  # so many pointers fit in registers beside those of x, w and out
Accesses = Sequence[tuple[SSAValue, Index]]
_STORED = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class FuseEpiloguesPass(ModulePass):
    """Moves pointwise consumers into the epilogues of linears."""

    name = "fuse-epilogues"
    numerics: ClassVar[Numerics] = Ulps(2)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        pairs = 0
        for function in functions(op):
            for each in reversed(list(function.body.block.ops)):
                if isinstance(each, ops.GenericOp) and each.parent is not None:
                    pairs += absorb_producers(each, in_step)
            # Later linears first: if a consumer reads two linears, the later one takes it.
            for each in reversed(list(function.body.block.ops)):
                linear = each if isinstance(each, qc.LinearOp) else None
                while linear is not None:
                    fused, deleted = _take_consumer(linear)
                    pairs += deleted
                    linear = fused if fused is not None else _before_reshape(linear)
        if pairs and isinstance(ctx, QCContext):
            ctx.report.add(
                self.name, "", f"deleted {pairs} rounding pairs", "accumulators reach their epilogues in fp32"
            )


def _take_consumer(linear: qc.LinearOp) -> tuple[qc.LinearOp | None, int]:
    """Fuses the reader of `linear`. Returns the fused linear (None if none fits) and the number of deleted rounding
    pairs."""
    consumer = _only_reader(linear)
    if consumer is None:
        return None, 0
    accesses = _accesses(linear, consumer)
    if accesses is None:
        return None, 0
    bias = _as_bias(linear, consumer, accesses)
    fused, pairs = (
        _with_bias(linear, consumer, bias) if bias is not None else _with_epilogue(linear, consumer, accesses)
    )
    set_path(fused, path_of(linear))
    consumer.res[0].replace_all_uses_with(fused.result)
    erase_if_dead(consumer)
    erase_if_dead(linear)
    return fused, pairs


def _before_reshape(linear: qc.LinearOp) -> qc.LinearOp | None:
    """Moves a reshape of the result's leading dims in front of the linear, so that the consumer behind it can fuse.
    None if there is no such reshape."""
    reshape = linear.result.get_user_of_unique_use()
    if not isinstance(reshape, views.Reshape):
        return None
    readers = {use.operation for use in reshape.result.uses}
    places = [(use.operation, use.index) for use in reshape.result.uses]
    if len(readers) != 1 or not isinstance(next(iter(readers)), ops.GenericOp):
        return None
    fold_views([reshape])
    reader, place = places[0]
    moved = loops.producer(reader.operands[place])
    return moved if isinstance(moved, qc.LinearOp) else None


def _only_reader(linear: qc.LinearOp) -> ops.GenericOp | None:
    consumer = combining_reader([linear.result]) if not linear.prologue.blocks and not linear.beside else None
    return consumer if consumer is not None and tensor_dtype(linear.result.type) in _STORED else None


def combining_reader(values: Sequence[SSAValue]) -> ops.GenericOp | None:
    """The pointwise nest of floats that alone reads some values of one shape, if its result has that shape, too."""
    readers = {use.operation for value in values for use in value.uses}
    if len(readers) != 1:
        return None
    consumer = readers.pop()
    if (
        not isinstance(consumer, ops.GenericOp)
        or consumer.parent is not values[0].owner.parent
        or not loops.is_pointwise(consumer)
    ):
        return None
    same_shape = shape_of(consumer.res[0].type) == shape_of(values[0].type)
    indexed = any(isinstance(each, ops.IndexOp) for each in consumer.body.block.ops)
    stored = tensor_dtype(consumer.res[0].type) in _STORED
    return consumer if same_shape and stored and not indexed else None


def pointwise_accesses(consumer: ops.GenericOp) -> list[tuple[SSAValue, Index]]:
    """The inputs of a pointwise nest, indexed by the dims of its result."""
    inverse = loops.inverse_permutation(loops.output_index(consumer))
    assert inverse is not None
    return [(v, loops.compose(i, inverse)) for v, i in loops.inputs_of(consumer)]


def _accesses(linear: qc.LinearOp, consumer: ops.GenericOp) -> list[tuple[SSAValue, Index]] | None:
    """The consumer's inputs, each with its index over the dims of the result. None if an input cannot be an extra."""
    accesses = pointwise_accesses(consumer)
    rank = len(shape_of(linear.result.type))
    for value, index in accesses:
        if value is linear.result:
            if index != loops.identity(rank):
                return None
        elif not can_be_extra(value, index):
            return None
    extras = {entry for entry in accesses if entry[0] is not linear.result}
    return accesses if len(extras) + len(linear.extras) <= MAX_EXTRAS else None


def _as_bias(
    linear: qc.LinearOp, consumer: ops.GenericOp, accesses: Sequence[tuple[SSAValue, Index]]
) -> SSAValue | None:
    """The row that the consumer adds, if it does nothing else and `linear` has neither bias nor epilogue."""
    if linear.bias is not None or linear.epilogue.blocks or len(accesses) != 2:
        return None
    wide = [each for each in consumer.body.block.ops if not isinstance(each, arith.ExtFOp | arith.TruncFOp)]
    if len(wide) != 2 or not isinstance(wide[0], arith.AddfOp):
        return None
    last = len(shape_of(linear.result.type)) - 1
    for value, index in accesses:
        if value is not linear.result and index == (loops.dim_expr(last),):
            same = tensor_dtype(value.type) == tensor_dtype(linear.result.type) == tensor_dtype(consumer.res[0].type)
            return value if same else None
    return None


def _with_bias(linear: qc.LinearOp, consumer: ops.GenericOp, bias: SSAValue) -> tuple[qc.LinearOp, int]:
    fused = qc.LinearOp(linear.x, linear.w, bias, consumer.res[0].type)
    loops.insert_before(consumer, fused)
    return fused, int(tensor_dtype(linear.result.type) != "f32")


def _with_epilogue(linear: qc.LinearOp, consumer: ops.GenericOp, accesses: Accesses) -> tuple[qc.LinearOp, int]:
    """The linear with the consumer's body appended to its epilogue, placed where the consumer stands."""
    body = linear.epilogue.detach_block(0) if linear.epilogue.blocks else rounding(linear)
    terminator = body.last_op
    assert terminator is not None
    extras = list(linear.extras)
    known = {value: body.args[linear.sums + n] for n, value in enumerate(extras)}
    out_shape = shape_of(linear.result.type)
    arguments: list[SSAValue] = []
    for value, index in accesses:
        if value is linear.result:
            arguments.append(terminator.operands[0])
            continue
        view = as_extra(consumer, value, index, out_shape)
        if view not in known:
            extras.append(view)
            assert isinstance(view.type, TensorType)
            known[view] = body.insert_arg(view.type.element_type, len(body.args))
        arguments.append(known[view])
    result = loops.inline_body(consumer.body.block, arguments, None, terminator, move=False)
    terminator.operands = [result]
    pairs = loops.delete_rounding_pairs(body)
    loops.tidy_body(body)
    fused = qc.LinearOp(
        linear.x, linear.w, linear.bias, consumer.res[0].type, extras, Region(body), pairs=linear.combines_pairs
    )
    loops.insert_before(consumer, fused)
    return fused, pairs


def rounding(linear: qc.LinearOp | qc.GroupedLinearOp) -> Block:
    """The epilogue that a linear without one has: one rounding to the element type."""
    body = Block(arg_types=[ELEMENT_TYPES["f32"]])
    dtype = tensor_dtype(linear.result.type)
    value: SSAValue = body.args[0]
    if dtype != "f32":
        narrow = arith.TruncFOp(value, ELEMENT_TYPES[dtype])
        body.add_op(narrow)
        value = narrow.result
    body.add_op(qc.YieldOp(value))
    return body
