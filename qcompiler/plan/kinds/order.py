"""order: sort and top-k along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import (
    ANY,
    OPERATIONS_PER_ELEMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    elements,
    same_dims,
    value_of,
)
from qcompiler.plan.operands import Operand


class OrderKernel(RoleKernel, frozen=True, tag="order"):
    """The first `count` entries along the middle dim in sorted order: a sort (count = length) or top-k.

    Operands: x (outer, length, inner), values and indices (i64), both (outer, count, inner). NaN is larger than every
    number. Equal values keep their order.
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim
    descending: bool

    def contract(self, operands: int) -> Contract:
        picked = (self.outer, self.count, self.inner)
        return Contract(
            (
                Role("x", (self.outer, self.length, self.inner), dtypes=ANY),
                Role("values", picked, "w", dtypes=ANY, like="x"),
                Role("indices", picked, "w", dtypes=("i64",)),
            ),
            work=(self.outer, self.length, self.inner),
            extents=(self.outer, self.length, self.inner),
            positive=() if same_dims((self.count,), (self.length,)) else (self.count,),
            at_most=((self.count, self.length),),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols) * value_of(self.length, symbols).bit_length()
