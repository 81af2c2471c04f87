"""fuse-elementwise: moves pointwise loop nests into the loop nests that read them.

    %1 = linalg.generic ins(%x) { math.exp }              %2 = linalg.generic ins(%x, %y) {
    %2 = linalg.generic ins(%1, %y) { arith.addf }   ->     math.exp; arith.addf }

A producer moves into its only reader, which may be pointwise or a reduction. If it has several readers, or if the
reader's loops would compute its elements repeatedly, the producer is copied only if it is trivial: no operand and a
little index arithmetic, or one operand and at most two cheap operations. A pair `truncf` -> `extf` that becomes
adjacent inside a fused body is deleted; nothing else changes the numbers.

`qc.rope` becomes a loop nest first, so that it can fuse; one that reads a concat becomes a nest for each part. So does
`qc.windows`, unless a linear is its only reader, because the linear's kernel reads the image directly. The pass walks
from the last op to the first, so each body moves once, and the time is linear in the number of ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.passes import ModulePass

from qcompiler.ir.context import QCContext
from qcompiler.ir.module import functions
from qcompiler.passes.checks.numerics import Numerics, Ulps
from qcompiler.passes.loops.fusion import absorb_producers, worth_fusing
from qcompiler.passes.loops.rope_loops import rope_to_loops
from qcompiler.passes.rewriting import rewrite
from qcompiler.passes.views.im2col import windows_to_loops
from qcompiler.passes.views.joined_rope import rope_before_concat


@dataclass(frozen=True)
class FuseElementwisePass(ModulePass):
    """Fuses pointwise loop nests into their readers."""

    name = "fuse-elementwise"
    numerics: ClassVar[Numerics] = Ulps(2)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        pairs = 0
        for function in functions(op):
            rewrite(list(function.body.block.ops), [rope_before_concat], again=False)
            rewrite(list(function.body.block.ops), [rope_to_loops, windows_to_loops], again=False)
            for each in reversed(list(function.body.block.ops)):
                if isinstance(each, ops.GenericOp) and each.parent is not None:
                    pairs += absorb_producers(each, worth_fusing)
        if pairs and isinstance(ctx, QCContext):
            ctx.report.add(self.name, "", f"deleted {pairs} rounding pairs", "truncf -> extf inside fused bodies")
