"""grouped_linear: linears with the weight of one expert for each row."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, INDICES, Contract, Role, RoleKernel, Symbols, once, value_of
from qcompiler.plan.operands import Operand


class GroupedLinearKernel(RoleKernel, frozen=True, tag="grouped_linear"):
    """``out[p, j] = sum_k x[p // repeat, k] * decode(w)[index[p] * n + j, k]``, fp32 accumulation, rounded once.

    Operands: x (rows, k), w (experts * n, k) plain or packed, index (rows * repeat; i64 or i32), out (rows * repeat,
    n).  x has unit stride along k and out unit stride along n.  Decoded weights are rounded to the packed operand's
    dtype before use.  Of w only the experts that `index` names are read.  An index outside [0, experts) gives zeros and
    is reported (on CUDA: it gives NaN).
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
        """Of w the experts that pairs name."""
        if operand.name == "w":
            pairs = value_of(self.rows, symbols) * self.repeat
            return stored * min(pairs, self.experts) // max(self.experts, 1)
        return once(operand, stored)
