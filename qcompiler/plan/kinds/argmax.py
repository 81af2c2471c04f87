"""argmax: the position of the first maximum along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ANY, FEW, INDICES, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class ArgmaxKernel(RoleKernel, frozen=True, tag="argmax"):
    """The position of the first maximum along the middle dim; operands x (outer, length, inner), out (outer, inner).

    The first NaN counts as the maximum.
    """

    outer: Dim
    length: Dim
    inner: Dim

    def contract(self, operands: int) -> Contract:
        full = (self.outer, self.length, self.inner)
        return Contract(
            (Role("x", full, dtypes=ANY), Role("out", (self.outer, self.inner), "w", dtypes=INDICES)),
            work=full,
            extents=full,
            positive=(self.length,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return FEW * elements(operands, symbols)
