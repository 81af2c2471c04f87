"""round-attention: attention may multiply in bf16.

    %0 = qc.attention %q, %k, %v {scale = 0.125} : …      ->      %0 = qc.attention %q, %k, %v {compute = "bf16", …} : …

Queries, keys, values and the weights of the softmax may then be rounded to bf16 before they are multiplied; scores, the
softmax and all sums stay fp32. Processors and tensor cores multiply pairs of bf16 at twice the rate of fp32 or more.

The option `compute` is what the recipe says of linears: with "bf16" and "int8" every attention in fp32 or bf16 may do
so, with "exact" none. Without it the type of the queries decides: attention of queries in bf16 may, as in torch, which
rounds weights to the type of the values; keys and values of a cache in fp16 are then rounded, too. Attention in fp16
or fp64 never does: its factors have more digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from qcompiler.errors import PassError
from qcompiler.ir import qc
from qcompiler.ir.context import qc_context
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import tensor_dtype
from qcompiler.passes.checks.numerics import Numerics, Permits

KINDS = ("exact", "bf16", "int8")


@dataclass(frozen=True)
class RoundAttentionPass(ModulePass):
    """Lets attention round its factors to bf16 where the recipe or the model's type says so."""

    name = "round-attention"
    numerics: ClassVar[Numerics] = Permits("qc.attention", "compute")

    compute: str | None = None

    def __post_init__(self) -> None:
        if self.compute not in (None, *KINDS):
            raise PassError(f"compute is '{self.compute}'; it is one of {', '.join(KINDS)}", stage=self.name)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            for each in function.body.walk():
                if not isinstance(each, qc.AttentionOp) or each.compute is not None or not self._may_round(each):
                    continue
                each.properties["compute"] = StringAttr("bf16")
                why = "the model's attention is in bf16" if self.compute is None else f"compute='{self.compute}'"
                context.report.add(self.name, path_of(each), "attention may multiply in bf16", why)

    def _may_round(self, op: qc.AttentionOp) -> bool:
        kind = tensor_dtype(op.q.type)
        if self.compute is None:
            return kind == "bf16"
        return self.compute != "exact" and kind in ("f32", "bf16")
