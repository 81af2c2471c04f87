"""scatter: elements along one axis replaced in place, or folded into what stands there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ANY, INDICES, Contract, Role, RoleKernel, Symbols, replaced
from qcompiler.plan.operands import Operand


class ScatterKernel(RoleKernel, frozen=True, tag="scatter"):
    """In place ``out[o, index[o, i, n], n] = src[o, i, n]``, or folded into what stands there, i in ascending order.

    Operands index (outer, count, inner), src (outer, count, inner), out (rw; outer, length, inner).  Negative indices
    count from the end; those out of range are reported (on CUDA: they write nothing).  Each fold rounds to out's type.
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim
    fold: Literal["none", "add", "mul", "max", "min"]

    def contract(self, operands: int) -> Contract:
        picked = (self.outer, self.count, self.inner)
        return Contract(
            (
                Role("index", picked, dtypes=INDICES),
                Role("src", picked, dtypes=ANY, like="out"),
                Role("out", (self.outer, self.length, self.inner), "rw", dtypes=ANY),
            ),
            work=picked,
            extents=(*picked, self.length),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 0

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Of out only the elements that are replaced."""
        return replaced(operand, stored, (self.outer, self.count, self.inner), symbols)
