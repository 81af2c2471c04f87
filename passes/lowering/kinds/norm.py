"""qc.layer_norm and qc.rms_norm."""

from __future__ import annotations

from xdsl.ir import SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, rows_of, unit_vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, named
from qcompiler.plan.dims import contiguous_strides
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.plan import View


def draft(op: qc.LayerNormOp | qc.RmsNormOp, memory: ValueMemory) -> Draft:
    if op.statistics is not None:
        raise KernelSelectionError(
            f"{op.name} at '{path_of(op)}' is given the statistics of its rows; only a norm in the prologue of a "
            "qc.linear is: remove the operand, and the norm's kernel computes them"
        )
    result = Draft("layer_norm" if isinstance(op, qc.LayerNormOp) else "rms_norm", path_of(op))
    x = result.add("x", "r", rows_of(op.x, op, memory))
    weight = result.add("weight", "r", unit_vector_of(op.weight, op, memory)) if op.weight is not None else None
    bias = None
    if isinstance(op, qc.LayerNormOp) and op.bias is not None:
        bias = result.add("bias", "r", unit_vector_of(op.bias, op, memory))
    residual = None
    if op.residual is not None:
        residual = result.add("residual", "r", _as_rows(op.residual, result.views[0], op, memory))
    made, shape = memory.result(op.result, shape_of(op.result.type)), result.views[0].shape
    out = views.with_shape(made, shape, contiguous_strides(shape))
    result.add("out", "w", out)
    type_, eps = tensor(out.shape, out.dtype), op.eps.value.data
    if isinstance(op, qc.LayerNormOp):
        result.body.add_op(qc.LayerNormOp(x, weight, bias, type_, eps=eps, residual=residual))
    else:
        result.body.add_op(qc.RmsNormOp(x, weight, type_, eps=eps, residual=residual))
    return result


def _as_rows(value: SSAValue, x: View, op: qc.LayerNormOp | qc.RmsNormOp, memory: ValueMemory) -> View:
    """The residual in the shape of x, which may have two dims of rows; copied if its strides require it."""
    rows = rows_of(value, op, memory)
    if rows.shape == x.shape:
        return rows
    return views.with_shape(memory.contiguous_copy(memory.view(value), op), x.shape, contiguous_strides(x.shape))


def body(op: qc.LayerNormOp | qc.RmsNormOp, operands: Operands, serves: str) -> NormKernel:
    x = named(operands, "x")
    rows, *inner, cols = x.shape
    return NormKernel(
        kind="layer" if isinstance(op, qc.LayerNormOp) else "rms",
        rows=rows,
        cols=int(cols),
        eps=op.eps.value.data,
        has_weight=op.weight is not None,
        has_bias=isinstance(op, qc.LayerNormOp) and op.bias is not None,
        inner=inner[0] if inner else None,
        has_residual=op.residual is not None,
    )


LOWERING = Lowering(NormKernel, (qc.LayerNormOp, qc.RmsNormOp), draft, body, only_floats=True)
