"""What is put together and then rotated (text and image of a double block of Flux) is rotated first.

    %q = tensor.concat dim(1) %text, %image               %t = qc.rope %text, %cos[0:7], %sin[0:7]
    %r = qc.rope %q, %cos, %sin                      ->   %i = qc.rope %image, %cos[7:23], %sin[7:23]
                                                          %r = tensor.concat dim(1) %t, %i

Each part is one nest then, from where it was computed to where the whole stands.
"""

from __future__ import annotations

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of
from qcompiler.passes.rewriting import pattern
from qcompiler.passes.views.views import permutation_of, source_of


@pattern
def rope_before_concat(op: qc.RopeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A rope of a concat of rows becomes a concat of ropes, if nothing else reads the concat and sizes are known.

    A row is rotated by itself, so no number changes. A part is stored where the whole stands if sizes are known.
    """
    view = op.x.owner
    joined = source_of(view).owner if isinstance(view, ops.TransposeOp) else view
    if not isinstance(joined, tensor.ConcatOp) or not op.x.has_one_use() or not joined.result.has_one_use():
        return None
    order = permutation_of(view) if isinstance(view, ops.TransposeOp) else (0, 1, 2, 3)
    axis = order.index(joined.dim.value.data)
    if axis == 3 or not all(isinstance(size, int) for size in shape_of(op.x.type)):
        return None
    parts, begin = list[SSAValue](), 0
    for value in joined.inputs:
        x = build.transpose(rewriter, value, order) if isinstance(view, ops.TransposeOp) else value
        size = shape_of(x.type)[axis]
        assert isinstance(size, int)
        cos, sin = (_rows(rewriter, table, axis, begin, size) for table in (op.cos, op.sin))
        rotated = qc.RopeOp(x, cos, sin, x.type, interleaved=op.interleaved is not None)
        parts.append(rewriter.insert(rotated).result)
        begin += size
    return build.concat(rewriter, parts, axis)


def _rows(builder: Builder, table: SSAValue, axis: int, begin: int, size: int) -> SSAValue:
    """Some rows of cos or sin; a dim of size 1 serves all."""
    shape = shape_of(table.type)
    if shape[axis] == 1:
        return table
    offsets = [begin if n == axis else 0 for n in range(4)]
    return build.extract_slice(builder, table, offsets, [size if n == axis else each for n, each in enumerate(shape)])
