"""cse: common subexpression elimination. Equal ops are computed once.

    %0 = qc.dim "b*s" : index                  %0 = qc.dim "b*s" : index
    %1 = qc.dim "b*s" : index           ->     %2 = tensor.empty(%0)
    %2 = tensor.empty(%0)                      %3 = tensor.empty(%0)  … %2 again
    %3 = tensor.empty(%1)

Two ops are equal if they have the same name, operands, attributes (except `qc.path`), result types and bodies. The
first one stays and keeps its path.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir.effects import is_pure
from qcompiler.ir.module import PATH, functions
from qcompiler.passes.checks.numerics import Exact, Numerics


@dataclass(frozen=True)
class CsePass(ModulePass):
    """Shares equal ops within each block."""

    name = "cse"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            share_equal(function.body.block)


def share_equal(block: Block) -> int:
    """Shares equal pure ops of a block and, separately, of each body in it. Returns the number of removed ops."""
    known: dict[Hashable, Operation] = {}
    removed = 0
    for op in list(block.ops):
        for region in op.regions:
            for inner in region.blocks:
                removed += share_equal(inner)
        if not op.results or not is_pure(op):
            continue
        first = known.setdefault(_key(op, {}), op)
        if first is op:
            continue
        for mine, other in zip(op.results, first.results, strict=True):
            mine.replace_all_uses_with(other)
        block.erase_op(op)
        removed += 1
    return removed


def _key(op: Operation, local: dict[SSAValue, int]) -> Hashable:
    """A key that equal ops share. `local` numbers the values that are defined inside a body."""
    attributes = op.attributes
    if attributes:
        attributes = {name: value for name, value in attributes.items() if name != PATH}
    return (
        op.name,
        tuple(local.get(value, value) for value in op.operands),
        frozenset(attributes.items()),
        frozenset(op.properties.items()),
        tuple(result.type for result in op.results),
        tuple(_body_key(block, local) for region in op.regions for block in region.blocks),
    )


def _body_key(block: Block, outer: dict[SSAValue, int]) -> Hashable:
    local = dict(outer)
    for argument in block.args:
        local[argument] = len(local)
    ops: list[Hashable] = []
    for op in block.ops:
        ops.append(_key(op, local))
        for result in op.results:
            local[result] = len(local)
    return tuple(argument.type for argument in block.args), tuple(ops)
