"""parts: small pointwise loops in one launch. Its contract is qcompiler/plan/parts_contract.py."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.kernel_body import KernelBody, Symbols, volume
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.operands import ITEMSIZE, Operand, Strict


class PartNorm(Strict, frozen=True):
    """The norm of an operand x, which a loop reads in place of x. It is never stored.

    `inputs` are the positions of x in the part's `operands`; the loop's accesses at these positions are offsets in the
    norm's result, (rows, cols) or (rows, inner, cols) without gaps, which is rounded to the type that the loop reads.
    `affine` are the numbers of the weight and the bias among the operands of the launch, if the norm has them.

    Each iteration of the loop reads one row, and the iterations of one row are whole loops: a loop's step in the result
    is a multiple of cols, or it stays within a row.

    A row of many columns (plan/parts_contract.py says how many) is read column by column, in a launch of its own.
    """

    body: NormKernel
    inputs: tuple[int, ...]
    affine: tuple[int, ...] = ()


class Part(Strict, frozen=True):
    """One loop. `operands` are the numbers of its inputs and then of its outputs among the operands of the launch.

    `index` is the number of an operand that holds one row number.  The one output of such a part is an operand x (rw;
    outer, length, inner), of which the loop writes the row ``x[:, index[0], :]``: its accesses count from
    ``x[0, 0, 0]`` and do not move along the axis of rows.
    """

    operands: tuple[int, ...]
    loop: LoopKernel
    index: int | None = None
    norm: PartNorm | None = None


class PartsKernel(KernelBody, frozen=True, tag="parts"):
    """Loops that do not depend on each other.

    No part touches what another one writes.  Row numbers are in [0, length): others, negative ones included, are
    reported before any part writes (on CUDA: that part writes nothing).
    """

    parts: tuple[Part, ...]

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        total = 0
        for part in self.parts:
            total += part.loop.operations(operands, symbols)
            if part.norm is not None:
                total += part.norm.body.operations([operands[part.operands[part.norm.inputs[0]]]], symbols)
        return total

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Of an operand that is written by rows, one row."""
        if operand.access != "rw":
            return stored
        outer, _, inner = operand.shape
        return volume((outer, inner), symbols) * ITEMSIZE[operand.dtype]
