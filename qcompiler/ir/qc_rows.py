"""`qc.quantize_rows` and `qc.dequantize_rows`: activations as int8 rows (formats/int8_rows.py)."""

from __future__ import annotations

from xdsl.dialects.builtin import FloatAttr, StringAttr, TensorType, f64
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

from qcompiler.formats import int8_rows
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype

_FLOATS = ("f32", "bf16", "f16")


@irdl_op_definition
class QuantizeRowsOp(QCOp):
    """`x (…, K)` as int8 rows, `(…, row_bytes(K))`: codes, their scale, and sums of runs of codes.

    `kind` and `value` say how codes are computed. With kind "outliers", codes are 0 in the `columns` (i1, broadcast to
    x). With kind "image", x is `(B, …, K)`, and `largest` (B, fp32) has the largest magnitude of each image.
    """

    name = "qc.quantize_rows"
    x = operand_def(TensorType)
    columns = opt_operand_def(TensorType)
    largest = opt_operand_def(TensorType)
    kind = prop_def(StringAttr)
    value = prop_def(FloatAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        columns: SSAValue | None,
        type_: Attribute,
        *,
        kind: str,
        value: float = 0.0,
        largest: SSAValue | None = None,
    ) -> None:
        super().__init__(
            operands=[x, [columns] if columns is not None else [], [largest] if largest is not None else []],
            properties={"kind": StringAttr(kind), "value": FloatAttr(value, f64)},
            result_types=[type_],
        )

    def verify_op(self) -> None:
        x = shape_of(self.x.type)
        self.expect(len(x) >= 1 and isinstance(x[-1], int), "x needs a last dim of a known size")
        self.expect(tensor_dtype(self.x.type) in _FLOATS, f"x is one of {', '.join(_FLOATS)}")
        self.expect(self.kind.data in int8_rows.KINDS, f"kind is one of {', '.join(int8_rows.KINDS)}")
        wants = self.kind.data == "outliers"
        self.expect((self.columns is not None) == wants, "kind 'outliers', and no other, takes columns")
        if self.columns is not None:
            found = shape_of(self.columns.type)
            fits = found == (*[1] * (len(x) - 1), x[-1]) and tensor_dtype(self.columns.type) == "i1"
            self.expect(fits, f"columns are i1 of shape {(*[1] * (len(x) - 1), x[-1])}, not {found}")
        self.expect(
            (self.largest is not None) == (self.kind.data == "image"), "kind 'image', and no other, has `largest`"
        )
        if self.largest is not None:
            magnitudes, dtype = shape_of(self.largest.type), tensor_dtype(self.largest.type)
            fits = len(x) >= 2 and magnitudes == x[:1] and dtype == "f32"
            self.expect(fits, f"`largest` is f32 of shape {x[:1]}, not {dtype} of {magnitudes}")
        self.expect(tensor_dtype(self.result.type) == "i8", "the result holds i8")
        self.expect_shape(self.result, (*x[:-1], int8_rows.row_bytes(int(x[-1]))))


@irdl_op_definition
class DequantizeRowsOp(QCOp):
    """The values of int8 rows: code * scale in fp32, rounded once to the element type."""

    name = "qc.dequantize_rows"
    rows = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, rows: SSAValue | Operation, type_: Attribute) -> None:
        super().__init__(operands=[rows], result_types=[type_])

    def verify_op(self) -> None:
        out = shape_of(self.result.type)
        self.expect(tensor_dtype(self.rows.type) == "i8", "rows hold i8")
        self.expect(len(out) >= 1 and isinstance(out[-1], int), "the result needs a last dim of a known size")
        self.expect_shape(self.rows, (*out[:-1], int8_rows.row_bytes(int(out[-1]))), "rows")


__all__ = ["DequantizeRowsOp", "QuantizeRowsOp"]
