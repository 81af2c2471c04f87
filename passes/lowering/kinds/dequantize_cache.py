"""qc.dequantize_cache."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering.cache_rows import in_three_dims, require_own_memory
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, named
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel


def select(op: qc.DequantizeCacheOp, ranges: Ranges, context: QCContext) -> None:
    require_own_memory(op, op.rows)
    readers = ", ".join(sorted({use.operation.name for use in op.result.uses}))
    shape = "x".join(map(str, shape_of(op.result.type)))
    why = f"it is read by {readers}; only attention that has rows of keys and of values reads rows"
    context.report.add("select-kernels", path_of(op), f"a cache of {op.kind.data} is decoded to {shape} numbers", why)


def draft(op: qc.DequantizeCacheOp, memory: ValueMemory) -> Draft:
    result = Draft("dequantize_cache", path_of(op))
    rows = result.add("rows", "r", in_three_dims(unit_last(op.rows, op, memory), op, memory))
    out = in_three_dims(memory.result(op.result, shape_of(op.result.type)), op, memory)
    result.add("out", "w", out)
    result.body.add_op(qc.DequantizeCacheOp(rows, tensor(out.shape, out.dtype), kind=op.kind.data))
    return result


def body(op: qc.DequantizeCacheOp, operands: Operands, serves: str) -> DequantizeCacheKernel:
    outer, middle, inner, cols = named(operands, "out").shape
    kind = op.kind.data
    return DequantizeCacheKernel(outer=outer, middle=middle, inner=inner, cols=int(cols), kind=kind)  # type: ignore[arg-type]


LOWERING = Lowering(DequantizeCacheKernel, (qc.DequantizeCacheOp,), draft, body, select=select)
