"""round-results: what all readers round to bf16 is stored in bf16.

    %y = qc.linear %x, %w {…} : tensor<…xf32>                  %y = qc.linear %x, %w {…} : tensor<…xbf16>
    %z = qc.linear %y, %v      (%v decodes to bf16)      ->    %z = qc.linear %y, %v

Results of linears and of attention move half the bytes then, and no reader rounds its rows again. A reader rounds what
it multiplies: a linear by the element type of its weight, an attention that may (`compute`, stage round-attention), in
whatever views they read it. One reader that does not, such as an addition to the residual, keeps a result in fp32. An
accumulator is rounded once, as before, so a linear's factors keep their bits. An attention whose kernel would have left
its rounding out multiplies rounded factors now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, bf16
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from qcompiler.ir import qc
from qcompiler.ir.context import qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.checks.numerics import Exact, Numerics
from qcompiler.passes.views import views


@dataclass(frozen=True)
class RoundResultsPass(ModulePass):
    """Stores results of linears and of attention in bf16 where every reader rounds them to it."""

    name = "round-results"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            for each in list(function.body.block.ops):
                if not isinstance(each, qc.LinearOp | qc.AttentionOp) or not _may_be_stored_rounded(each):
                    continue
                if isinstance(each, qc.LinearOp):
                    _round_epilogue(each)
                _store_rounded(each.result)
                context.report.add(self.name, path_of(each), "its result is stored in bf16", "all readers round it")


def _may_be_stored_rounded(op: qc.LinearOp | qc.AttentionOp) -> bool:
    """Whether the result is in fp32, and everything that reads it rounds it to bf16."""
    if tensor_dtype(op.result.type) != "f32" or len(op.results) > 1:
        return False
    if isinstance(op, qc.AttentionOp) and op.divided_into is not None:
        return False
    readers = list(views.readers(op.result))
    return bool(readers) and all(_rounds(reader, value) for reader, value in readers)


def _rounds(reader: Operation, value: SSAValue) -> bool:
    """Whether an op rounds `value` to bf16 wherever it reads it."""
    places = [place for place, operand in enumerate(reader.operands) if operand is value]
    if isinstance(reader, qc.LinearOp):  # x is its first operand
        return places == [0] and tensor_dtype(reader.w.type) == "bf16" and not reader.prologue.blocks
    if isinstance(reader, qc.AttentionOp):  # q, k and v are its first three
        return max(places) < 3 and reader.rounds_to == "bf16" and reader.rows_of is None
    return False


def _round_epilogue(linear: qc.LinearOp) -> None:
    """The epilogue's last value is rounded, if there is an epilogue."""
    if not linear.epilogue.blocks:
        return  # its accumulator is rounded to the type of the result
    last = linear.epilogue.block.last_op
    assert isinstance(last, qc.YieldOp)
    rounded = arith.TruncFOp(last.operands[0], bf16)
    linear.epilogue.block.insert_op_before(rounded, last)
    last.operands[0] = rounded.result


def _store_rounded(value: SSAValue) -> None:
    """Gives a value and all views of it the element type bf16."""
    value = Rewriter.replace_value_with_new_type(value, tensor_type(shape_of(value.type), "bf16"))
    for view in [use.operation for use in value.uses if isinstance(use.operation, views.VIEWS)]:
        # The region of these has arguments of the element type, too.
        _store_rounded(_rebuilt(view) if isinstance(view, ops.TransposeOp | ops.BroadcastOp) else view.results[0])


def _rebuilt(view: ops.TransposeOp | ops.BroadcastOp) -> SSAValue:
    """The same view of its source, which has another element type now."""
    new = views.same_view(Builder(InsertPoint.before(view)), view, views.source_of(view))
    assert new is not None
    made = new.owner
    assert isinstance(made, Operation)
    made.attributes.update(view.attributes)
    view.results[0].replace_all_uses_with(new)
    erase_if_dead(view)
    return new


__all__ = ["RoundResultsPass"]
