"""embedding: copies the rows of a table, plain or packed, that ids select."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import INDICES, Contract, Role, RoleKernel, Symbols, once, value_of
from qcompiler.plan.operands import Operand


class EmbeddingKernel(RoleKernel, frozen=True, tag="embedding"):
    """``out[i, :] = decode(table)[ids[i], :]``. Operands: ids (count), table (rows, cols) plain or packed, out.

    The CPU kernel reports an id outside [0, rows) as an error; on CUDA such an id gives a row of NaN.
    """

    count: Dim
    rows: int
    cols: int

    def contract(self, operands: int) -> Contract:
        return Contract(
            (
                Role("ids", (self.count,), dtypes=INDICES),
                Role("table", (self.rows, self.cols), packed=True),
                Role("out", (self.count, self.cols), "w", unit=True),
            ),
            work=(self.count, self.cols),
            extents=(self.count,),
            positive=(self.rows, self.cols),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 0

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Only the selected rows of the table are read."""
        if operand.name == "table":
            return stored * min(value_of(self.count, symbols), self.rows) // max(self.rows, 1)
        return once(operand, stored)
