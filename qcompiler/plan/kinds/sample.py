"""sample: draws one token for each sequence from a row of logits. `plan/sample_rule.py` is the definition in NumPy.

All sums are of integers, so that their order does not matter: a CPU, a GPU and the interpreter give the same token.

    score     the logit in fp32 after penalties and bias, each operation rounded once
    order     by falling score; equal scores by token
    weight    2^40 * 2^-t, t = (largest score - score) * scale, in fixed point; 0 from t = 41 on
    share     a number from 0 to 1, times 2^30
    draw      a number below 1, times 2^64

`how` has one row of `WORDS` integers for each sequence.  `ROW` is the row of logits, -1 for no draw; a scale of 0 takes
the first token of the order; `TOP_K` 0 and `TOP_P` 2^30 keep all tokens; `MIN_P` 0 drops none.  `SCALE` (log2(e) /
temperature), `REPETITION`, `PRESENCE` and `FREQUENCY` are the bits of an fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FLOATS, OPERATIONS_PER_ELEMENT, Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand

ROW, DRAW, TOP_K, TOP_P, MIN_P, SCALE, REPETITION, PRESENCE, FREQUENCY, FLAGS = range(10)
WORDS = 10

READS_BIAS, READS_TALLIES = 1, 2
"""The bits of `FLAGS`. A row of biases or tallies whose bit is not set is not read."""

GIVEN = 1 << 20
"""In a tally, a token of the prompt. The bits below it count how often the token was generated."""

BROKEN, NONE_ALLOWED, NOT_ASKED = -1, -2, -3
"""Results that are no token: NaN or infinity among the scores, no finite score, and no draw."""

WEIGHT_BITS = 40
SHARE_BITS = 30
MOST_COLUMNS = 2**22
"""Rows of so many weights sum to 2^62."""

TAYLOR = (2**31, 2**31, 2**30, 357913941, 89478485, 17895697, 2982616, 426088, 53261, 5918, 592, 54)
"""2^31 / n! for n = 0 … 11: e^-x for x < ln 2 to 2^-29."""
LN2 = 2977044472
"""ln 2 times 2^32."""


class SampleKernel(RoleKernel, frozen=True, tag="sample"):
    """The draw of `qc.sample` (ir/qc_index.py).

    Operands: x (rows, cols), how (batch, WORDS), tallies (batch, cols), bias (batch, cols), out (batch), i64.  A row of
    `how` that names no row of x is not asked.
    """

    batch: Dim
    rows: Dim
    cols: Dim

    def contract(self, operands: int) -> Contract:
        return Contract(
            (
                Role("x", (self.rows, self.cols), dtypes=FLOATS),
                Role("how", (self.batch, WORDS), dtypes=("i64",)),
                Role("tallies", (self.batch, self.cols), dtypes=("f32",)),
                Role("bias", (self.batch, self.cols), dtypes=("f32",)),
                Role("out", (self.batch,), "w", dtypes=("i64",)),
            ),
            work=(self.batch, self.cols),
            extents=(self.batch, self.rows),
            positive=(self.cols,),
            at_most=((self.cols, MOST_COLUMNS),),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return OPERATIONS_PER_ELEMENT * elements(operands, symbols)
