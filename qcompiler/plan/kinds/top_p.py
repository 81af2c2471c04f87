"""top_p: draws one index from the most probable entries of each row.

All sums are of integers, so their order does not matter: a CPU, a GPU and the interpreter give the same index.

    weight of a probability   floor(p * 2^39), with p at most 1; 0 if p is NaN or not positive
    share (`top`, `draw`)     floor(s * 2^30), with s from 0 to 1; 0 if s is NaN; a draw is below 2^30
    part of a sum             floor(sum * share / 2^30), computed in two halves that fit in 64 bits

The weights of a row of 2^22 entries sum to 2^61 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FLOATS, OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand

WEIGHT_BITS = 39
SHARE_BITS = 30
SHARE_OF_ALL = 1 << SHARE_BITS
MOST_COLUMNS = 2**22


class TopPKernel(RoleKernel, frozen=True, tag="top_p"):
    """The draw of `qc.top_p` (ir/qc_index.py). Operands: x (rows, cols), top (rows), draw (rows), out (rows), i64.

    The entries of weight w or more are kept. w is the largest weight of the row for which those entries' weights sum to
    at least ``max(part(sum(weights), top), 1)``. out is the first index at which the running sum of the kept weights is
    above ``part(sum(kept), draw)``. A row whose weights are all 0 gives 0.
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
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
