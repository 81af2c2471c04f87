"""The result of a match."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build
from qcompiler.ir.module import path_of
from qcompiler.passes.loops import loops


@dataclass(frozen=True)
class Raised:
    """A recognised form: the inserted op, and the value that replaces the form."""

    op: Operation
    result: SSAValue


def insert(value: SSAValue, op: Operation, order: tuple[int, ...] | None = None) -> Raised:
    """Inserts `op` before the op that computes `value`. Dim n of the new op's result is dim order[n] of the value."""
    before = loops.producer(value)
    assert before is not None
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    builder.insert(op)
    if order is None or order == tuple(range(len(order))):
        return Raised(op, op.results[0])
    return Raised(op, build.transpose(builder, op.results[0], [order.index(n) for n in range(len(order))]))
