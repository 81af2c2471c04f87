"""softmax: over the last dim."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class SoftmaxKernel(RoleKernel, frozen=True, tag="softmax"):
    """Softmax over the last dim, computed in fp32 and rounded once. Operands: x (rows, cols), out (rows, cols)."""

    rows: Dim
    cols: Dim

    def contract(self, operands: int) -> Contract:
        shape = (self.rows, self.cols)
        return Contract((Role("x", shape), Role("out", shape, "w")), work=shape, extents=shape)

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
