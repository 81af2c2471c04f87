"""raise-idioms: replaces decomposed norms, softmax, rope and attention by one op each, and masks by flags.

    %s = linalg.generic { x * x } reduced by arith.addf
    %r = linalg.generic { math.rsqrt(s / N + eps) }       ->   %n = qc.rms_norm %x weight(%w) {eps = 1e-6}
    %n = linalg.generic { x * r * w }

The matcher looks at the expression that computes one element (views/trace.py). So it does not matter how the form is
split into loop nests, or where casts and unit dims are. An attention mask that is proven to be (j <= i) becomes the
flag `causal`. A mask that keeps everything is dropped, also as a part of a conjunction. SwiGLU has no op:
fuse-epilogues turns `silu(x Wg) * (x Wu)` into two linears with the silu and the product in their epilogues. If a
matmul outside of attention has heads and batch joined (`view(-1, s, d)`), the pass separates them again, since joining
them needs a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import func, tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.idioms import norms, rope, softmax, split_rope
from qcompiler.passes.idioms.attention import NotRaised, raise_attention
from qcompiler.passes.idioms.attention_operands import read_cache_rows, read_narrow_operands, scale_scores
from qcompiler.passes.idioms.ledger import report_idioms
from qcompiler.passes.idioms.raised import Raised
from qcompiler.passes.idioms.terms import Masks
from qcompiler.passes.loops import loops
from qcompiler.passes.masks.masks import MaskReader, simplify_mask
from qcompiler.passes.rewriting import pattern, rewrite
from qcompiler.passes.views.trace import Tracer
from qcompiler.passes.views.view_rules import fold_views, split_batch

_POINTWISE_FORMS: tuple[tuple[str, Callable[[SSAValue, Tracer], Raised | None]], ...] = (
    ("arith.addf", norms.match),
    ("arith.mulf", norms.match),
    ("arith.divf", norms.match),
    ("arith.divf", softmax.match),
    ("arith.addf", rope.match),
)
"""The matchers, by the last operator of the form, without casts."""


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
            if raised:
                fold_views(list(function.body.block.ops))  # what attention reads, without the views of the matmuls
            operands = [read_cache_rows, read_narrow_operands, scale_scores]
            raised += rewrite(list(function.body.block.ops), operands, again=False)
            # the remaining products over joined batch dims read their operands without a copy
            if raised + rewrite(list(function.body.block.ops), [split_batch], again=False):
                fold_views(list(function.body.block.ops))
            reader = MaskReader(function, context)
            for each in list(function.body.block.ops):
                while isinstance(each, qc.AttentionOp) and simplify_mask(each, reader, context, self.name):
                    pass  # each step drops one part of a conjunction


def _raise_pointwise_forms(function: func.FuncOp, context: QCContext) -> int:
    """Raises norms, softmax and rope; returns their number."""
    tracer = Tracer(context)

    @pattern
    def raise_form(op: ops.GenericOp, rewriter: PatternRewriter) -> SSAValue | None:
        if not loops.is_pointwise(op):
            return None
        last = tracer.head(tracer.element(op.res[0])).op
        made = next((m for m in (match(op.res[0], tracer) for o, match in _POINTWISE_FORMS if o == last) if m), None)
        return None if made is None else accepted(made)

    @pattern
    def raise_joined(op: tensor.ConcatOp, rewriter: PatternRewriter) -> SSAValue | None:
        made = split_rope.match(op, tracer)
        return None if made is None else accepted(made)

    def accepted(made: Raised) -> SSAValue:
        what = f"raised {made.op.name}"
        context.report.add(RaiseIdiomsPass.name, path_of(made.op), what, "it was written out in parts")
        return made.result

    # From the last op to the first, since a larger form contains smaller ones.
    return rewrite(list(function.body.block.ops), [raise_form, raise_joined], again=False, backward=True)


def _raise_attention(function: func.FuncOp, context: QCContext) -> int:
    """Raises attention between two matmuls; returns how often it changed something."""
    tracer, masks = Tracer(context), Masks(MaskReader(function, context))

    @pattern
    def drop_shift(op: qc.SoftmaxOp, rewriter: PatternRewriter) -> SSAValue | None:
        x = softmax.unshifted(op, tracer)
        if x is None:
            return None
        shifted = loops.producer(op.x)
        op.operands = [x]
        if shifted is not None:
            erase_if_dead(shifted, rewriter.erase)
        what = "the maximum in front of a softmax is not subtracted"
        context.report.add(RaiseIdiomsPass.name, path_of(op), what, "the softmax subtracts it itself")
        return op.result

    @pattern
    def raise_between(op: qc.BatchMatmulOp, rewriter: PatternRewriter) -> SSAValue | None:
        result = raise_attention(op, tracer, masks)
        if isinstance(result, NotRaised):
            context.report.add(RaiseIdiomsPass.name, path_of(op), "softmax between two matmuls stays", result.why)
        if not isinstance(result, SSAValue):
            return None
        context.report.add(RaiseIdiomsPass.name, path_of(op), "raised qc.attention", "softmax between two matmuls")
        return result

    return rewrite(list(function.body.block.ops), [drop_shift, raise_between], again=False)
