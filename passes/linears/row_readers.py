"""Who reads rows that an op makes, and where a linear that makes them itself can stand.

    %n = qc.rms_norm %x                     rows_read(%n)    linears: %y and %z, which multiply the rows of %n
    %y = qc.linear %n, %w                                    others of %y: %z, %s
    %z = qc.linear %n, %v
    %s = linalg.generic … (%n)

Reshapes are looked through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of
from qcompiler.passes.views.views import Reshape, unreshaped


@dataclass(frozen=True)
class Readers:
    """The ops that read a value, directly or through reshapes: the linears that multiply its rows, and the others."""

    linears: tuple[qc.LinearOp, ...]
    others: tuple[Operation, ...]

    def beside(self, *linears: qc.LinearOp) -> tuple[Operation, ...]:
        """All but `linears`."""
        return (*(each for each in self.linears if each not in linears), *self.others)


def rows_read(value: SSAValue) -> Readers:
    """The readers of the rows `value`, each once and in the order of their block."""
    uses = list(_uses(value))
    found = sorted({id(op): op for op, _ in uses}.values(), key=_Place)
    linears = []
    for op in found:
        if isinstance(op, qc.LinearOp) and unreshaped(op.x) is value:
            read = [index for each, index in uses if each is op]
            if read == [0] and shape_of(op.x.type)[-1:] == shape_of(value.type)[-1:]:
                linears.append(op)
    return Readers(tuple(linears), tuple(op for op in found if op not in linears))


def place_for(linear: qc.LinearOp, value: SSAValue) -> Operation | None:
    """The op in front of which the linear must stand to make `value` for all who read it: itself, or the first of them.
    None if something that the linear reads is computed behind that op. Constants may move."""
    first: Operation = min((linear, *(use.operation for use in value.uses)), key=_Place)
    for operand in linear.operands[1:]:
        owner = operand.owner
        if not isinstance(owner, Operation) or isinstance(owner, qc.ConstOp):
            continue
        if owner is first or first.is_before_in_block(owner):
            return None
    return first


def _uses(value: SSAValue) -> Iterator[tuple[Operation, int]]:
    for use in value.uses:
        if isinstance(use.operation, Reshape):
            yield from _uses(use.operation.result)
        else:
            yield use.operation, use.index


class _Place:
    """Orders ops of one block."""

    def __init__(self, op: Operation) -> None:
        self.op = op

    def __lt__(self, other: _Place) -> bool:
        return self.op is not other.op and self.op.is_before_in_block(other.op)
