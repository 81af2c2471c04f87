"""Lowering: how ops become kernels of one kind. `kinds/` has one for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Operation, SSAValue

from qcompiler.ir.context import QCContext
from qcompiler.ir.qc import ConstOp
from qcompiler.passes.lowering.drafts import Draft, ValueMemory
from qcompiler.plan.dims import Range
from qcompiler.plan.kernel import KernelBody, Operand

Operands = Sequence[Operand]
Ranges = dict[str, Range]

Rule = Callable[[Any, ValueMemory], Draft]
Body = Callable[[Any, Operands, str], KernelBody]
Select = Callable[[Any, Ranges, QCContext], None]


@dataclass(frozen=True)
class Lowering:
    """The ops that a kind of kernel serves, and how they get there."""

    kind: type[KernelBody]
    ops: tuple[type[Operation], ...]
    draft: Rule
    """The buffers that an op reads and writes, and the one op in the region of `rt.kernel`: lower-to-rt."""
    body: Body
    """The record, from that op, the kernel's operands and its place in the model: emit-kernels."""
    only_floats: bool = False
    """Whether the op's first operand and its result must be floats, since the kernels accumulate in fp32."""
    select: Select | None = None
    """What select-kernels decides and reports beside that there is a kernel."""
    written_as: Mapping[type[Operation], Rule] = field(default_factory=dict)
    """Other ops, whose drafts hold one of `ops`."""


def named(operands: Operands, name: str) -> Operand:
    """The operand with a role's name."""
    return next(operand for operand in operands if operand.name == name)


def is_stored(weight: SSAValue, context: QCContext) -> bool:
    """Whether a weight is a constant of the weight store, which may lie as kernels want it."""
    return isinstance(weight.owner, ConstOp) and weight.owner.key in context.weights
