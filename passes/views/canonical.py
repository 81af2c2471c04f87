"""Views that cancel or join: transposes, reshapes, slices, broadcasts."""

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.dialects.builtin import DenseArrayBase, i64
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build
from qcompiler.ir.types import shape_of
from qcompiler.passes.rewriting import pattern
from qcompiler.passes.views import views


@pattern
def join_transposes(op: ops.TransposeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A transpose of a transpose is one, or none."""
    permutation, inner = views.permutation_of(op), op.inputs[0].owner
    if permutation == tuple(range(len(permutation))):
        return op.inputs[0]
    if not isinstance(inner, ops.TransposeOp):
        return None
    first = views.permutation_of(inner)
    return build.transpose(rewriter, inner.inputs[0], [first[p] for p in permutation])


@pattern
def join_reshapes(op: tensor.CollapseShapeOp | tensor.ExpandShapeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A chain of reshapes becomes the two ops that any reshape needs at most, or fewer."""
    source, count = op.src, 1
    while isinstance(inner := source.owner, views.Reshape):
        source, count = inner.src, count + 1
    if source.type == op.result.type:
        return source
    shape = shape_of(op.result.type)
    fewer = views.reshape_ops_needed(shape_of(source.type), shape) < count
    return build.reshape(rewriter, source, shape) if fewer else None


@pattern
def drop_whole_slice(op: tensor.ExtractSliceOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A slice of everything is its source."""
    whole = op.source.type == op.result.type and not op.offsets and not op.strides
    if not whole or any(op.static_offsets.get_values()) or any(s != 1 for s in op.static_strides.get_values()):
        return None
    return op.source


@pattern
def join_broadcasts(op: ops.BroadcastOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A broadcast that adds no dims is its source; a broadcast of a broadcast is one."""
    added, inner = views.added_dims(op), op.input.owner
    if not added:
        return op.input
    if not isinstance(inner, ops.BroadcastOp):
        return None
    kept = [axis for axis in range(views.rank_of(op.init)) if axis not in added]
    both = sorted([*added, *(kept[axis] for axis in views.added_dims(inner))])
    return rewriter.insert(ops.BroadcastOp(inner.input, op.init, DenseArrayBase.from_list(i64, both))).results[0]


@pattern
def drop_same_type(op: tensor.CastOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A cast to the type that the source has is its source."""
    return op.source if op.source.type == op.dest.type else None


@pattern
def drop_concat_of_one(op: tensor.ConcatOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A concatenation of one tensor is that tensor."""
    return op.inputs[0] if len(op.inputs) == 1 else None


JOIN_VIEWS = (join_transposes, join_reshapes, drop_whole_slice, join_broadcasts)
PATTERNS = (*JOIN_VIEWS, drop_same_type, drop_concat_of_one)
