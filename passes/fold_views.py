"""fold-views: removes views that cancel each other, and folds the others into the ops that read them.

    %1 = tensor.collapse_shape %x [[0, 1], [2]]           %3 = qc.linear %x, %w
    %2 = qc.linear %1, %w                            ->
    %3 = tensor.expand_shape %2 [[0, 1], [2]]

- A chain of reshapes, transposes or slices becomes one op or none.
- A reshape of the leading dims of a linear's result moves in front of the linear, where it may cancel another reshape.
- Transposes, broadcasts and unit dims become indexing maps of the `linalg.generic` that reads them.
- Attention reads a mask with its unit dims, and reads repeated heads of keys and values without the repetition.

No value is computed differently.
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
    # a linear over (b, s, K) may sum in a different order than one over (b*s, K)
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            fold_views(list(function.body.block.ops))
