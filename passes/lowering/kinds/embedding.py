"""qc.embedding."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.devices.extents import check_counted
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, named
from qcompiler.plan.kinds.embedding import EmbeddingKernel


def select(op: qc.EmbeddingOp, ranges: Ranges, context: QCContext) -> None:
    check_counted(op, op.table, ("", "columns"), context)


def draft(op: qc.EmbeddingOp, memory: ValueMemory) -> Draft:
    result = Draft("embedding", path_of(op))
    ids = result.add("ids", "r", vector_of(op.ids, op, memory))
    table = memory.view(op.table)
    table_argument = result.add("table", "r", table if table.layout else unit_last(op.table, op, memory))
    out = views.as_matrix(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.EmbeddingOp(ids, table_argument, tensor(out.shape, out.dtype)))
    return result


def body(op: qc.EmbeddingOp, operands: Operands, serves: str) -> EmbeddingKernel:
    ids, table = named(operands, "ids"), named(operands, "table")
    return EmbeddingKernel(count=ids.shape[0], rows=int(table.shape[0]), cols=int(table.shape[1]))


LOWERING = Lowering(EmbeddingKernel, (qc.EmbeddingOp,), draft, body, select=select)
