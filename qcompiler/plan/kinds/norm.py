"""norm: layer and RMS norm over the last dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class NormKernel(RoleKernel, frozen=True, tag="norm"):
    """Layer or RMS norm over the last dim. Operands: x (rows, cols), [weight (cols)], [bias (cols)], [residual (rows,
    cols)], out (rows, cols).

    With `inner`, x, residual and out are (rows, inner, cols): rows in rows of another stride, as the heads of q are in
    what one linear computes for q, k and v.

    ``(x - mean) / sqrt(var + eps)`` with the biased variance, or ``x / sqrt(mean(x²) + eps)``, then weight and bias.
    The statistics are fp32, in two passes over the row. The result is rounded once. With `has_residual`, the rounded
    result is added to the residual in fp32, and the sum is rounded again.
    """

    kind: Literal["layer", "rms"]
    rows: Dim
    cols: int
    eps: float
    has_weight: bool
    has_bias: bool
    inner: Dim | None = None
    has_residual: bool = False

    def contract(self, operands: int) -> Contract:
        outer = (self.rows,) if self.inner is None else (self.rows, self.inner)
        shape = (*outer, self.cols)
        names = [name for name, there in (("weight", self.has_weight), ("bias", self.has_bias)) if there]
        residual = [Role("residual", shape, like="out")] * self.has_residual
        vectors = (Role(name, (self.cols,), unit=True) for name in names)
        return Contract(
            (Role("x", shape), *vectors, *residual, Role("out", shape, "w")),
            work=shape,
            extents=outer,
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
