"""`Lowering`: how ops become kernels of one kind. Each module of `kinds/` has one."""

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
    """The ops that a kind of kernel serves, and the functions that lower them."""

    kind: type[KernelBody]
    ops: tuple[type[Operation], ...]
    draft: Rule
    """Makes the draft: the buffers that an op reads and writes, and the op in the region of `rt.kernel`
    (lower-to-rt)."""
    body: Body
    """Makes the record, from that op, the kernel's operands and its module path (emit-kernels)."""
    only_floats: bool = False
    """Whether the op's first operand and its result must be floats, because the kernels accumulate in fp32."""
    select: Select | None = None
    """What select-kernels decides and reports for such an op, beyond the existence of a kernel."""
    written_as: Mapping[type[Operation], Rule] = field(default_factory=dict)
    """Other ops, each with the rule for its draft. The draft has one of `ops`."""


def named(operands: Operands, name: str) -> Operand:
    """The operand with a role's name."""
    return next(operand for operand in operands if operand.name == name)


def is_stored(weight: SSAValue, context: QCContext) -> bool:
    """Whether a weight is a constant of the weight store, so that it may have the layout of its kernel."""
    return isinstance(weight.owner, ConstOp) and weight.owner.key in context.weights
