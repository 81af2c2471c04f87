"""quantize_rows: quantises each row of floats to int8 with its own scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from qcompiler.errors import PlanError
from qcompiler.formats import int8_rows
from qcompiler.plan.dims import Dim, product
from qcompiler.plan.kernel_body import ROW_ALIGNMENT, Contract, Role, RoleKernel, Symbols, same_dims
from qcompiler.plan.operands import Operand


class QuantizeRowsKernel(RoleKernel, frozen=True, tag="quantize_rows"):
    """The int8 rows of x (qcompiler/formats/int8_rows.py). Operands: x (rows, cols), [columns (cols), i1], [largest
    (images), fp32], out (rows, row_bytes(cols)), i8.

    `kind` is "token", "tensor" (`value` is the clip), "outliers" (`value` is the threshold, and codes in `columns` are
    0) or "image": `each` rows after another are an image, whose largest magnitude is given.
    """

    rows: Dim
    cols: int
    kind: Literal["token", "tensor", "outliers", "image"]
    value: float = 0.0
    images: Dim = 1
    each: Dim = 1

    def contract(self, operands: int) -> Contract:
        if not math.isfinite(self.value) or self.value < 0:
            raise PlanError(f"a quantize_rows kernel has {self.cols} columns and the value {self.value}")
        if self.kind == "image" and not same_dims((self.rows,), (product([self.images, self.each]).to_dim(),)):
            raise PlanError(f"a quantize_rows kernel has {self.rows} rows, in {self.images} images of {self.each}")
        columns = [Role("columns", (self.cols,), dtypes=("i1",), unit=True)] if self.kind == "outliers" else []
        row = (self.rows, int8_rows.row_bytes(self.cols))
        return Contract(
            (
                Role("x", (self.rows, self.cols), unit=True),
                *columns,
                *([Role("largest", (self.images,), dtypes=("f32",), unit=True)] if self.kind == "image" else []),
                Role("out", row, "w", dtypes=("i8",), unit=True, align=ROW_ALIGNMENT),
            ),
            work=(self.rows, self.cols),
            extents=(self.rows, *((self.images, self.each) if self.kind == "image" else ())),
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 0
