"""A part of a launch that normalises the rows of an operand x, and a loop that reads them: what both targets print.

    for each row loop:                      i0 < 4, …        the rows of the loop's result
        n = norm(x[row])                    the equations of the norm's own kernel, rounded as that kernel stores them
        for each loop in the row:           i3 < 2, i4 < 64
            out[…] = body(n[…], cos[…], …)

The row is never stored: the CPU keeps it in a buffer on the stack, and CUDA in the registers of a warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.kernels.items import by_role
from qcompiler.kernels.kinds import norm
from qcompiler.kernels.loop_nest import Loop, Nest, build_nest
from qcompiler.kernels.rows import Rows
from qcompiler.kernels.text import c_dim
from qcompiler.plan.dims import Expr, product
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.parts_contract import norm_spec, part_specs, parts_body, row_axes


@dataclass(frozen=True)
class NormedPart:
    """A part with a norm. `nest` is its loop, whose inputs `reads` are in the norm's result."""

    nest: Nest
    norm: KernelSpec
    reads: tuple[int, ...]

    @staticmethod
    def of(spec: KernelSpec, number: int, reserved: frozenset[str] = frozenset()) -> NormedPart | None:
        """Part `number` of a launch, or None if it has no norm."""
        part, normed = parts_body(spec).parts[number], norm_spec(spec, number)
        if part.norm is None or normed is None:
            return None
        nest = build_nest(part_specs(spec)[number], reserved, row_axes(part.loop, part.norm))
        return NormedPart(nest, normed, part.norm.inputs)

    @property
    def form(self) -> Rows:
        """The equations of the norm."""
        return norm.form(self.norm)

    @property
    def cols(self) -> int:
        """The columns of a row."""
        cols = self.form.cols
        assert isinstance(cols, int)
        return cols

    @property
    def roles(self) -> dict[str, Operand]:
        """What the norm reads, by role: x, weight, bias."""
        return {name: operand for name, operand in by_role(self.norm).items() if name != "out"}

    @property
    def others(self) -> tuple[int, ...]:
        """The operands of the loop that are not the norm's result."""
        return tuple(i for i in range(len(self.nest.spec.operands)) if i not in self.reads)

    @property
    def signature(self) -> KernelSpec:
        """The operands in the order in which the part's function takes them: the norm's, then the loop's others."""
        spec = self.nest.spec
        operands = (*self.roles.values(), *(spec.operands[i] for i in self.others))
        return KernelSpec(spec.name, spec.symbols, operands, spec.body, spec.serves)

    @property
    def rows(self) -> tuple[Loop, ...]:
        """The loops over rows; `columns` are those inside of a row."""
        return self.nest.parallel[: self.nest.rows]

    @property
    def columns(self) -> tuple[Loop, ...]:
        return self.nest.parallel[self.nest.rows :]

    @property
    def count(self) -> Expr:
        """The number of rows that the loop goes over."""
        return product(loop.extent for loop in self.rows)

    def row(self) -> str:
        """The number of the row of x, at the variables of the row loops."""
        steps = [(loop.name, loop.steps[self.reads[0]].divide_exact(self.cols)) for loop in self.rows]
        terms = [name if step == 1 else f"{name} * {c_dim(step)}" for name, step in steps if step != 0]
        return " + ".join(terms) or "0"

    def places(self) -> list[str]:
        """Statements that declare `row`, and the two indices of a row of x if it has two."""
        return [f"const int64_t row = {self.row()};", *self.form.places()]


def numbers_of(spec: KernelSpec, number: int) -> Sequence[int]:
    """The numbers of the operands that a part's function takes, among the operands of the launch."""
    part = parts_body(spec).parts[number]
    if part.norm is None:
        return part.operands
    reads = part.norm.inputs
    return (part.operands[reads[0]], *part.norm.affine, *(n for i, n in enumerate(part.operands) if i not in reads))
