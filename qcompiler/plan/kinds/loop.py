"""loop: a `linalg.generic`, after fusion. Its contract is qcompiler/plan/loop_contract.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import KernelBody, Symbols, volume
from qcompiler.plan.operands import Operand, ScalarProgram, Strict


class AffineAccess(Strict, frozen=True):
    """Element offset of an operand in a loop nest: ``offset + sum(coefficients[i] * iteration[i])``."""

    offset: Dim
    coefficients: tuple[Dim, ...]


class LoopKernel(KernelBody, frozen=True, tag="loop"):
    """A `linalg.generic`: pointwise or reducing loops over operands at affine offsets.

    Operands are the inputs, then the outputs. Each has one entry in `accesses` and one scalar in `body.inputs`; an
    output's scalar is its accumulator, which only reductions use. In a reduction each output starts from its entry of
    `init` (`float.hex()` text). A loop never reads an output's old bytes. Parallel iterators come first.
    """

    extents: tuple[Dim, ...]
    iterators: tuple[Literal["parallel", "reduction"], ...]
    accesses: tuple[AffineAccess, ...]
    body: ScalarProgram
    init: tuple[str, ...] = ()

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return volume(self.extents, symbols) * max(len(self.body.ops), 1)
