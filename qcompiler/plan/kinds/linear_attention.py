"""linear_attention: tokens that decay a state, add to it, and read it, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, Contract, Role, RoleKernel, Symbols, replaced, volume
from qcompiler.plan.operands import Operand


class LinearAttentionKernel(RoleKernel, frozen=True, tag="linear_attention"):
    """The recurrence of `qc.linear_attention` (ir/qc_linear_attention.py), in place.

    Operands: state (rw; slots, heads, width, depth), query and key (batch, steps, groups, depth), value (batch, steps,
    heads, width), decay (batch, steps, heads, 1, or depth with `decays_columns`), first (batch), counts (batch), [rate
    (heads, depth)], [beta (batch, steps, heads)], out (batch, steps, heads, width).  Sums are fp32, over `depth`.
    """

    slots: int
    batch: Dim
    steps: Dim
    heads: int
    groups: int
    width: int
    depth: int
    decays_columns: bool = False
    has_rate: bool = False
    has_beta: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The operands' roles, in order."""
        optional = (*["rate"] * self.has_rate, *["beta"] * self.has_beta)
        return ("state", "query", "key", "value", "decay", "first", "counts", *optional, "out")

    def contract(self, operands: int) -> Contract:
        if self.decays_columns and self.has_rate:
            raise PlanError("a linear_attention kernel with a rate has one decay for all columns")
        f32 = ("f32",)
        keys = (self.batch, self.steps, self.groups, self.depth)
        values = (self.batch, self.steps, self.heads, self.width)
        decays = (self.batch, self.steps, self.heads, self.depth if self.decays_columns else 1)
        roles = [
            Role("state", (self.slots, self.heads, self.width, self.depth), "rw", dtypes=f32, unit=True),
            Role("query", keys, dtypes=f32, unit=True),
            Role("key", keys, dtypes=f32, unit=True),
            Role("value", values, dtypes=f32),
            Role("decay", decays, dtypes=f32, unit=self.decays_columns),
            Role("first", (self.batch,), dtypes=("i64",)),
            Role("counts", (self.batch,), dtypes=("i64",)),
            *([Role("rate", (self.heads, self.depth), dtypes=f32, unit=True)] if self.has_rate else []),
            *([Role("beta", (self.batch, self.steps, self.heads), dtypes=f32)] if self.has_beta else []),
            Role("out", values, "w", dtypes=f32),
        ]
        rows = self.heads * self.width
        return Contract(
            tuple(roles),
            work=(self.batch, self.steps, rows, self.depth),
            extents=(self.batch, self.steps),
            positive=(self.slots, self.heads, self.groups, self.width, self.depth),
            at_most=((self.batch, self.slots), (self.groups, self.heads), (rows, COUNTED_IN_32_BITS)),
        )

    def check_operands(self, operands: Sequence[Operand]) -> None:
        """PlanError where heads cannot share the groups of queries and keys."""
        if self.heads % self.groups:
            raise PlanError(f"a linear_attention kernel has {self.heads} heads for {self.groups} groups of keys")

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        """Decay, update and output: a product each, and one more for the delta rule."""
        each = 7 if self.has_beta else 5
        return each * volume([self.batch, self.steps], symbols) * self.heads * self.width * self.depth

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Only the states of the call's sequences are moved. They stay in a cache or in registers between tokens."""
        return replaced(operand, stored, (self.batch, self.heads, self.width, self.depth), symbols)
