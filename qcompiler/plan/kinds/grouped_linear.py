"""grouped_linear: a linear that multiplies each row with the weight of one MoE expert, chosen by an index."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, INDICES, Contract, Role, RoleKernel, Symbols, once, value_of
from qcompiler.plan.operands import Operand


class GroupedLinearKernel(RoleKernel, frozen=True, tag="grouped_linear"):
    """``out[p, j] = sum_k x[p // repeat, k] * decode(w)[index[p] * n + j, k]``, summed in fp32 and rounded once.

    Operands: x (rows, k), w (experts * n, k) plain or packed, index (rows * repeat; i64 or i32), out (rows * repeat,
    n). x has unit stride along k, and out along n. Decoded weights are rounded to w's dtype before the product. Only
    the experts that `index` selects are read. The CPU kernel reports an index outside [0, experts) as an error and
    gives zeros; on CUDA such an index gives NaN.
    """

    rows: Dim
    repeat: int
    experts: int
    n: int
    k: int

    def contract(self, operands: int) -> Contract:
        if min(self.repeat, self.experts, self.n, self.k) < 1:
            raise PlanError(
                f"a grouped linear has {self.experts} experts of {self.n}x{self.k} and {self.repeat} pairs per row; "
                "all must be positive"
            )
        pairs = (dim(self.rows) * self.repeat).to_dim()
        return Contract(
            (
                Role("x", (self.rows, self.k), unit=True),
                Role("w", (self.experts * self.n, self.k), packed=True),
                Role("index", (pairs,), dtypes=INDICES),
                Role("out", (pairs, self.n), "w", unit=True),
            ),
            work=(pairs, self.n, self.k),
            extents=(self.rows, pairs),
            positive=(self.repeat, self.experts, self.n, self.k),
            at_most=((pairs, COUNTED_IN_32_BITS),),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 2 * value_of(self.rows, symbols) * self.repeat * self.n * self.k

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Only the selected experts of w are read."""
        if operand.name == "w":
            pairs = value_of(self.rows, symbols) * self.repeat
            return stored * min(pairs, self.experts) // max(self.experts, 1)
        return once(operand, stored)
