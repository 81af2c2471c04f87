"""fold-views: views cancel each other and disappear into the ops that read them.

    %1 = tensor.collapse_shape %x [[0, 1], [2]]           %3 = qc.linear %x, %w
    %2 = qc.linear %1, %w                            ->
    %3 = tensor.expand_shape %2 [[0, 1], [2]]

Chains of reshapes, transposes and slices become one op or none; a reshape of a linear's leading dims moves in front of
it; transposes, broadcasts and unit dims become indexing maps of the `linalg.generic` that reads them; attention reads a
mask at its unit dims and repeated key/value heads once.  Nothing is computed differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.ir.module import functions
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.views.view_rules import fold_views


@dataclass(frozen=True)
class FoldViewsPass(ModulePass):
    """Cancels views and folds them into their readers."""

    name = "fold-views"
    # a linear over (b, s, K) may sum in another order than over (b*s, K)
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            fold_views(list(function.body.block.ops))
