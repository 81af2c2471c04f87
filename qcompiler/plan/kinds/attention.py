"""attention: softmax over the scaled products of queries and keys, times the values, for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, FLOATS, INDICES, Contract, Role, RoleKernel, Symbols, volume
from qcompiler.plan.operands import Operand


class AttentionKernel(RoleKernel, frozen=True, tag="attention"):
    """``softmax(q kᵀ * scale + mask) v`` per head; operands q, k, v, [mask], [last], out.

    All but `last` have the dims (batch, heads, length, dim).  k and v may have fewer heads (heads % kv_heads == 0:
    grouped queries).  A boolean mask keeps where true; a float mask is added; mask strides of 0 broadcast.  `causal`:
    query i sees keys j <= i (torch's top-left alignment).  `window`: query i sees keys j > i - window.  With `last`, an
    integer operand (batch, q_len), query i counts as number last[b, i] in both and sees keys j <= last[b, i]; keys past
    the last one of a block of queries are not read.  `softcap`: scaled scores x become softcap * tanh(x / softcap),
    before any mask.  A row that sees no key gives zeros.  The last dim of q, k, v, out has unit stride.
    """

    batch: Dim
    heads: int
    kv_heads: int
    q_len: Dim
    kv_len: Dim
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    mask: Literal["none", "bool", "float"]
    window: int | None = None
    softcap: float | None = None
    last: bool = False

    def contract(self, operands: int) -> Contract:
        if min(self.kv_heads, self.heads) < 1 or self.heads % self.kv_heads:
            raise PlanError(f"an attention kernel has {self.heads} heads over {self.kv_heads} heads of keys and values")
        if self.window is not None and not 1 <= self.window <= COUNTED_IN_32_BITS:
            raise PlanError(f"an attention kernel has a window of {self.window} keys; it must be from 1 to 2**31 - 1")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise PlanError(f"an attention kernel has softcap {self.softcap}; it must be positive and finite")
        if self.last and self.causal:
            raise PlanError("an attention kernel is causal and has an operand `last`, which exclude each other")
        b, h, kv = self.batch, self.heads, self.kv_heads
        masks: list[Role] = []
        if self.mask != "none":
            kinds = ("i1",) if self.mask == "bool" else FLOATS
            masks.append(Role("mask", (b, h, self.q_len, self.kv_len), dtypes=kinds))
        if self.last:
            masks.append(Role("last", (b, self.q_len), dtypes=INDICES))
        return Contract(
            (
                Role("q", (b, h, self.q_len, self.head_dim), unit=True),
                Role("k", (b, kv, self.kv_len, self.head_dim), unit=True),
                Role("v", (b, kv, self.kv_len, self.value_dim), unit=True),
                *masks,
                Role("out", (b, h, self.q_len, self.value_dim), "w", unit=True),
            ),
            work=(b, h, self.q_len, self.head_dim + self.value_dim),  # keys are a loop in a task: no product has both
            extents=(b, self.q_len, self.kv_len),
            positive=(self.head_dim, self.value_dim),
            at_most=((self.head_dim, COUNTED_IN_32_BITS), (self.value_dim, COUNTED_IN_32_BITS)),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        pairs = volume([self.batch, self.heads, self.q_len, self.kv_len], symbols)
        return 2 * pairs * (self.head_dim + self.value_dim) // (2 if self.causal and not self.last else 1)
