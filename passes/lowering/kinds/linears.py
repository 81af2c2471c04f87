"""Several linears in one launch, as merge-launches writes them: one region with an op for each.

%0 = qc.linear %x_0, %w_0 …
%1 = qc.linear %x_1, %w_1 …
rt.yield %0, %1
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
from xdsl.ir import Block

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.passes.lowering.drafts import ValueMemory
from qcompiler.passes.lowering.kinds import linear
from qcompiler.passes.lowering.rule import Lowering, Operands
from qcompiler.plan.kinds.linears import LinearsKernel


def draft(op: object, memory: ValueMemory) -> NoReturn:
    raise KernelSelectionError("no op is a kernel of several linears; merge-launches makes them of kernels")


def body(block: Block, operands: Operands, serves: str) -> LinearsKernel:
    """The linears of a region, whose operands are named by their roles and the number of their linear."""
    ops = [op for op in block.ops if isinstance(op, qc.LinearOp)]
    return LinearsKernel(
        linears=tuple(linear.body(op, own_of(operands, number), serves) for number, op in enumerate(ops))
    )


def own_of(operands: Operands, number: int) -> Operands:
    """The operands of one linear, under the names that they have in a launch of their own."""
    end = f"_{number}"
    return [msgspec.structs.replace(op, name=op.name[: -len(end)]) for op in operands if op.name.endswith(end)]


LOWERING = Lowering(LinearsKernel, (), draft, body)
