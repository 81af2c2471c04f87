"""norm: layer and RMS norm over the last dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class NormKernel(RoleKernel, frozen=True, tag="norm"):
    """Layer or RMS norm over the last dim. Operands: x (rows, cols), [weight (cols)], [bias (cols)], out (rows, cols).

    With `inner`, x and out are (rows, inner, cols): rows in rows of another stride, as the heads of q are in what one
    linear computes for q, k and v.

    ``(x - mean) / sqrt(var + eps)`` with the biased variance, or ``x / sqrt(mean(x²) + eps)``, then weight and bias.
    The statistics are fp32, in two passes over the row. The result is rounded once.
    """

    kind: Literal["layer", "rms"]
    rows: Dim
    cols: int
    eps: float
    has_weight: bool
    has_bias: bool
    inner: Dim | None = None

    def contract(self, operands: int) -> Contract:
        outer = (self.rows,) if self.inner is None else (self.rows, self.inner)
        shape = (*outer, self.cols)
        names = [name for name, there in (("weight", self.has_weight), ("bias", self.has_bias)) if there]
        return Contract(
            (Role("x", shape), *(Role(name, (self.cols,), unit=True) for name in names), Role("out", shape, "w")),
            work=shape,
            extents=outer,
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
