"""scatter: replaces elements along one axis, or combines them with the old ones, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ANY, INDICES, Contract, Role, RoleKernel, Symbols, replaced
from qcompiler.plan.operands import Operand


class ScatterKernel(RoleKernel, frozen=True, tag="scatter"):
    """``out[o, index[o, i, n], n] = src[o, i, n]``, in place and for ascending i. A `fold` other than "none" combines
    the old element with the new one, and rounds to out's type each time.

    Operands: index (outer, count, inner), src (outer, count, inner), out (rw; outer, length, inner). Negative indices
    count from the end. The CPU kernel reports an index out of range as an error; on CUDA it writes nothing.
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
        """Only the replaced elements of out are moved."""
        return replaced(operand, stored, (self.outer, self.count, self.inner), symbols)
