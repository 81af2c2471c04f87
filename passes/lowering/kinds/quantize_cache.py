"""qc.quantize_cache."""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering.cache_rows import in_three_dims, require_own_memory
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, named
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel


def select(op: qc.QuantizeCacheOp, ranges: Ranges, context: QCContext) -> None:
    require_own_memory(op, op.result)


def draft(op: qc.QuantizeCacheOp, memory: ValueMemory) -> Draft:
    result = Draft("quantize_cache", path_of(op))
    x = result.add("x", "r", in_three_dims(unit_last(op.x, op, memory), op, memory))
    out = in_three_dims(memory.result(op.result, shape_of(op.result.type)), op, memory)
    result.add("out", "w", out)
    result.body.add_op(qc.QuantizeCacheOp(x, tensor(out.shape, out.dtype), kind=op.kind.data))
    return result


def body(op: qc.QuantizeCacheOp, operands: Operands, serves: str) -> QuantizeCacheKernel:
    outer, middle, inner, cols = named(operands, "x").shape
    kind = op.kind.data
    return QuantizeCacheKernel(outer=outer, middle=middle, inner=inner, cols=int(cols), kind=kind)  # type: ignore[arg-type]


LOWERING = Lowering(QuantizeCacheKernel, (qc.QuantizeCacheOp,), draft, body, select=select)
