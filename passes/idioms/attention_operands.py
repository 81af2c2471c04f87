"""What attention computes itself of its operands.

    %k = linalg.generic { arith.extf } (%cache : f16)              %k = the same view of %cache : f16
    %o = qc.attention %q, %k, %v : f32                     ->      %o = qc.attention %q, %k, %v : f32

A cache in fp16 or bf16 beside a model in fp32 would otherwise be widened as a whole in every call.  Kernels widen each
number as they read it, so results stay as they are, bit for bit.

    %k = qc.dequantize_cache %rows : f32                           %o = qc.attention %q, %rows, … {cache = "int8"}
    %o = qc.attention %q, %k, %v : f32                     ->

Likewise the rows of a cache in 8 bits, if keys and values both are.  Kernels multiply scores and weights by the scales
of the rows: sums of codes are scaled, where the values of a row would be summed.

    %s = linalg.generic { x * 0.125 } (%q)                         %o = qc.attention %q, %k, %v {scale = 0.125}
    %o = qc.attention %s, %k, %v {scale = 1.0}             ->

OPT, BART and Whisper scale their queries, not the scores.  Then the linear of q has an epilogue that those of k and v
have not, and stays apart from them.  Where the factor is a power of two, results stay as they are; else each score is
rounded in another place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import FloatAttr, StringAttr, f64
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.loops import loops
from qcompiler.passes.rewriting import pattern
from qcompiler.passes.views import views

_QUERIES, _KEYS, _VALUES = 0, 1, 2
_NARROW = ("f16", "bf16")
_VIEWS = (tensor.ExpandShapeOp, tensor.CollapseShapeOp, tensor.ExtractSliceOp, ops.TransposeOp, ops.BroadcastOp)


@pattern
def read_narrow_operands(op: qc.AttentionOp, rewriter: PatternRewriter) -> SSAValue | None:
    """In place: keys and values that are only widened become what they are widened from."""
    operands = list(op.operands)
    found = {place: _before(operands[place], rewriter, _widens) for place in (_KEYS, _VALUES)}
    if not any(found.values()):
        return None
    for place, value in found.items():
        operands[place] = value or operands[place]
    op.operands = operands
    return op.result


def unwidened(value: SSAValue, builder: Builder) -> SSAValue | None:
    """What `value` is widened from, as a view of its shape; None if it is computed as f32."""
    return _before(value, builder, _widens)


@pattern
def read_cache_rows(op: qc.AttentionOp, rewriter: PatternRewriter) -> SSAValue | None:
    """In place: keys and values that are dequantised become the rows of their cache."""
    if op.rows_of is not None:
        return None
    kinds = {_cache_of(op.operands[place]) for place in (_KEYS, _VALUES)}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    q, k, v, *others = op.operands
    op.operands = [q, _rows_of(k, rewriter), _rows_of(v, rewriter), *others]
    op.properties["cache"] = StringAttr(kind)
    return op.result


@pattern
def scale_scores(op: qc.AttentionOp, rewriter: PatternRewriter) -> SSAValue | None:
    """In place: queries that are only multiplied by a constant become what they were, and the scores are multiplied."""
    factors: list[float] = []

    def scales(loop: ops.GenericOp) -> bool:
        factor = _factor(loop)
        if factor is None or not math.isfinite(factor * op.scale.value.data):
            return False
        factors.append(factor)
        return True

    plain = _before(op.q, rewriter, scales)
    if plain is None:
        return None
    op.operands = [plain, *op.operands[1:]]
    op.properties["scale"] = FloatAttr(op.scale.value.data * factors[0], f64)
    return op.result


# --- what a loop does to each element --------------------------------------------------------------------------------


def _widens(loop: ops.GenericOp) -> bool:
    """Whether a loop converts its narrow input to f32, and does nothing else."""
    widened = loops.producer(loops.yielded(loop))
    is_cast = isinstance(widened, arith.ExtFOp) and widened.operands[0] is loop.body.block.args[0]
    return is_cast and tensor_dtype(loop.res[0].type) == "f32" and tensor_dtype(loop.inputs[0].type) in _NARROW


def _factor(loop: ops.GenericOp) -> float | None:
    """The constant by which a loop multiplies its input, in fp32, if the result has the input's type; or None."""
    if tensor_dtype(loop.res[0].type) != tensor_dtype(loop.inputs[0].type):
        return None
    value, (x, *_) = loops.yielded(loop), loop.body.block.args
    product = loops.producer(value)
    if isinstance(product, arith.TruncFOp):
        product = loops.producer(product.operands[0])
    if not isinstance(product, arith.MulfOp):
        return None
    for side, other in ((0, 1), (1, 0)):
        source, constant = product.operands[side], loops.producer(product.operands[other])
        widened = loops.producer(source)
        if isinstance(widened, arith.ExtFOp):
            source = widened.operands[0]
        if source is x and isinstance(constant, arith.ConstantOp) and isinstance(constant.value, FloatAttr):
            return constant.value.value.data
    return None


# --- the same view of the rows of a cache ----------------------------------------------------------------------------


def _cache_of(value: SSAValue) -> str | None:
    """The kind of cache whose rows `value` has the values of, through views that keep rows whole; None for others."""
    made = loops.producer(value)
    if isinstance(made, qc.DequantizeCacheOp):
        return made.kind.data
    if not isinstance(made, _VIEWS):
        return None
    before, after = shape_of(made.operands[0].type), shape_of(value.type)
    whole = bool(before) and bool(after) and before[-1] == after[-1]
    if isinstance(made, ops.TransposeOp):
        whole = views.permutation_of(made)[-1] == len(before) - 1
    if isinstance(made, ops.BroadcastOp):
        whole = len(after) - 1 not in views.added_dims(made)
    if isinstance(made, tensor.ExtractSliceOp):
        whole = whole and len(before) == len(after) and views.slice_of(made) is not None
    return _cache_of(made.operands[0]) if whole else None


def _rows_of(value: SSAValue, rewriter: PatternRewriter) -> SSAValue:
    """The same view of the rows, for a value of `_cache_of`."""
    view = loops.producer(value)
    if isinstance(view, qc.DequantizeCacheOp):
        return view.rows
    assert view is not None
    source = _rows_of(view.operands[0], rewriter)
    width = shape_of(source.type)[-1]
    if isinstance(view, ops.TransposeOp):
        return build.transpose(rewriter, source, views.permutation_of(view))
    if isinstance(view, tensor.ExtractSliceOp):
        part = views.slice_of(view)
        assert part is not None
        offsets, sizes, steps = part
        return build.extract_slice(rewriter, source, offsets, (*sizes[:-1], width), steps)
    if isinstance(view, ops.BroadcastOp):
        shape, added = shape_of(value.type), views.added_dims(view)
        kept = [n for n in range(len(shape)) if n not in added]
        return build.broadcast_in(rewriter, source, (*shape[:-1], width), kept)
    return build.reshape(rewriter, source, (*shape_of(value.type)[:-1], width))


# --- the same view of what a loop reads ------------------------------------------------------------------------------


def _before(value: SSAValue, builder: Builder, accepts: Callable[[ops.GenericOp], bool]) -> SSAValue | None:
    """The view `value` of what a loop reads, instead of what it makes; None unless a loop of one input is accepted."""
    view = loops.producer(value)
    if not isinstance(view, _VIEWS):
        return _before_loop(value, builder, accepts)
    source = _before(view.operands[0], builder, accepts)
    return None if source is None else views.same_view(builder, view, source)


def _before_loop(value: SSAValue, builder: Builder, accepts: Callable[[ops.GenericOp], bool]) -> SSAValue | None:
    """What a loop reads, as a view of the loop's shape; None for any other value."""
    loop = loops.producer(value)
    if not isinstance(loop, ops.GenericOp) or not loops.is_pointwise(loop) or len(loop.inputs) != 1:
        return None
    (source, index), shape = loops.inputs_of(loop)[0], shape_of(value.type)
    if loops.output_index(loop) != loops.identity(len(shape)) or not accepts(loop):
        return None
    wide = [(e.position, n) for n, e in enumerate(index) if isinstance(e, AffineDimExpr)]
    read = {position for position, _ in wide}
    fits = len(read) == len(wide) and all(size == 1 for n, size in enumerate(shape) if n not in read)
    if not fits or any(size != 1 for n, size in enumerate(shape_of(source.type)) if n not in {n for _, n in wide}):
        return None
    kept = build.reshape(builder, source, [shape_of(source.type)[n] for _, n in wide])
    ordered = build.transpose(builder, kept, sorted(range(len(wide)), key=lambda n: wide[n][0]))
    return build.reshape(builder, ordered, shape)


__all__ = ["read_cache_rows", "read_narrow_operands", "scale_scores", "unwidened"]
