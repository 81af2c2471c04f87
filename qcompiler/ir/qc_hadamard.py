"""`qc.hadamard`: an orthogonal transform of each run of columns, which spreads an outlier over the run."""

from __future__ import annotations

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, prop_def, result_def, traits_def
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.kinds.hadamard import why_no_block

_FLOATS = ("f32", "bf16", "f16")


@irdl_op_definition
class HadamardOp(QCOp):
    """`x (…, K)` with each run of `block` columns multiplied by the orthonormal Hadamard matrix H of that size.

        H[i, j] = (-1)^popcount(i & j) / sqrt(block)          symmetric, H H = 1

    `block` is a power of two that divides K.  The fast transform defines every bit: for width = 1, 2, 4, … block / 2
    the elements i and i + width of each pair become their sum and their difference in fp32, and the result is
    multiplied by fp32(1 / sqrt(block)) and rounded once.
    """

    name = "qc.hadamard"
    x = operand_def(TensorType)
    block = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue | Operation, *, block: int) -> None:
        value = SSAValue.get(x)
        super().__init__(operands=[value], properties={"block": IntegerAttr(block, i64)}, result_types=[value.type])

    def verify_op(self) -> None:
        x = shape_of(self.x.type)
        self.expect(len(x) >= 1 and isinstance(x[-1], int), "x needs a last dim of a known size")
        self.expect(tensor_dtype(self.x.type) in _FLOATS, f"x is one of {', '.join(_FLOATS)}")
        why = why_no_block(int(x[-1]), self.block.value.data)
        self.expect(not why, why)
        self.expect(self.result.type == self.x.type, "the result has the type of x")


__all__ = ["HadamardOp"]
