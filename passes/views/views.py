"""View ops: what counts as one, what they read, who reads through them, and which elements of their source those are.

A view costs nothing at run time: `lower-to-rt` makes it a strided view of its source's buffer.  Every pass that asks
whether an op is a view asks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, TensorType
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.types import DYNAMIC, shape_of
from qcompiler.passes.loops.loops import ZERO, Index, producer
from qcompiler.plan.dims import Dim, dim

Reshape = tensor.ExpandShapeOp | tensor.CollapseShapeOp
VIEWS = (
    ops.TransposeOp, ops.BroadcastOp, tensor.ExpandShapeOp, tensor.CollapseShapeOp, tensor.ExtractSliceOp,
    tensor.CastOp,
)  # fmt: skip
Groups = tuple[tuple[int, ...], ...]


def source_of(view: Operation) -> SSAValue:
    """The tensor a view op reads."""
    return view.operands[0]


def groups_of(op: Reshape) -> Groups:
    """The reassociation: for each dim of the smaller side, the dims of the larger side."""
    return tuple(
        tuple(entry.value.data for entry in group if isinstance(entry, IntegerAttr))
        for group in op.reassociation
        if isinstance(group, ArrayAttr)
    )


def permutation_of(op: ops.TransposeOp) -> tuple[int, ...]:
    return tuple(int(p) for p in op.permutation.get_values())


def added_dims(op: ops.BroadcastOp) -> tuple[int, ...]:
    """The result dims of a broadcast that its source does not have."""
    return tuple(int(d) for d in op.dimensions.get_values())


def slice_of(op: tensor.ExtractSliceOp) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[int, ...]] | None:
    """(offsets, sizes, steps). Symbolic entries come from `qc.dim`; None if an operand is any other op."""
    offsets = _mixed(op.static_offsets.get_values(), op.offsets)
    steps = [int(s) for s in op.static_strides.get_values()]
    if offsets is None or op.strides:
        return None
    return offsets, shape_of(op.result.type), tuple(steps)


def inserted_at(op: tensor.InsertSliceOp) -> tuple[tuple[Dim, ...], tuple[int, ...]] | None:
    """The (offsets, steps) of an insert_slice whose source and destination have the same rank; None as in
    `slice_of`."""
    offsets = _mixed(op.static_offsets.get_values(), op.offsets)
    steps = tuple(int(s) for s in op.static_strides.get_values())
    if offsets is None or op.strides or rank_of(op.source) != rank_of(op.dest):
        return None
    return offsets, steps


def _mixed(static: Sequence[int | float], dynamic: Sequence[SSAValue]) -> tuple[Dim, ...] | None:
    rest = iter(dynamic)
    entries: list[Dim] = []
    for each in static:
        if each != DYNAMIC:
            entries.append(int(each))
            continue
        op = producer(next(rest))
        if not isinstance(op, qc.DimOp):
            return None
        entries.append(dim(op.expr.data).to_dim())
    return tuple(entries)


def look_through(value: SSAValue, index: Index) -> tuple[SSAValue, Index] | None:
    """Looks through a transpose, a broadcast or a reshape that only moves unit dims: its source, and the index to read
    there.

    None if `value` is no such view. Slices and other reshapes do not qualify: their sizes differ from the loops', or
    they need a division.
    """
    op = producer(value)
    if isinstance(op, ops.TransposeOp):
        permutation = permutation_of(op)
        return op.inputs[0], tuple(index[permutation.index(n)] for n in range(len(permutation)))
    if isinstance(op, ops.BroadcastOp):
        added = added_dims(op)
        return op.input, tuple(e for n, e in enumerate(index) if n not in added)
    if isinstance(op, tensor.CollapseShapeOp):
        return _through_collapse(op, index)
    if isinstance(op, tensor.ExpandShapeOp):
        return _through_expand(op, index)
    return None


def seen_through(value: SSAValue, index: Index) -> tuple[SSAValue, Index]:
    """The tensor and index that an element is read from, after `look_through` as often as possible."""
    found = look_through(value, index)
    while found is not None:
        value, index = found
        found = look_through(value, index)
    return value, index


def _through_collapse(op: tensor.CollapseShapeOp, index: Index) -> tuple[SSAValue, Index] | None:
    shape = shape_of(op.src.type)
    reads = [ZERO] * len(shape)
    for group, expr in zip(groups_of(op), index, strict=True):
        wide = [n for n in group if shape[n] != 1]
        if len(wide) > 1:
            return None
        if wide:
            reads[wide[0]] = expr
    return op.src, tuple(reads)


def _through_expand(op: tensor.ExpandShapeOp, index: Index) -> tuple[SSAValue, Index] | None:
    shape = shape_of(op.result.type)
    reads = []
    for group in groups_of(op):
        wide = [n for n in group if shape[n] != 1]
        if len(wide) > 1:
            return None
        reads.append(index[wide[0]] if wide else ZERO)
    return op.src, tuple(reads)


def reshape_ops_needed(source: Sequence[Dim], target: Sequence[Dim]) -> int:
    """The number of ops that `build.reshape` makes between two shapes."""
    if tuple(source) == tuple(target):
        return 0
    if not source or not target:
        return 1
    groups = build.reshape_groups(source, target)
    return int(any(b - a > 1 for (a, b), _ in groups)) + int(any(b - a > 1 for _, (a, b) in groups))


def readers(value: SSAValue) -> Iterator[tuple[Operation, SSAValue]]:
    """The ops that read a value, or a view of it, each with what it reads; views themselves do not count."""
    for use in value.uses:
        if isinstance(use.operation, VIEWS):
            yield from readers(use.operation.results[0])
        else:
            yield use.operation, value


def base_of(value: SSAValue) -> SSAValue:
    """The value under any number of view ops."""
    op = producer(value)
    while isinstance(op, VIEWS):
        value = source_of(op)
        op = producer(value)
    return value


def same_view(builder: Builder, view: Operation, source: SSAValue) -> SSAValue | None:
    """The view of another tensor, which has the shape of the one it reads; None for a slice that `slice_of` does not
    know."""
    shape = shape_of(view.results[0].type)
    if isinstance(view, ops.TransposeOp):
        return build.transpose(builder, source, permutation_of(view))
    if isinstance(view, tensor.ExtractSliceOp):
        part = slice_of(view)
        return None if part is None else build.extract_slice(builder, source, *part)
    if isinstance(view, ops.BroadcastOp):
        added = added_dims(view)
        return build.broadcast_in(builder, source, shape, [n for n in range(len(shape)) if n not in added])
    return build.reshape(builder, source, shape)


def unreshaped(value: SSAValue) -> SSAValue:
    """The tensor behind any number of reshapes."""
    while isinstance(op := producer(value), Reshape):
        value = op.src
    return value


def rank_of(value: SSAValue) -> int:
    assert isinstance(value.type, TensorType)
    return len(value.type.get_shape())
