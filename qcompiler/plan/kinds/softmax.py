"""softmax: over the last dim."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FEW, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class SoftmaxKernel(RoleKernel, frozen=True, tag="softmax"):
    """Softmax over the last dim, operands x (rows, cols), out (rows, cols), fp32 inside, rounded once."""

    rows: Dim
    cols: Dim

    def contract(self, operands: int) -> Contract:
        shape = (self.rows, self.cols)
        return Contract((Role("x", shape), Role("out", shape, "w")), work=shape, extents=shape)

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return FEW * elements(operands, symbols)
