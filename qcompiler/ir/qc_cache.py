"""`qc.quantize_cache` and `qc.dequantize_cache`: keys and values as rows of 8 or 4 bits (formats/cache_rows.py)."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, prop_def, result_def, traits_def
from xdsl.traits import Pure

from qcompiler.formats import cache_rows
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype

_FLOATS = ("f32", "bf16", "f16")


@irdl_op_definition
class QuantizeCacheOp(QCOp):
    """`x (…, K)` as rows of a cache, i8 `(…, row_bytes(K, kind))`: codes and their scales."""

    name = "qc.quantize_cache"
    x = operand_def(TensorType)
    kind = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue | Operation, type_: Attribute, *, kind: str) -> None:
        super().__init__(operands=[x], properties={"kind": StringAttr(kind)}, result_types=[type_])

    def verify_op(self) -> None:
        x = shape_of(self.x.type)
        self.expect(len(x) >= 1 and isinstance(x[-1], int), "x needs a last dim of a known size")
        self.expect(tensor_dtype(self.x.type) in _FLOATS, f"x is one of {', '.join(_FLOATS)}")
        self.expect(self.kind.data in cache_rows.KINDS, f"kind is one of {', '.join(cache_rows.KINDS)}")
        self.expect(tensor_dtype(self.result.type) == "i8", "the result holds i8")
        self.expect_shape(self.result, (*x[:-1], cache_rows.row_bytes(int(x[-1]), cache_rows.kind_of(self.kind.data))))


@irdl_op_definition
class DequantizeCacheOp(QCOp):
    """The values of rows of a cache, computed in fp32 and rounded once to the element type."""

    name = "qc.dequantize_cache"
    rows = operand_def(TensorType)
    kind = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, rows: SSAValue | Operation, type_: Attribute, *, kind: str) -> None:
        super().__init__(operands=[rows], properties={"kind": StringAttr(kind)}, result_types=[type_])

    def verify_op(self) -> None:
        out = shape_of(self.result.type)
        self.expect(tensor_dtype(self.rows.type) == "i8", "rows hold i8")
        self.expect(tensor_dtype(self.result.type) in _FLOATS, f"the result is one of {', '.join(_FLOATS)}")
        self.expect(self.kind.data in cache_rows.KINDS, f"kind is one of {', '.join(cache_rows.KINDS)}")
        self.expect(len(out) >= 1 and isinstance(out[-1], int), "the result needs a last dim of a known size")
        self.expect_shape(
            self.rows, (*out[:-1], cache_rows.row_bytes(int(out[-1]), cache_rows.kind_of(self.kind.data))), "rows"
        )


__all__ = ["DequantizeCacheOp", "QuantizeCacheOp"]
