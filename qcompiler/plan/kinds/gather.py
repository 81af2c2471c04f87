"""gather: reads the elements along one axis that an index selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import ANY, INDICES, Contract, Role, RoleKernel, Symbols
from qcompiler.plan.operands import Operand


class GatherKernel(RoleKernel, frozen=True, tag="gather"):
    """`take`: ``out[o, i, n] = x[o, index[i], n]``; `along`: ``out[o, i, n] = x[o, index[o, i, n], n]``.

    Operands: x (outer, length, inner), index, out. Negative indices count from the end. The CPU kernel reports an index
    out of range as an error; on CUDA it gives NaN, or the lowest integer.
    """

    mode: Literal["take", "along"]
    outer: Dim
    length: Dim
    count: Dim
    inner: Dim

    def contract(self, operands: int) -> Contract:
        full = (self.outer, self.count, self.inner)
        index: tuple[Dim, ...] = (self.count,) if self.mode == "take" else full
        return Contract(
            (
                Role("x", (self.outer, self.length, self.inner), dtypes=ANY),
                Role("index", index, dtypes=INDICES),
                Role("out", full, "w", dtypes=ANY, like="x"),
            ),
            work=full,
            extents=(*full, self.length),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 0
