"""`qc.grouped_linear`: products with the weights of chosen MoE experts.

%h = qc.grouped_linear %x, %gate_up, %i {experts = 8, repeat = 2, pairs} : tensor<2x768xf32> {
^bb0(%gate: f32, %up: f32):
  … the SwiGLU of a pair of rows of the expert's two halves …
}
%y = qc.grouped_linear %h, %down, %i weights(%p) extras(%r) {experts = 8, repeat = 1, top = 2} : … mix {
^bb0(%sum: f32, %weight: f32, %total: f32):
  … the next total of a row's experts, in their order …
} {
^bb0(%total: f32, %r: f32):
  … the result, as the epilogue of a linear …
}
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.irdl import (
    AnyAttr,
    AttrSizedOperandSegments,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import dtype_of, shape_of, tensor_dtype
from qcompiler.plan.dims import dim


@irdl_op_definition
class GroupedLinearOp(QCOp):
    """Products with the weights of chosen MoE experts: `out[p] = x[p // repeat] @ w[index[p]]ᵀ`.

    x is (M, K). `w` stacks the (N, K) matrices of `experts` experts, (E*N, K), plain or packed. `index` (M * repeat),
    i64 or i32, names the expert of each (row, expert) pair. The result is (M * repeat, N). Each row of x serves
    `repeat` consecutive pairs: a token and its top-k experts. An index outside [0, E) is an error. The routing is data:
    shapes do not depend on it. x is rounded to the element type of w, where that is another, as in `qc.linear`.

    If x has element type i8, it holds int8 rows (`qc.quantize_rows`), (M, row_bytes(K)), and w is quantised. The codes
    are then multiplied as integers, in the order of formats/integer_product.py, which gives the fp32 sums.

    With `pairs`, each expert's matrix has two halves of N / 2 rows, and the result has N / 2 columns. The epilogue's
    arguments are the fp32 sums of rows n and N / 2 + n: the gate and the up projection of a GLU.

    With `top`, the results of `top` consecutive pairs become one row: the result is (M * repeat / top, N). A total
    begins at 0, and the region `mix` gives the next one from a pair's fp32 sum, from its element of `weights`
    (rows, top), and from the total so far, in the order of the pairs. The epilogue's arguments are the last total and
    one element of each of `extras`, which have the shape of the result.
    """

    name = "qc.grouped_linear"
    x = operand_def(TensorType)
    w = operand_def(AnyAttr())
    index = operand_def(TensorType)
    weights = opt_operand_def(TensorType)
    extras = var_operand_def(TensorType)
    experts = prop_def(IntegerAttr)
    repeat = prop_def(IntegerAttr)
    pairs = opt_prop_def(UnitAttr)
    top = opt_prop_def(IntegerAttr)
    result = result_def(TensorType)
    mix = region_def()
    epilogue = region_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        w: SSAValue | Operation,
        index: SSAValue | Operation,
        type_: Attribute,
        *,
        experts: int,
        repeat: int = 1,
        pairs: bool = False,
        top: int | None = None,
        weights: SSAValue | None = None,
        extras: Sequence[SSAValue] = (),
        mix: Region | None = None,
        epilogue: Region | None = None,
    ) -> None:
        properties = {
            "experts": IntegerAttr(experts, i64),
            "repeat": IntegerAttr(repeat, i64),
            "pairs": UnitAttr() if pairs else None,
            "top": None if top is None else IntegerAttr(top, i64),
        }
        super().__init__(
            operands=[x, w, index, [] if weights is None else [weights], list(extras)],
            properties=properties,
            result_types=[type_],
            regions=[Region() if mix is None else mix, Region() if epilogue is None else epilogue],
        )

    def verify_op(self) -> None:
        x, w, index = (shape_of(value.type) for value in (self.x, self.w, self.index))
        experts, repeat = self.experts.value.data, self.repeat.value.data
        self.expect(len(x) == len(w) == 2 and len(index) == 1, "x and w need rank 2, index rank 1")
        self.expect(tensor_dtype(self.index.type) in ("i64", "i32"), "index must be i64 or i32")
        self.expect(experts >= 1 and repeat >= 1, f"{experts} experts and {repeat} pairs per row must be positive")
        self.expect(int(w[0]) % experts == 0, f"{w[0]} rows of w are not a multiple of {experts} experts")
        if self.multiplies_codes:
            self.expect_rows_of_int8(self.x, self.w)
        else:
            self.expect(x[1] == w[1], f"x has K = {x[1]} but w has K = {w[1]}")
        pairs = (dim(x[0]) * repeat).to_dim()
        self.expect(index[0] == pairs, f"index must hold {pairs} entries, {repeat} for each row of x, not {index[0]}")
        rows, columns = pairs, int(w[0]) // experts
        if self.combines_pairs:
            self.expect(columns % 2 == 0, f"pairs of rows need two halves of them, an expert has {columns} rows")
            columns //= 2
        if self.count is not None:
            self.expect(self.count >= 1, f"the results of {self.count} pairs cannot be one row")
            fits = isinstance(pairs, int) and pairs % self.count == 0
            self.expect(fits, f"{pairs} pairs are not a known multiple of the {self.count} whose results are one row")
            rows = int(pairs) // self.count
        self.expect_shape(self.result, (rows, columns))
        self._verify_regions()

    def _verify_regions(self) -> None:
        combined = self.count is not None
        self.expect(not (combined and self.combines_pairs), "pairs of rows, and rows of several pairs, exclude another")
        for region, name, wanted in (
            (self.mix, "mix", combined),
            (self.epilogue, "the epilogue", combined or self.combines_pairs),
        ):
            what = "is missing" if wanted else "has nothing to combine"
            self.expect(bool(region.blocks) == wanted, f"{name} {what}")
        self.expect(combined or not self.extras, "extra inputs without rows of several pairs")
        self.expect(combined == (self.weights is not None), "weights and `top` need each other")
        shape = shape_of(self.result.type)
        for extra in self.extras:
            self.expect_shape(extra, shape, "an extra input")
        if self.weights is not None and self.count is not None:
            self.expect_shape(self.weights, (shape[0], self.count), "weights")
            self._verify_region(self.mix, "mix", ["f32", tensor_dtype(self.weights.type), "f32"], "f32")
        if self.epilogue.blocks:
            given = ["f32", "f32"] if self.combines_pairs else ["f32", *(tensor_dtype(e.type) for e in self.extras)]
            self._verify_region(self.epilogue, "the epilogue", given, tensor_dtype(self.result.type))

    def _verify_region(self, region: Region, name: str, wanted: Sequence[str], result: str) -> None:
        arguments = [dtype_of(a.type) for a in region.block.args]
        self.expect(arguments == list(wanted), f"{name} has arguments {arguments}, expected {list(wanted)}")
        last = region.block.last_op
        ends = last is not None and last.name == "qc.yield"
        yielded = [dtype_of(v.type) for v in last.operands] if last is not None and ends else []
        self.expect(yielded == [result], f"{name} yields {yielded}, expected ['{result}']")

    @property
    def multiplies_codes(self) -> bool:
        """Whether the rows of x are int8."""
        return tensor_dtype(self.x.type) == "i8"

    @property
    def combines_pairs(self) -> bool:
        """Whether the epilogue combines rows of an expert's two halves."""
        return self.pairs is not None

    @property
    def count(self) -> int | None:
        """`top` as a number: of the pairs whose results are one row."""
        return None if self.top is None else self.top.value.data
