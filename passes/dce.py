"""dce: what nobody reads is removed.

    %0 = linalg.transpose ins(%x) outs(%e) permutation = [1, 0]
    func.return %x                                                   ->   func.return %x

Functions and states that are updated stay. Code is straight-line, so one backward walk is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block
from xdsl.passes import ModulePass

from qcompiler.ir.effects import is_removable
from qcompiler.ir.module import functions
from qcompiler.passes.checks.numerics import Exact, Numerics


@dataclass(frozen=True)
class DcePass(ModulePass):
    """Removes ops whose results are unused."""

    name = "dce"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            remove_dead(function.body.block)


def remove_dead(block: Block) -> int:
    """Removes dead ops of a block and of the bodies inside it; returns how many went."""
    removed = 0
    for op in reversed(list(block.ops)):
        if is_removable(op) and all(result.first_use is None for result in op.results):
            block.erase_op(op)
            removed += 1
            continue
        for region in op.regions:
            for inner in region.blocks:
                removed += remove_dead(inner)
    return removed
