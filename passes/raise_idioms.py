"""raise-idioms: decomposed forms become one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompiler.passes.support.masks import MaskReader, simplify_mask
from qcompiler.passes.support.numerics import Numerics, Reordered
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.ir import qc
from qcompiler.ir.context import qc_context
from qcompiler.ir.module import functions


@dataclass(frozen=True)
class RaiseIdiomsPass(ModulePass):
    """Recognises norms, rope, softmax, attention and masks."""

    name = "raise-idioms"
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            reader = MaskReader(function, context)
            for each in list(function.body.block.ops):
                if isinstance(each, qc.AttentionOp):
                    simplify_mask(each, reader, context, self.name)
