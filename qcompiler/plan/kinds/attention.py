"""attention: softmax over the scaled products of queries and keys, times the values, for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from qcompiler.errors import PlanError
from qcompiler.formats import cache_rows
from qcompiler.plan.attention_parts import COLUMNS_BEHIND, FEW_QUERIES, MOST_PARTS
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel_body import (
    COUNTED_IN_32_BITS,
    FLOATS,
    INDICES,
    ROW_ALIGNMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    volume,
)
from qcompiler.plan.operands import Operand


class AttentionKernel(RoleKernel, frozen=True, tag="attention"):
    """``softmax(q kᵀ * scale + mask) v`` per head. Operands: q, k, v, [mask], [last], [sinks], out.

    All operands but `last` have the dims (batch, heads, length, dim), and the last dim of q, k, v and out has unit
    stride. k and v may have fewer heads, with heads % kv_heads == 0 (grouped queries).

    - A boolean mask keeps a score where it is true. A float mask is added. A mask stride of 0 broadcasts.
    - `causal`: query i sees the keys j <= i (torch's top-left alignment).
    - `window`: query i sees the keys j > i - window.
    - `last`, an integer operand (batch, q_len): query i has the position last[b, i] and sees the keys j <= last[b, i];
      the window counts from that position, too. Keys behind the last position of a block of queries are not read.
    - `ring`: the keys lie in a ring (qcompiler/ir/qc.py). Row r of k and v holds the key of the latest position p <=
      last[b, i] with p % kv_len == r, and `window` counts positions. Rows without such a position are not seen. All
      queries of a launch find their windows in one ring: q_len + window - 1 <= kv_len.
    - `softcap`: a scaled score x becomes softcap * tanh(x / softcap), before any mask.
    - `sinks`, an operand (batch, heads, q_len, 1): exp(sinks[b, h, i]) is one more term of the sum that the weights of
      query i are divided by. It is neither scaled nor capped nor masked.
    - `cache`: k and v are rows of that kind (qcompiler/formats/cache_rows.py), with row_bytes(head_dim, cache)
      and row_bytes(value_dim, cache) columns of i8.
    - `compute`: with "bf16" a kernel may round queries, keys, values and the weights of the softmax to bf16 before it
      multiplies them; sums and the softmax stay fp32. A code of 8 bits is exact, and its scale is a factor outside.
    - `parts`: the kernel divides the keys that the queries of a batch see into so many parts, each key in one of them.
      out is f32 (batch, heads, q_len, parts, value_dim + 2): per part the sums of the values weighed with
      exp(score - top), then `top`, the part's largest score, and the total of these weights; zeros, -inf and 0 where a
      query sees no key of a part.

    A query that sees no key gives zeros.
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
    sinks: bool = False
    ring: bool = False
    cache: cache_rows.Kind | None = None
    compute: Literal["bf16"] | None = None
    parts: int | None = None

    def contract(self, operands: int) -> Contract:
        if min(self.kv_heads, self.heads) < 1 or self.heads % self.kv_heads:
            raise PlanError(f"an attention kernel has {self.heads} heads over {self.kv_heads} heads of keys and values")
        if self.window is not None and not 1 <= self.window <= COUNTED_IN_32_BITS:
            raise PlanError(f"an attention kernel has a window of {self.window} keys; it must be from 1 to 2**31 - 1")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise PlanError(f"an attention kernel has softcap {self.softcap}; it must be positive and finite")
        if self.last and self.causal:
            raise PlanError("an attention kernel is causal and has an operand `last`, which exclude each other")
        if self.ring and (not self.last or self.window is None or self.mask != "none"):
            raise PlanError("an attention kernel reads a ring, which needs `last` and a window, and takes no mask")
        if self.parts is not None and not (isinstance(self.q_len, int) and self.q_len <= FEW_QUERIES):
            raise PlanError(
                f"an attention kernel divides the keys of {self.q_len} queries; it does so for at most {FEW_QUERIES}, "
                "a number that is known when it is compiled"
            )
        b, h = self.batch, self.heads
        more: list[Role] = []
        if self.mask != "none":
            kinds = ("i1",) if self.mask == "bool" else FLOATS
            more.append(Role("mask", (b, h, self.q_len, self.kv_len), dtypes=kinds))
        if self.last:
            more.append(Role("last", (b, self.q_len), dtypes=INDICES))
        if self.sinks:
            more.append(Role("sinks", (b, h, self.q_len, 1), dtypes=FLOATS))
        return Contract(
            (
                Role("q", (b, h, self.q_len, self.head_dim), unit=True),
                self._stored("k", self.head_dim),
                self._stored("v", self.value_dim),
                *more,
                self._out(),
            ),
            # no task multiplies these by the number of keys
            work=(b, h, self.q_len, self.head_dim + self.value_dim + COLUMNS_BEHIND, self.parts or 1),
            extents=(b, self.q_len, self.kv_len),
            positive=(self.head_dim, self.value_dim, *(() if self.parts is None else (self.parts,))),
            at_most=(
                (self.head_dim, COUNTED_IN_32_BITS),
                (self.value_dim, COUNTED_IN_32_BITS),
                *(() if self.parts is None else ((self.parts, MOST_PARTS),)),
                *self._ring_sizes(),
            ),
        )

    def _out(self) -> Role:
        """The role of the result, or of its parts."""
        rows = (self.batch, self.heads, self.q_len)
        if self.parts is None:
            return Role("out", (*rows, self.value_dim), "w", unit=True)
        return Role("out", (*rows, self.parts, self.value_dim + COLUMNS_BEHIND), "w", dtypes=("f32",), unit=True)

    def _ring_sizes(self) -> tuple[tuple[Dim, Dim], ...]:
        """The last query of a launch may have written over what the first one no longer sees, and over nothing else."""
        if not self.ring or self.window is None:
            return ()
        return (((dim(self.q_len) + (self.window - 1)).to_dim(), self.kv_len), (self.window, self.kv_len))

    def _stored(self, name: str, cols: int) -> Role:
        """The role of the keys or of the values."""
        rows = (self.batch, self.kv_heads, self.kv_len)
        if self.cache is None:
            return Role(name, (*rows, cols), unit=True)
        stored = (*rows, cache_rows.row_bytes(cols, self.cache))
        return Role(name, stored, dtypes=("i8",), unit=True, align=ROW_ALIGNMENT)

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        pairs = volume([self.batch, self.heads, self.q_len, self.kv_len], symbols)
        return 2 * pairs * (self.head_dim + self.value_dim) // (2 if self.causal and not self.last else 1)
