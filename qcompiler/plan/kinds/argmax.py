"""argmax: the position of the first maximum along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import (
    ANY,
    INDICES,
    OPERATIONS_PER_ELEMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    elements,
)
from qcompiler.plan.operands import Operand


class ArgmaxKernel(RoleKernel, frozen=True, tag="argmax"):
    """The position of the first maximum along the middle dim. Operands: x (outer, length, inner), out (outer, inner).

    If there is a NaN, the first NaN is the maximum.
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
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
