"""hadamard: an orthogonal transform of each run of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import Contract, Role, RoleKernel, Symbols, elements
from qcompiler.plan.operands import Operand

LARGEST_BLOCK = 8192
"""On a GPU one block of 1024 threads has a run of columns, with 8 of them in each thread's registers."""


class HadamardKernel(RoleKernel, frozen=True, tag="hadamard"):
    """Runs of `block` columns times the orthonormal Hadamard matrix. Operands: x (rows, cols), out (rows, cols).

    For width = 1, 2, 4, … block / 2, in fp32: elements i and i + width of a pair become their sum and their difference.
    Then each is multiplied by `scale_of(block)` and rounded once.
    """

    rows: Dim
    cols: int
    block: int

    def contract(self, operands: int) -> Contract:
        why = why_no_block(self.cols, self.block)
        if why:
            raise PlanError(f"a hadamard kernel: {why}")
        shape = (self.rows, self.cols)
        return Contract(
            (Role("x", shape, unit=True), Role("out", shape, "w", unit=True)),
            work=shape,
            extents=(self.rows,),
            positive=(self.cols,),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return self.block.bit_length() * elements(operands, symbols)  # one for each step, and the scale


def why_no_block(cols: int, block: int) -> str:
    """Why runs of `block` columns are no transform of rows of `cols`: "" if they are."""
    if not 2 <= block <= LARGEST_BLOCK or block & (block - 1):
        return f"a run of {block} columns is no power of two from 2 to {LARGEST_BLOCK}"
    return f"runs of {block} columns do not divide {cols} columns" if cols % block or cols <= 0 else ""


def block_of(cols: int) -> int:
    """The largest run that divides `cols`: 1 if none does."""
    return min(cols & -cols, LARGEST_BLOCK)


def scale_of(block: int) -> float:
    """1 / sqrt(block), as fp32 has it."""
    return float(np.float32(1 / math.sqrt(block)))
