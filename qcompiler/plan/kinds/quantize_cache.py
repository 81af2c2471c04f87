"""quantize_cache: keys or values as rows of a cache in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.formats import cache_rows
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import (
    OPERATIONS_PER_ELEMENT,
    ROW_ALIGNMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    elements,
)
from qcompiler.plan.operands import Operand


class QuantizeCacheKernel(RoleKernel, frozen=True, tag="quantize_cache"):
    """The rows of x (qcompiler/formats/cache_rows.py). Operands: x (outer, middle, inner, cols), out (outer, middle,
    inner, row_bytes(cols, kind)), i8."""

    outer: Dim
    middle: Dim
    inner: Dim
    cols: int
    kind: cache_rows.Kind = "int8"

    def contract(self, operands: int) -> Contract:
        rows = (self.outer, self.middle, self.inner)
        out = (*rows, cache_rows.row_bytes(self.cols, self.kind))
        return Contract(
            (
                Role("x", (*rows, self.cols), unit=True),
                Role("out", out, "w", dtypes=("i8",), unit=True, align=ROW_ALIGNMENT),
            ),
            work=(*rows, self.cols),
            extents=rows,
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
