"""qc.sample."""

from __future__ import annotations

from qcompiler.ir.module import path_of
from qcompiler.ir.qc_index import SampleOp
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.kinds.sample import SampleKernel


def draft(op: SampleOp, memory: ValueMemory) -> Draft:
    result = Draft("sample", path_of(op))
    x, how, tallies, bias = (
        result.add(name, "r", matrix_of(value, op, memory))
        for name, value in (("x", op.x), ("how", op.how), ("tallies", op.tallies), ("bias", op.bias))
    )
    out = views.as_vector(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(SampleOp(x, how, tallies, bias, tensor(out.shape, out.dtype)))
    return result


def body(op: SampleOp, operands: Operands, serves: str) -> SampleKernel:
    x, how = named(operands, "x"), named(operands, "how")
    return SampleKernel(batch=how.shape[0], rows=x.shape[0], cols=x.shape[1])


LOWERING = Lowering(SampleKernel, (SampleOp,), draft, body)
