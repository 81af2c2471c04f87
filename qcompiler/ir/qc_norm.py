"""`qc.layer_norm`, `qc.rms_norm` and `qc.softmax`."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, TensorType, f64, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor
from qcompiler.plan.row_statistics import Kind, width


@irdl_op_definition
class LayerNormOp(QCOp):
    """Layer norm over the last dim: `(x - mean) / sqrt(var + eps) * weight + bias`, biased variance.

    With a `residual`, the result is `residual + norm`: the norm is rounded to the result's type, and so is the sum.
    With `statistics`, those of the rows come from there, in parts (plan/row_statistics.py).
    """

    name = "qc.layer_norm"
    x = operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    residual = opt_operand_def(TensorType)
    statistics = opt_operand_def(TensorType)
    eps = prop_def(FloatAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        weight: SSAValue | None,
        bias: SSAValue | None,
        type_: Attribute,
        *,
        eps: float,
        residual: SSAValue | None = None,
        statistics: SSAValue | None = None,
    ) -> None:
        super().__init__(
            operands=[x, *_given(weight, bias, residual, statistics)],
            properties={"eps": FloatAttr(eps, f64)},
            result_types=[type_],
        )

    def verify_op(self) -> None:
        _verify_norm(self, [t for t in (self.weight, self.bias) if t is not None])


@irdl_op_definition
class RmsNormOp(QCOp):
    """RMS norm over the last dim: `x / sqrt(mean(x²) + eps) * weight`.

    With a `residual`, the result is `residual + norm`: the norm is rounded to the result's type, and so is the sum.
    With `statistics`, those of the rows come from there, in parts (plan/row_statistics.py).
    """

    name = "qc.rms_norm"
    x = operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    residual = opt_operand_def(TensorType)
    statistics = opt_operand_def(TensorType)
    eps = prop_def(FloatAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        weight: SSAValue | None,
        type_: Attribute,
        *,
        eps: float,
        residual: SSAValue | None = None,
        statistics: SSAValue | None = None,
    ) -> None:
        super().__init__(
            operands=[x, *_given(weight, residual, statistics)],
            properties={"eps": FloatAttr(eps, f64)},
            result_types=[type_],
        )

    def verify_op(self) -> None:
        _verify_norm(self, [self.weight] if self.weight is not None else [])


NORMS = (LayerNormOp, RmsNormOp)
Norm = LayerNormOp | RmsNormOp


def _given(*values: SSAValue | None) -> list[list[SSAValue]]:
    """Optional operands, as xDSL takes them."""
    return [[] if value is None else [value] for value in values]


def norm_of(norm: LayerNormOp | RmsNormOp, operands: Sequence[SSAValue]) -> LayerNormOp | RmsNormOp:
    """The same norm of other operands: x, then the weight, the bias, the residual and the statistics if it has them.
    The result has the type of x."""
    return with_type(norm, operands, operands[0].type)


def with_residual(norm: LayerNormOp | RmsNormOp, x: SSAValue, residual: SSAValue) -> LayerNormOp | RmsNormOp:
    """The norm of `x` added to `residual`, in its type."""
    eps, type_ = norm.eps.value.data, residual.type
    if isinstance(norm, RmsNormOp):
        return RmsNormOp(x, norm.weight, type_, eps=eps, residual=residual)
    return LayerNormOp(x, norm.weight, norm.bias, type_, eps=eps, residual=residual)


def with_type(
    norm: LayerNormOp | RmsNormOp, operands: Sequence[SSAValue], result: Attribute
) -> LayerNormOp | RmsNormOp:
    """The same norm of other operands, with a result of another type."""
    x, rest = operands[0], list(operands[1:])
    weight = rest.pop(0) if norm.weight is not None else None
    bias = rest.pop(0) if isinstance(norm, LayerNormOp) and norm.bias is not None else None
    residual = rest.pop(0) if norm.residual is not None else None
    statistics = rest.pop(0) if norm.statistics is not None else None
    eps = norm.eps.value.data
    if isinstance(norm, RmsNormOp):
        return RmsNormOp(x, weight, result, eps=eps, residual=residual, statistics=statistics)
    return LayerNormOp(x, weight, bias, result, eps=eps, residual=residual, statistics=statistics)


def with_statistics(norm: LayerNormOp | RmsNormOp, statistics: SSAValue) -> LayerNormOp | RmsNormOp:
    """The same norm, of rows whose statistics are given."""
    eps, type_ = norm.eps.value.data, norm.result.type
    if isinstance(norm, RmsNormOp):
        return RmsNormOp(norm.x, norm.weight, type_, eps=eps, statistics=statistics)
    return LayerNormOp(norm.x, norm.weight, norm.bias, type_, eps=eps, statistics=statistics)


def kind_of(norm: LayerNormOp | RmsNormOp) -> Kind:
    """Which statistics the norm needs."""
    return "rms" if isinstance(norm, RmsNormOp) else "layer"


def statistics_type(rows: Attribute, kind: Kind | str) -> TensorType:
    """The type of the statistics, in parts, of rows."""
    shape = shape_of(rows)
    return tensor((*shape[:-1], width(kind, int(shape[-1]))), "f32")


def _verify_norm(op: LayerNormOp | RmsNormOp, affine: Sequence[SSAValue]) -> None:
    x = shape_of(op.x.type)
    op.expect(x == shape_of(op.result.type), "input and result differ in shape")
    for value in affine:
        op.expect(shape_of(value.type) == x[-1:], f"weight and bias must have shape {x[-1:]}")
    if op.residual is not None:
        op.expect(op.residual.type == op.result.type, f"the residual must be {op.result.type}, as the result is")
    if op.statistics is not None:
        op.expect(op.residual is None, "a norm of given statistics has no residual")
        wanted = statistics_type(op.x.type, kind_of(op))
        op.expect(op.statistics.type == wanted, f"the statistics must be {wanted}, not {op.statistics.type}")


@irdl_op_definition
class SoftmaxOp(QCOp):
    """Softmax along `axis` (non-negative)."""

    name = "qc.softmax"
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue | Operation, type_: Attribute, *, axis: int) -> None:
        super().__init__(operands=[x], properties={"axis": IntegerAttr(axis, i64)}, result_types=[type_])

    def verify_op(self) -> None:
        self.expect(shape_of(self.x.type) == shape_of(self.result.type), "input and result differ in shape")
        self.expect_axis(self.axis.value.data, shape_of(self.x.type))
