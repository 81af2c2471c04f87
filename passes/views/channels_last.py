"""Stores images with channels last.

A convolution stores its result as (b, h, w, c), seen through a transpose to (b, c, h, w). An op that reads it element
by element can store its own result the same way. Then the transpose moves behind this op, until it meets the transpose
in front of the next convolution and both cancel. Views cost nothing, so only the order of stored elements changes.

    %1 = linalg.transpose %y [0, 3, 1, 2]                 %2 = linalg.generic ins(%y) {…} -> (b, h, w, c)
    %2 = linalg.generic ins(%1) {…} -> (b, c, h, w)  ->   %3 = linalg.transpose %2 [0, 3, 1, 2]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.rewriting import Pattern, pattern, rewrite
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim

T = TypeVar("T")
OpT = TypeVar("OpT", bound=Operation)


def to_last(rank: int) -> tuple[int, ...]:
    """The permutation from (b, c…, h, w) to (b, h, w, c…), or from (b, c, length) to (b, length, c). Entry i is the
    axis that goes to place i."""
    return (0, 2, 1) if rank == 3 else (0, rank - 2, rank - 1, *range(1, rank - 2))


def to_first(rank: int) -> tuple[int, ...]:
    """The permutation from (b, h, w, c…) to (b, c…, h, w), or from (b, length, c) to (b, c, length)."""
    return (0, 2, 1) if rank == 3 else (0, *range(3, rank), 1, 2)


def stored(value: SSAValue) -> SSAValue | None:
    """The (b, h, w, c…) tensor that a (b, c…, h, w) value is a view of; None if there is none."""
    op = producer(value)
    if not isinstance(op, ops.TransposeOp):
        return None
    permutation = views.permutation_of(op)
    return op.inputs[0] if len(permutation) >= 3 and permutation == to_first(len(permutation)) else None


def channels_last(builder: Builder, value: SSAValue) -> SSAValue:
    """`value` (b, c…, h, w) with its channels last."""
    found = stored(value)
    return found if found is not None else build.transpose(builder, value, to_last(views.rank_of(value)))


def keep_channels_last(block: Block) -> None:
    """Moves such transposes behind everything in `block` that can store its result channels last."""
    rewrite(list(block.ops), PATTERNS, again=False)


@pattern
def cancel_transposes(op: ops.TransposeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A transpose that undoes the one it reads goes, so that what it gives does not count as channels first."""
    source = stored(op.inputs[0])
    return source if source is not None and views.permutation_of(op) == to_last(views.rank_of(source)) else None


def _stored_last(rule: Callable[[OpT, PatternRewriter], SSAValue | None]) -> Pattern:
    """A pattern whose rule makes an op's result channels last; the transpose behind it gives the op's own order."""

    @functools.wraps(rule)  # the signature says which ops it is for
    def made(op: OpT, rewriter: PatternRewriter) -> SSAValue | None:
        last = rule(op, rewriter)
        return None if last is None else build.transpose(rewriter, last, to_first(views.rank_of(last)))

    return pattern(made)


def _moved(entries: Sequence[T]) -> list[T]:
    """Reorders entries for (b, c…, h, w) to (b, h, w, c…)."""
    return [entries[i] for i in to_last(len(entries))]


# --- rules: each makes the op's result with channels last --------------------------------------------------


@_stored_last
def store_nest(op: ops.GenericOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A nest that runs through such a view and its own result channel by channel."""
    out = loops.output_index(op)
    spatial = 1 if len(out) == 3 else 2
    if len(op.res) != 1 or len(out) < 3 or len(set(out)) != len(out):
        return None
    in_step = (
        len(index) == len(out) and index[:-spatial] == out[:-spatial]
        for value, index in loops.inputs_of(op)
        if stored(value) is not None
    )
    init = producer(op.outputs[0])
    if not any(in_step) or not isinstance(init, tensor.EmptyOp | ops.FillOp):
        return None
    shape, dtype = _moved(shape_of(op.res[0].type)), tensor_dtype(op.res[0].type)
    into = (
        build.fill(rewriter, init.inputs[0], shape, dtype)
        if isinstance(init, ops.FillOp)
        else build.empty(rewriter, shape, dtype)
    )
    maps = op.indexing_maps.data[:-1]
    permuted = loops.map_attr(loops.num_loops(op), tuple(_moved(out)))
    body = op.detach_region(op.body)
    made = ops.GenericOp(op.inputs, [into], body, ArrayAttr([*maps, permuted]), op.iterator_types, [into.type])
    op.add_region(Region(Block()))
    return rewriter.insert(made).results[0]


@_stored_last
def store_concat(op: tensor.ConcatOp, rewriter: PatternRewriter) -> SSAValue | None:
    rank = views.rank_of(op.result)
    if all(stored(value) is None for value in op.inputs):
        return None
    parts = [channels_last(rewriter, value) for value in op.inputs]
    return build.concat(rewriter, parts, to_last(rank).index(op.dim.value.data))


@_stored_last
def store_padded(op: tensor.InsertSliceOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Padding: a part written into a constant."""
    part, into = stored(op.source), producer(op.dest)
    place = views.inserted_at(op)
    if part is None or place is None or not isinstance(into, ops.FillOp):
        return None
    whole = build.fill(rewriter, into.inputs[0], _moved(shape_of(op.dest.type)), tensor_dtype(op.dest.type))
    offsets, steps = place
    return build.insert_slice(rewriter, part, whole, _moved(offsets), _moved(steps))


@_stored_last
def store_slice(op: tensor.ExtractSliceOp, rewriter: PatternRewriter) -> SSAValue | None:
    source, found = stored(op.source), views.slice_of(op)
    if source is None or found is None or len(found[1]) != views.rank_of(op.source):
        return None
    offsets, sizes, steps = found
    return build.extract_slice(rewriter, source, _moved(offsets), _moved(sizes), _moved(steps))


@_stored_last
def store_gathered(op: qc.GatherOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Rows or columns picked by an index, as resizing does."""
    source = stored(op.x)
    if source is None or op.mode.data != "take" or views.rank_of(op.index) != 1:
        return None
    rank = views.rank_of(op.x)
    type_ = tensor_type(_moved(shape_of(op.result.type)), tensor_dtype(op.result.type))
    axis = to_last(rank).index(op.axis.value.data)
    return rewriter.insert(qc.GatherOp(source, op.index, type_, axis=axis)).result


@_stored_last
def store_reshaped(op: tensor.ExpandShapeOp | tensor.CollapseShapeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Channels split into groups or joined again, rows and columns as one length; a repetition of both."""
    repeat = producer(op.src)
    if isinstance(repeat, ops.BroadcastOp):
        return _repeated(op, repeat, rewriter)
    source, groups = stored(op.src), views.groups_of(op)
    if source is None or not (_splits_channels(op) or groups == ((0,), (1,), (2, 3))):
        return None
    return build.reshape(rewriter, source, _moved(shape_of(op.result.type)))


def _splits_channels(op: views.Reshape) -> bool:
    """Whether batch, rows and columns stay as they are."""
    groups = views.groups_of(op)
    return min(views.rank_of(op.src), views.rank_of(op.result)) >= 4 and all(len(groups[i]) == 1 for i in (0, -2, -1))


def _repeated(op: views.Reshape, repeat: ops.BroadcastOp, rewriter: PatternRewriter) -> SSAValue | None:
    """(b, c, h, w) as (b, c, h, r, w, r), joined to (b, c, h*r, w*r): nearest neighbours."""
    source = stored(repeat.input)
    if source is None or views.rank_of(source) != 4 or views.groups_of(op) != ((0,), (1,), (2, 3), (4, 5)):
        return None
    if views.added_dims(repeat) != (3, 5) or not isinstance(op, tensor.CollapseShapeOp):
        return None
    b, h, w, c = shape_of(source.type)
    shape = shape_of(repeat.result[0].type)
    wide: list[Dim] = [b, h, shape[3], w, shape[5], c]
    return build.reshape(
        rewriter, build.broadcast_in(rewriter, source, wide, (0, 1, 3, 5)), _moved(shape_of(op.result.type))
    )


PATTERNS = (cancel_transposes, store_nest, store_concat, store_padded, store_slice, store_gathered, store_reshaped)
