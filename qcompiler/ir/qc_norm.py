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
from qcompiler.ir.types import shape_of


@irdl_op_definition
class LayerNormOp(QCOp):
    """Layer norm over the last dim: `(x - mean) / sqrt(var + eps) * weight + bias`, biased variance."""

    name = "qc.layer_norm"
    x = operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    bias = opt_operand_def(TensorType)
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
    ) -> None:
        super().__init__(
            operands=[x, [weight] if weight is not None else [], [bias] if bias is not None else []],
            properties={"eps": FloatAttr(eps, f64)},
            result_types=[type_],
        )

    def verify_op(self) -> None:
        _verify_norm(self, self.x.type, self.result.type, [t for t in (self.weight, self.bias) if t is not None])


@irdl_op_definition
class RmsNormOp(QCOp):
    """RMS norm over the last dim: `x / sqrt(mean(x²) + eps) * weight`."""

    name = "qc.rms_norm"
    x = operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    eps = prop_def(FloatAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue | Operation, weight: SSAValue | None, type_: Attribute, *, eps: float) -> None:
        super().__init__(
            operands=[x, [weight] if weight is not None else []],
            properties={"eps": FloatAttr(eps, f64)},
            result_types=[type_],
        )

    def verify_op(self) -> None:
        _verify_norm(self, self.x.type, self.result.type, [self.weight] if self.weight is not None else [])


NORMS = (LayerNormOp, RmsNormOp)


def norm_of(norm: LayerNormOp | RmsNormOp, operands: Sequence[SSAValue]) -> LayerNormOp | RmsNormOp:
    """The same norm of other operands: x, then the weight and the bias if it has them. The result has the type of x."""
    return with_type(norm, operands, operands[0].type)


def with_type(
    norm: LayerNormOp | RmsNormOp, operands: Sequence[SSAValue], result: Attribute
) -> LayerNormOp | RmsNormOp:
    """The same norm of other operands, with a result of another type."""
    x, rest = operands[0], list(operands[1:])
    weight = rest.pop(0) if norm.weight is not None else None
    eps = norm.eps.value.data
    if isinstance(norm, RmsNormOp):
        return RmsNormOp(x, weight, result, eps=eps)
    return LayerNormOp(x, weight, rest.pop(0) if norm.bias is not None else None, result, eps=eps)


def _verify_norm(op: QCOp, x: Attribute, result: Attribute, affine: Sequence[SSAValue]) -> None:
    op.expect(shape_of(x) == shape_of(result), "input and result differ in shape")
    for value in affine:
        op.expect(shape_of(value.type) == shape_of(x)[-1:], f"weight and bias must have shape {shape_of(x)[-1:]}")


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
