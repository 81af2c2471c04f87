"""linears: linears that read rows of one size in one launch, for weights that differ in format or epilogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from qcompiler.errors import PlanError
from qcompiler.plan.kernel_body import Contract, Role, RoleKernel, Symbols, same_dims
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.operands import Operand

MOST_LINEARS = 8
"""As many as merge-linears makes one of."""


MOST_ROWS = 8
"""Of x: as many as a block of a GPU multiplies with its panel of the weight."""


class LinearsKernel(RoleKernel, frozen=True, tag="linears"):
    """Each of `linears`, on operands of its own: those of the first linear, then those of the second, …

    All multiply m rows of k columns, usually the same: then the operands ``x_0`` and ``x_1`` are one view. There are up
    to `MOST_ROWS` rows, and every weight is in the layout of its target. No linear touches what another one writes,
    which follows from the rule of aliases (verify_steps.py), so that they may run in any order and at once.
    """

    linears: tuple[LinearKernel, ...]

    def contract(self, operands: int) -> Contract:
        if not 2 <= len(self.linears) <= MOST_LINEARS:
            raise PlanError(f"a launch has {len(self.linears)} linears; it has 2 to {MOST_LINEARS}")
        first = self.linears[0]
        for each in self.linears:
            if not same_dims((each.m, each.k), (first.m, first.k)):
                raise PlanError(
                    f"a launch has linears of {first.m} x {first.k} and {each.m} x {each.k} elements of x; they must "
                    "be equal"
                )
            _check_few(each)
        own = [each.contract(each.count) for each in self.linears]
        taken = sum(len(each.roles) for each in own)
        if operands != taken:
            raise PlanError(f"a launch of {len(self.linears)} linears has {operands} operands, and they take {taken}")
        return Contract(
            tuple(_of(number, role) for number, each in enumerate(own) for role in each.roles),
            work=(first.m, sum(each.n for each in self.linears), first.k),
            extents=tuple(size for each in own for size in each.extents),
            positive=tuple(size for each in own for size in each.positive),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return sum(each.operations(own, symbols) for each, own in self.shares(operands))

    def check_operands(self, operands: Sequence[Operand]) -> None:
        for each, own in self.shares(operands):
            each.check_operands(own)
            if own[1].layout in (None, "canonical"):
                raise PlanError(f"a launch of several linears has weights in panels; '{own[1].name}' is in rows")

    def shares(self, operands: Sequence[Operand]) -> Iterator[tuple[LinearKernel, tuple[Operand, ...]]]:
        """Each linear with its operands, under the names that they have in a launch of their own."""
        begin = 0
        for each in self.linears:
            names = [role.name for role in each.contract(each.count).roles]
            own = operands[begin : begin + each.count]
            yield each, tuple(msgspec.structs.replace(op, name=name) for op, name in zip(own, names, strict=True))
            begin += each.count


def _check_few(linear: LinearKernel) -> None:
    """PlanError unless one block can take all rows."""
    m, classes = linear.m, ("1", "2-8") if linear.m == 1 else ("2-8",)
    if not isinstance(m, int) or not 1 <= m <= MOST_ROWS or linear.m_class not in classes or linear.window is not None:
        raise PlanError(
            f"a launch of several linears has one to {MOST_ROWS} rows of x, in a row class for so few and not those of "
            f"an image; one has {m} rows, class {linear.m_class}"
        )


def _of(number: int, role: Role) -> Role:
    """A role of linear `number` among those of the launch."""
    like = None if role.like is None else f"{role.like}_{number}"
    return replace(role, name=f"{role.name}_{number}", like=like)
