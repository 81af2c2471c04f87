"""dce: dead code elimination. Ops without readers are removed.

    %0 = linalg.transpose ins(%x) outs(%e) permutation = [1, 0]
    func.return %x                                                   ->   func.return %x

Ops with effects, such as updates of a state, stay. Code is straight-line, so one backward walk is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.ir.effects import erase_dead
from qcompiler.ir.module import functions
from qcompiler.passes.checks.numerics import Exact, Numerics


@dataclass(frozen=True)
class DcePass(ModulePass):
    """Removes ops whose results are unused."""

    name = "dce"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            erase_dead(function.body.block)
