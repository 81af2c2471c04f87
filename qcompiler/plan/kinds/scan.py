"""scan: running sums and other folds along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import (
    ANY,
    FLOATS,
    OPERATIONS_PER_ELEMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    elements,
)
from qcompiler.plan.operands import Operand


class ScanKernel(RoleKernel, frozen=True, tag="scan"):
    """Running sum (or another fold) along the middle dim of (outer, length, inner); operands x, out."""

    outer: Dim
    length: Dim
    inner: Dim
    fold: Literal["add", "mul", "max", "min", "logaddexp"] = "add"

    def contract(self, operands: int) -> Contract:
        full = (self.outer, self.length, self.inner)
        kinds = ("f64", *FLOATS) if self.fold == "logaddexp" else ANY
        return Contract((Role("x", full, dtypes=ANY), Role("out", full, "w", dtypes=kinds)), work=full, extents=full)

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
