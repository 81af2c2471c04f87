"""norm: layer and RMS norm over the last dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class NormKernel(RoleKernel, frozen=True, tag="norm"):
    """Layer or RMS norm over the last dim. Operands: x (rows, cols), [weight (cols)], [bias (cols)], out (rows, cols).

    ``(x - mean) / sqrt(var + eps)`` with the biased variance, or ``x / sqrt(mean(x²) + eps)``, then weight and bias.
    The statistics are fp32, in two passes over the row. The result is rounded once.
    """

    kind: Literal["layer", "rms"]
    rows: Dim
    cols: int
    eps: float
    has_weight: bool
    has_bias: bool

    def contract(self, operands: int) -> Contract:
        shape = (self.rows, self.cols)
        names = [name for name, there in (("weight", self.has_weight), ("bias", self.has_bias)) if there]
        return Contract(
            (Role("x", shape), *(Role(name, (self.cols,), unit=True) for name in names), Role("out", shape, "w")),
            work=shape,
            extents=(self.rows,),
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
