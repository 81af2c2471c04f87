"""top_p: one draw from the most probable entries of each row.

All sums are of integers, so that they have no order: a CPU, a GPU and the interpreter give one answer for one draw.

    weight of a probability   floor(p * 2^39), p taken as at most 1; 0 for NaN and for what is not positive
    share (`top`, `draw`)     floor(s * 2^30), s taken as 0 to 1; 0 for NaN; a draw is below 2^30
    part of a sum             floor(sum * share / 2^30), in two halves that fit in 64 bits

A row of 2^22 entries sums up to 2^61 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FEW, FLOATS, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand

WEIGHT_BITS = 39
SHARE_BITS = 30
ONE = 1 << SHARE_BITS
MOST_COLUMNS = 2**22


class TopPKernel(RoleKernel, frozen=True, tag="top_p"):
    """What `qc.top_p` draws (ir/qc_index.py); operands x (rows, cols), top (rows), draw (rows), out (rows), i64.

    An entry is kept if its weight is at least `last`: the largest weight of the row for which the sum of all weights
    that are as large is ``max(part(sum(weights), top), 1)`` or more.  out is the first index at which the running sum
    of those kept is above ``part(sum(kept), draw)``.  A row whose weights are all 0 gives 0.
    """

    rows: Dim
    cols: Dim

    def contract(self, operands: int) -> Contract:
        return Contract(
            (
                Role("x", (self.rows, self.cols), dtypes=FLOATS),
                Role("top", (self.rows,), dtypes=("f32",)),
                Role("draw", (self.rows,), dtypes=("f32",)),
                Role("out", (self.rows,), "w", dtypes=("i64",)),
            ),
            work=(self.rows, self.cols),
            extents=(self.rows,),
            positive=(self.cols,),
            at_most=((self.cols, MOST_COLUMNS),),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return FEW * elements(operands, symbols)
