"""Attention reads keys and values of a narrower float type as they are stored.

    %k = linalg.generic { arith.extf } (%cache : f16)              %k = the same view of %cache : f16
    %o = qc.attention %q, %k, %v : f32                     ->      %o = qc.attention %q, %k, %v : f32

A cache in fp16 or bf16 beside a model in fp32 would otherwise be widened as a whole in every call.  Kernels widen each
number as they read it, so results stay as they are, bit for bit.
"""

from __future__ import annotations

from xdsl.dialects import arith, tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.loops import loops
from qcompiler.passes.rewriting import pattern
from qcompiler.passes.views import views

_KEYS, _VALUES = 1, 2
_NARROW = ("f16", "bf16")


@pattern
def read_narrow_operands(op: qc.AttentionOp, rewriter: PatternRewriter) -> SSAValue | None:
    """In place: keys and values that are only widened become what they are widened from."""
    operands = list(op.operands)
    found = {place: _before_widening(operands[place], rewriter) for place in (_KEYS, _VALUES)}
    if not any(found.values()):
        return None
    for place, value in found.items():
        operands[place] = value or operands[place]
    op.operands = operands
    return op.result


def _before_widening(value: SSAValue, rewriter: PatternRewriter) -> SSAValue | None:
    """A view of narrow numbers that holds what `value` holds in f32; None if `value` is not only widened."""
    view = loops.producer(value)
    if not isinstance(view, tensor.ExpandShapeOp | tensor.CollapseShapeOp | tensor.ExtractSliceOp | ops.TransposeOp):
        return _before_loop(value, rewriter)
    source = _before_widening(view.operands[0], rewriter)
    if source is None:
        return None
    if isinstance(view, ops.TransposeOp):
        return build.transpose(rewriter, source, views.permutation_of(view))
    if isinstance(view, tensor.ExtractSliceOp):
        part = views.slice_of(view)
        return None if part is None else build.extract_slice(rewriter, source, *part)
    return build.reshape(rewriter, source, shape_of(value.type))


def _before_loop(value: SSAValue, rewriter: PatternRewriter) -> SSAValue | None:
    """What a loop widens to f32, as a view of the loop's shape; None for any other value."""
    loop = loops.producer(value)
    if not isinstance(loop, ops.GenericOp) or not loops.is_pointwise(loop) or len(loop.inputs) != 1:
        return None
    (source, index), shape = loops.inputs_of(loop)[0], shape_of(value.type)
    widened = loops.producer(loops.yielded(loop))
    is_cast = isinstance(widened, arith.ExtFOp) and widened.operands[0] is loop.body.block.args[0]
    if not is_cast or tensor_dtype(value.type) != "f32" or tensor_dtype(source.type) not in _NARROW:
        return None
    if loops.output_index(loop) != loops.identity(len(shape)):
        return None
    wide = [(e.position, n) for n, e in enumerate(index) if isinstance(e, AffineDimExpr)]
    read = {position for position, _ in wide}
    fits = len(read) == len(wide) and all(size == 1 for n, size in enumerate(shape) if n not in read)
    if not fits or any(size != 1 for n, size in enumerate(shape_of(source.type)) if n not in {n for _, n in wide}):
        return None
    kept = build.reshape(rewriter, source, [shape_of(source.type)[n] for _, n in wide])
    ordered = build.transpose(rewriter, kept, sorted(range(len(wide)), key=lambda n: wide[n][0]))
    return build.reshape(rewriter, ordered, shape)
