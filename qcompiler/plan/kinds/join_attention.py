"""join_attention: the result of an attention whose keys were divided into parts."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.attention_parts import COLUMNS_BEHIND, MOST_PARTS
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, Contract, Role, RoleKernel, Symbols, volume
from qcompiler.plan.operands import Operand


class JoinAttentionKernel(RoleKernel, frozen=True, tag="join_attention"):
    """``out = sum_p fade_p sums_p / sum_p fade_p total_p`` with ``fade_p = exp(top_p - max_p top_p)``, per query.

    Operands: x, f32 (batch, heads, q_len, parts, value_dim + 2), which is what an attention kernel with `parts` writes:
    the sums of a part, its top and its total. out (batch, heads, q_len, value_dim). Parts are added in their order, in
    fp32, and the result is rounded once. A query without a key gives zeros.
    """

    batch: Dim
    heads: int
    q_len: Dim
    parts: int
    value_dim: int

    def contract(self, operands: int) -> Contract:
        rows = (self.batch, self.heads, self.q_len)
        return Contract(
            (
                Role("x", (*rows, self.parts, self.value_dim + COLUMNS_BEHIND), dtypes=("f32",), unit=True),
                Role("out", (*rows, self.value_dim), "w", unit=True),
            ),
            work=(*rows, self.parts, self.value_dim + COLUMNS_BEHIND),
            extents=(self.batch, self.q_len),
            positive=(self.heads, self.parts, self.value_dim),
            at_most=((self.parts, MOST_PARTS), (self.value_dim, COUNTED_IN_32_BITS)),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 2 * volume((self.batch, self.heads, self.q_len, self.parts, self.value_dim + COLUMNS_BEHIND), symbols)
