"""index_update: replaces rows along one axis, in place."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ANY, INDICES, Contract, Role, RoleKernel, Symbols, replaced
from qcompiler.plan.operands import Operand


class IndexUpdateKernel(RoleKernel, frozen=True, tag="index_update"):
    """``x[o, index[i], n] = src[o, i, n]``, in place. Operands: x (rw; outer, length, inner), index (count), src.

    Indices must be in [0, length); negative ones are not allowed. The CPU kernel reports any other index as an error;
    on CUDA it writes nothing.
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim

    def contract(self, operands: int) -> Contract:
        full = (self.outer, self.count, self.inner)
        return Contract(
            (
                Role("x", (self.outer, self.length, self.inner), "rw", dtypes=ANY),
                Role("index", (self.count,), dtypes=INDICES),
                Role("src", full, dtypes=ANY, like="x"),
            ),
            work=full,
            extents=(*full, self.length),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 0

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Only the replaced elements of x are moved."""
        return replaced(operand, stored, (self.outer, self.count, self.inner), symbols)
