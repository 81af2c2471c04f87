"""batch_matmul: products of two strided operands of any rank."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import Contract, Role, RoleKernel, Symbols, volume
from qcompiler.plan.operands import Operand


class BatchMatmulKernel(RoleKernel, frozen=True, tag="batch_matmul"):
    """``out[b…, m, n] = sum_k a[b…, m, k] * b[b…, k, n]`` over strided operands of equal rank, fp32 accumulation."""

    batch: tuple[Dim, ...]
    m: Dim
    n: Dim
    k: Dim

    def contract(self, operands: int) -> Contract:
        b, m, n, k = self.batch, self.m, self.n, self.k
        return Contract(
            (Role("a", (*b, m, k)), Role("b", (*b, k, n)), Role("out", (*b, m, n), "w")),
            work=(*b, m, n, k),
            extents=(*b, m, n, k),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 2 * volume([*self.batch, self.m, self.n, self.k], symbols)
