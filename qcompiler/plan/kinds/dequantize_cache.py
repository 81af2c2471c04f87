"""dequantize_cache: the values of rows of a cache, where an op other than attention reads them."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.formats import cache_rows
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ROW_ALIGNMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand


class DequantizeCacheKernel(RoleKernel, frozen=True, tag="dequantize_cache"):
    """What rows mean (qcompiler/formats/cache_rows.py). Operands: rows (outer, middle, inner, row_bytes(cols, kind)),
    i8, out (outer, middle, inner, cols)."""

    outer: Dim
    middle: Dim
    inner: Dim
    cols: int
    kind: cache_rows.Kind = "int8"

    def contract(self, operands: int) -> Contract:
        rows = (self.outer, self.middle, self.inner)
        stored = (*rows, cache_rows.row_bytes(self.cols, self.kind))
        return Contract(
            (
                Role("rows", stored, dtypes=("i8",), unit=True, align=ROW_ALIGNMENT),
                Role("out", (*rows, self.cols), "w"),
            ),
            work=(*rows, self.cols),
            extents=rows,
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return elements(operands, symbols)
