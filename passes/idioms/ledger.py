"""The ledger of idioms: every idiom of the program, and every form that looks like one but is none, with the reason."""

from __future__ import annotations

from xdsl.dialects import func, tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.passes.idioms import norms, rope, softmax, split_rope
from qcompiler.passes.loops import loops
from qcompiler.passes.views.trace import Tracer

IDIOMS: tuple[type[Operation], ...] = (
    qc.RmsNormOp, qc.LayerNormOp, qc.SoftmaxOp, qc.RopeOp, qc.AttentionOp,
)  # fmt: skip


def report_idioms(function: func.FuncOp, context: QCContext, stage: str) -> None:
    """Adds the idioms of a function, and the forms that only look like one, to the report. Runs after raising."""
    known = {(d.path, d.what) for d in context.report.of(stage)}
    tracer = Tracer(context)
    for op in function.body.block.ops:
        if isinstance(op, IDIOMS) and (path_of(op), f"raised {op.name}") not in known:
            context.report.add(stage, path_of(op), f"found {op.name}", "the model calls it by its name")
        if isinstance(op, ops.GenericOp) and loops.is_pointwise(op):
            for form, why in (
                ("a norm", norms.lookalike(op.res[0], tracer)),
                ("a softmax", softmax.lookalike(op.res[0], tracer)),
            ):
                if why is not None:
                    context.report.add(stage, path_of(op), f"looks like {form} and stays", why)
        if isinstance(op, tensor.ConcatOp):
            why = rope.lookalike(op, tracer) or split_rope.lookalike(op, tracer)
            if why is not None:
                context.report.add(stage, path_of(op), "looks like a rotary embedding and stays", why)
