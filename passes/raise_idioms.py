"""raise-idioms: decomposed norms, softmax, rope and attention become one op each; masks become flags.

    %s = linalg.generic { x * x } reduced by arith.addf
    %r = linalg.generic { math.rsqrt(s / N + eps) }       ->   %n = qc.rms_norm %x weight(%w) {eps = 1e-6}
    %n = linalg.generic { x * r * w }

Matching reads what one element is computed from (views/trace.py), so it does not matter how the form was split into
loop nests, nor where casts and unit dims stand.  An attention mask that is provably (j <= i) becomes the flag `causal`,
one that keeps everything is dropped, also as part of a conjunction.  SwiGLU has no op of its own: fuse-epilogues makes
`silu(x Wg) * (x Wu)` two linears whose epilogues hold the silu and the product.  A matmul that is no part of an
attention, over heads that were joined with the batch (`view(-1, s, d)`), has them as two dims again: joining copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import functions, path_of
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.idioms import norms, rope, softmax
from qcompiler.passes.idioms.attention import NotRaised, lookalike, raise_attention
from qcompiler.passes.idioms.ledger import report_idioms
from qcompiler.passes.idioms.raised import Raised
from qcompiler.passes.idioms.terms import Masks
from qcompiler.passes.loops import loops
from qcompiler.passes.masks.masks import MaskReader, simplify_mask
from qcompiler.passes.views.trace import Tracer
from qcompiler.passes.views.view_rules import fold_views, split_batch

_POINTWISE_FORMS: tuple[tuple[str, Callable[[SSAValue, Tracer], Raised | None]], ...] = (
    ("arith.addf", norms.match),
    ("arith.mulf", norms.match),
    ("arith.divf", norms.match),
    ("arith.divf", softmax.match),
    ("arith.addf", rope.match),
)
"""By the last operator of the form (casts aside)."""


@dataclass(frozen=True)
class RaiseIdiomsPass(ModulePass):
    """Recognises norms, softmax, rope, attention and masks."""

    name = "raise-idioms"
    numerics: ClassVar[Numerics] = Reordered(2e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            raised = _raise_pointwise_forms(function, context) + _raise_attention(function, context)
            report_idioms(function, context, self.name)
            if raised + _split_batches(function):
                fold_views(list(function.body.block.ops))
            reader = MaskReader(function, context)
            for each in list(function.body.block.ops):
                while isinstance(each, qc.AttentionOp) and simplify_mask(each, reader, context, self.name):
                    pass  # a conjunction loses one part at a time


def _raise_pointwise_forms(function: func.FuncOp, context: QCContext) -> int:
    """Norms, softmax and rope; returns how many."""
    tracer, raised = Tracer(context), 0
    # The last op first: the largest form contains the smaller ones.
    for op in reversed(list(function.body.block.ops)):
        if not isinstance(op, ops.GenericOp) or op.parent is None or not loops.is_pointwise(op):
            continue
        last = tracer.head(tracer.element(op.res[0])).op
        for wanted, match in _POINTWISE_FORMS:
            made = match(op.res[0], tracer) if last == wanted else None
            if made is not None:
                _replace(op, made, context)
                raised += 1
                break
    return raised


def _replace(op: ops.GenericOp, made: Raised, context: QCContext) -> None:
    op.res[0].replace_all_uses_with(made.result)
    loops.erase_if_dead(op)
    context.report.add(RaiseIdiomsPass.name, path_of(made.op), f"raised {made.op.name}", "it was written out in parts")


def _split_batches(function: func.FuncOp) -> int:
    """Products that are left over joined batch dims read their operands as they lie; returns how many."""
    split = 0
    for op in list(function.body.block.ops):
        result = split_batch(op) if isinstance(op, qc.BatchMatmulOp) and op.parent is not None else None
        if result is not None:
            op.results[0].replace_all_uses_with(result)
            loops.erase_if_dead(op)
            split += 1
    return split


def _raise_attention(function: func.FuncOp, context: QCContext) -> int:
    """Attention between two matmuls; returns how often."""
    tracer, masks, raised = Tracer(context), Masks(MaskReader(function, context)), 0
    for op in list(function.body.block.ops):
        if not isinstance(op, qc.BatchMatmulOp) or op.parent is None:
            continue
        result = raise_attention(op, tracer, masks)
        why = lookalike(op, tracer) if result is None else result.why if isinstance(result, NotRaised) else None
        if why is not None:
            context.report.add(RaiseIdiomsPass.name, path_of(op), "softmax between two matmuls stays", why)
        if not isinstance(result, SSAValue):
            continue
        raised += 1
        op.result.replace_all_uses_with(result)
        loops.erase_if_dead(op)
        context.report.add(RaiseIdiomsPass.name, path_of(op), "raised qc.attention", "softmax between two matmuls")
    return raised
