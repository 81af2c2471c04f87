"""route: the experts of each row, and their weights, from the scores of a router.

scores = "all":     p = softmax(x); the `count` largest entries of p, and these entries as weights
scores = "chosen":  the `count` largest entries of x, and the softmax of these entries as weights
normalise:          each weight is divided by the sum of the row's weights, added up from the largest one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand

MOST_EXPERTS = 512
"""A warp of a GPU keeps a row in 16 registers of each thread."""

MOST_CHOSEN = 32
"""Each thread of a warp keeps one chosen expert."""

Scores = Literal["all", "chosen"]
SCORES: tuple[Scores, ...] = ("all", "chosen")


class RouteKernel(RoleKernel, frozen=True, tag="route"):
    """The routing of `qc.route` (ir/qc_index.py). Operands: x (rows, cols), weights and indices (rows, count).

    All is computed in fp32, and weights are rounded once. Entries are ordered as top-k orders them (`order`): NaN is
    larger than every number, and equal entries keep their order.
    """

    rows: Dim
    cols: int
    count: int
    scores: Scores
    normalise: bool

    def contract(self, operands: int) -> Contract:
        picked = (self.rows, self.count)
        return Contract(
            (
                Role("x", (self.rows, self.cols)),
                Role("weights", picked, "w"),
                Role("indices", picked, "w", dtypes=("i64",)),
            ),
            work=(self.rows, self.cols),
            extents=(self.rows,),
            positive=(self.cols, self.count),
            at_most=((self.count, self.cols), (self.cols, MOST_EXPERTS), (self.count, MOST_CHOSEN)),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols) * self.count.bit_length()
