"""qc.quantize_rows."""

from __future__ import annotations

from xdsl.builder import Builder
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of, unit_vector_of, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.dims import product
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel


def draft(op: qc.QuantizeRowsOp, memory: ValueMemory) -> Draft:
    result = Draft(f"quantize_rows_{op.kind.data}", path_of(op))
    x = result.add("x", "r", matrix_of(op.x, op, memory))
    columns = None
    if op.columns is not None:
        flags = result.add("columns", "r", vector_of(op.columns, op, memory))
        columns = build.reshape(Builder(InsertPoint.at_end(result.body)), flags, (1, shape_of(flags.type)[0]))
    largest = None
    if op.largest is not None:
        largest = result.add("largest", "r", unit_vector_of(op.largest, op, memory))
    out = views.as_matrix(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    type_, value = tensor(out.shape, out.dtype), op.value.value.data
    if largest is not None:  # the kernel's op has the rows of each image: (images, each, cols)
        images, cols = shape_of(largest.type)[0], shape_of(x.type)[1]
        each = product(shape_of(op.x.type)[1:-1]).to_dim()
        x = build.reshape(Builder(InsertPoint.at_end(result.body)), x, (images, each, cols))
        type_ = tensor((images, each, out.shape[1]), out.dtype)
    made = qc.QuantizeRowsOp(x, columns, type_, kind=op.kind.data, value=value, largest=largest)
    result.body.add_op(made)
    result.written = [build.reshape(Builder(InsertPoint.at_end(result.body)), made.result, out.shape)]
    return result


def body(op: qc.QuantizeRowsOp, operands: Operands, serves: str) -> QuantizeRowsKernel:
    x, shape = named(operands, "x"), shape_of(op.x.type)
    images, each = shape[:2] if op.largest is not None else (1, 1)
    return QuantizeRowsKernel(
        rows=x.shape[0], cols=int(x.shape[1]), kind=op.kind.data, value=op.value.value.data,  # type: ignore[arg-type]
        images=images, each=each,
    )  # fmt: skip


LOWERING = Lowering(QuantizeRowsKernel, (qc.QuantizeRowsOp,), draft, body)
