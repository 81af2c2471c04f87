"""The `qc` dialect: tensor-level operators of a quantised program. This is its whole vocabulary.

Everything else is `linalg.generic` with `arith`/`math` bodies plus `tensor` view ops.  The meaning of each op is its
rule in `interpreter_qc.py`; all of them accumulate in fp32 and round once to the result's element type.  The syntax
they share is in `qc_base.py`.  An op is in the dialect as soon as one of these modules defines it.

    values      const  dim  state  state_update  copy
    quantised   quantize  dequantize, in qc_rows.py: quantize_rows  dequantize_rows, in qc_cache.py: quantize_cache
                dequantize_cache
    matmuls     linear  batch_matmul, in qc_attention.py: attention  join_attention, in qc_experts.py:
                grouped_linear, in qc_conv.py: conv2d  windows, in qc_recurrent.py: recurrent, in
                qc_linear_attention.py: linear_attention
    norms       rms_norm  layer_norm  softmax
    rotation    hadamard, in qc_hadamard.py
    positions   qc_index.py, whose head lists them: ops that read along, or order, an axis
    escape      torch_call, in qc_torch.py
    terminator  yield
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from xdsl.dialects.builtin import (
    IndexType,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
)
from xdsl.ir import Attribute, Dialect, Operation, Region, SSAValue
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
    var_result_def,
)
from xdsl.traits import IsTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from qcompiler.errors import DimError
from qcompiler.ir import (
    qc_attention,
    qc_cache,
    qc_conv,
    qc_experts,
    qc_hadamard,
    qc_index,
    qc_linear_attention,
    qc_norm,
    qc_recurrent,
    qc_rows,
    qc_torch,
)
from qcompiler.ir.effects import ReadsState, WritesState
from qcompiler.ir.qc_attention import AttentionOp, JoinAttentionOp
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.qc_cache import DequantizeCacheOp, QuantizeCacheOp
from qcompiler.ir.qc_conv import Conv2dOp, WindowsOp
from qcompiler.ir.qc_experts import GroupedLinearOp
from qcompiler.ir.qc_hadamard import HadamardOp
from qcompiler.ir.qc_index import (
    ArgmaxOp,
    CumsumOp,
    EmbeddingOp,
    GatherOp,
    IndexUpdateOp,
    RopeOp,
    ScatterOp,
    SortOp,
    TopkOp,
)
from qcompiler.ir.qc_linear_attention import LinearAttentionOp
from qcompiler.ir.qc_norm import NORMS, LayerNormOp, RmsNormOp, SoftmaxOp, statistics_type
from qcompiler.ir.qc_recurrent import RecurrentOp
from qcompiler.ir.qc_rows import DequantizeRowsOp, QuantizeRowsOp
from qcompiler.ir.qc_torch import TorchCallOp
from qcompiler.ir.types import (
    DimsAttr,
    FormatAttr,
    LayoutAttr,
    QTensorType,
    dtype_of,
    shape_of,
    tensor_dtype,
)
from qcompiler.plan.dims import Dim, dim, parse
from qcompiler.plan.row_statistics import Kind

__all__ = [
    "QC", "ArgmaxOp", "AttentionOp", "BatchMatmulOp", "ConstOp", "Conv2dOp", "CopyOp", "CumsumOp", "DequantizeCacheOp",
    "DequantizeOp", "DequantizeRowsOp", "DimOp", "EmbeddingOp", "GatherOp", "GroupedLinearOp", "HadamardOp",
    "IndexUpdateOp", "JoinAttentionOp", "LayerNormOp", "LinearAttentionOp", "LinearOp", "QCOp", "QuantizeCacheOp",
    "QuantizeOp", "QuantizeRowsOp", "RecurrentOp", "RmsNormOp", "RopeOp", "ScatterOp", "SoftmaxOp", "SortOp", "StateOp",
    "StateUpdateOp", "TopkOp", "TorchCallOp", "WindowsOp", "YieldOp",
]  # fmt: skip

# --- values ----------------------------------------------------------------------------------------------------------


@irdl_op_definition
class ConstOp(QCOp):
    """A tensor of the weight store, by key. Weights are never inlined in the IR."""

    name = "qc.const"
    sym = prop_def(SymbolRefAttr)
    result = result_def(AnyAttr())
    traits = traits_def(Pure())

    def __init__(self, key: str, type_: Attribute) -> None:
        super().__init__(properties={"sym": SymbolRefAttr(key)}, result_types=[type_])

    def verify_op(self) -> None:
        shape = shape_of(self.result.type) if isinstance(self.result.type, TensorType | QTensorType) else ("",)
        self.expect(all(isinstance(d, int) for d in shape), "a constant is a tensor of static shape")

    @property
    def key(self) -> str:
        return self.sym.root_reference.data


@irdl_op_definition
class DimOp(QCOp):
    """The value of a shape expression: `%n = qc.dim "b*s" : index`. It depends on input shapes only, not on tensors."""

    name = "qc.dim"
    expr = prop_def(StringAttr)
    result = result_def(IndexType())
    traits = traits_def(Pure())

    def __init__(self, expr: Dim) -> None:
        super().__init__(properties={"expr": StringAttr(str(dim(expr)))}, result_types=[IndexType()])

    def verify_op(self) -> None:
        try:
            canonical = str(parse(self.expr.data))
        except DimError as error:
            raise VerifyException(f"{self.name}: {error}") from error
        self.expect(canonical == self.expr.data, f"'{self.expr.data}' is not canonical; write '{canonical}'")


@irdl_op_definition
class StateOp(QCOp):
    """The value of a declared state at entry."""

    name = "qc.state"
    sym = prop_def(SymbolRefAttr)
    result = result_def(TensorType)
    traits = traits_def(ReadsState())

    def __init__(self, key: str, type_: Attribute) -> None:
        super().__init__(properties={"sym": SymbolRefAttr(key)}, result_types=[type_])

    def verify_op(self) -> None:
        static = all(isinstance(d, int) for d in shape_of(self.result.type))
        self.expect(static, "a state has a static shape (its maximum); lengths are device data")

    @property
    def key(self) -> str:
        return self.sym.root_reference.data


@irdl_op_definition
class StateUpdateOp(QCOp):
    """The value of a declared state at exit. At most one per state; `lower-to-rt` makes the update in place or
    fails."""

    name = "qc.state_update"
    sym = prop_def(SymbolRefAttr)
    value = operand_def(TensorType)
    traits = traits_def(WritesState())

    def __init__(self, key: str, value: SSAValue | Operation) -> None:
        super().__init__(operands=[value], properties={"sym": SymbolRefAttr(key)})

    @property
    def key(self) -> str:
        return self.sym.root_reference.data


@irdl_op_definition
class CopyOp(QCOp):
    """The same value on another device: the only op that crosses devices. Only `assign-devices` inserts it."""

    name = "qc.copy"
    input = operand_def(AnyAttr())
    source = prop_def(StringAttr)
    target = prop_def(StringAttr)
    result = result_def(AnyAttr())
    traits = traits_def(Pure())

    def __init__(self, input: SSAValue | Operation, *, source: str, target: str) -> None:
        value = SSAValue.get(input)
        properties = {"source": StringAttr(source), "target": StringAttr(target)}
        super().__init__(operands=[value], properties=properties, result_types=[value.type])

    def verify_op(self) -> None:
        self.expect(self.input.type == self.result.type, "a copy does not change the type")
        self.expect(self.source.data != self.target.data, f"a copy from {self.source.data} to itself")


# --- quantised values ------------------------------------------------------------------------------------------------


@irdl_op_definition
class QuantizeOp(QCOp):
    """Encodes a float matrix into a format. For activations: weights are encoded at compile time."""

    name = "qc.quantize"
    input = operand_def(TensorType)
    result = result_def(QTensorType)
    traits = traits_def(Pure())

    def __init__(self, input: SSAValue | Operation, type_: QTensorType) -> None:
        super().__init__(operands=[input], result_types=[type_])

    def verify_op(self) -> None:
        self.expect(len(self.result.type.shape) == 2, "formats encode matrices: the input needs rank 2")
        self.expect_shape(self.input, self.result.type.shape, "the input")
        self.expect(tensor_dtype(self.input.type) == self.result.type.dtype, "element types differ")


@irdl_op_definition
class DequantizeOp(QCOp):
    """Decodes a quantised tensor: fp32 decode, one rounding to the element type."""

    name = "qc.dequantize"
    input = operand_def(QTensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, input: SSAValue | Operation, type_: Attribute) -> None:
        super().__init__(operands=[input], result_types=[type_])

    def verify_op(self) -> None:
        self.expect(shape_of(self.input.type) == shape_of(self.result.type), "input and result differ in shape")
        self.expect(tensor_dtype(self.input.type) == tensor_dtype(self.result.type), "element types differ")


# --- matmuls ---------------------------------------------------------------------------------------------------------


Keeps = Literal["norm", "codes"]
"""Rows that a linear makes in its prologue and keeps for other ops: those of its first norm, or those of int8."""


@irdl_op_definition
class LinearOp(QCOp):
    """`x (…, K) @ w (N, K)ᵀ + bias (N)`, then an optional scalar epilogue.

    x is rounded to the element type of w, where that is another (the arithmetic that a recipe chose). Elements of a
    packed weight are rounded to that type as well, or stay as they are decoded, in fp32.

    If x has element type i8, it holds int8 rows (`qc.quantize_rows`), `(…, row_bytes(K))`, and w is quantised. The
    codes are then multiplied as integers, in the order of formats/integer_product.py.

    The epilogue region's first argument is the fp32 accumulator, bias included. The others are one element of each of
    `extras`, which have the result's rank with equal or unit dims. The region ends in `qc.yield` of the result's
    element type.

    With `pairs`, w is two matrices of N / 2 rows, one below the other, and the result has N / 2 columns. The epilogue's
    first two arguments are the accumulators of rows n and N / 2 + n: the gate and the up projection of a GLU.

    The prologue region makes the rows that are multiplied. Its arguments are x and `affine`, as whole tensors. It holds
    a chain of ops, each of the result before it: a norm with a residual, a norm, and a `qc.quantize_rows` without
    columns, any of which may lack. Results of norms have the type of x. It ends in `qc.yield` of the last result. If it
    yields the first norm's result behind that, or the rows of int8 again, other ops read those rows: they are the op's
    second result, `kept`.

    With `statistics` ("layer" or "rms"), the second result is the statistics of the result's rows instead, in parts
    (plan/row_statistics.py), for a norm in another linear.
    """

    name = "qc.linear"
    x = operand_def(TensorType)
    w = operand_def(AnyAttr())
    bias = opt_operand_def(TensorType)
    extras = var_operand_def(TensorType)
    affine = var_operand_def(TensorType)
    pairs = opt_prop_def(UnitAttr)
    statistics = opt_prop_def(StringAttr)
    result = result_def(TensorType)
    beside = var_result_def(TensorType)
    prologue = region_def()
    epilogue = region_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        w: SSAValue | Operation,
        bias: SSAValue | Operation | None,
        type_: Attribute,
        extras: Sequence[SSAValue] = (),
        epilogue: Region | None = None,
        *,
        pairs: bool = False,
        affine: Sequence[SSAValue] = (),
        prologue: Region | None = None,
        statistics: Kind | None = None,
    ) -> None:
        beside = [] if prologue is None else [value.type for value in _yielded(prologue)[1:]]
        if statistics is not None:
            beside = [*beside, statistics_type(type_, statistics)]
        super().__init__(
            operands=[x, w, [bias] if bias is not None else [], list(extras), list(affine)],
            properties={
                "pairs": UnitAttr() if pairs else None,
                "statistics": StringAttr(statistics) if statistics is not None else None,
            },
            result_types=[type_, beside],
            regions=[prologue if prologue is not None else Region(), epilogue if epilogue is not None else Region()],
        )

    def verify_op(self) -> None:
        x, w, out = shape_of(self.x.type), shape_of(self.w.type), shape_of(self.result.type)
        self.expect(len(x) >= 1 and len(w) == 2, "x needs rank >= 1 and w rank 2")
        if self.multiplies_codes and self.quantised is None:
            self.expect_rows_of_int8(self.x, self.w)
        else:
            self.expect(x[-1] == w[1], f"x has K = {x[-1]} but w has K = {w[1]}")
            packed = isinstance(self.w.type, QTensorType)
            self.expect(packed or self.quantised is None, "rows of int8 are multiplied with a quantised weight")
        if self.combines_pairs:
            self.expect(int(w[0]) % 2 == 0, f"pairs of rows need two halves of them, w has {w[0]} rows")
            self.expect(bool(self.epilogue.blocks), "pairs of rows need an epilogue that combines them")
        wanted_shape = (*x[:-1], int(w[0]) // self.sums)
        self.expect(out == wanted_shape, f"the result must have shape {wanted_shape}, not {out}")
        if self.bias is not None:
            self.expect(shape_of(self.bias.type) == (w[0],), f"bias must have shape ({w[0]},)")
        for extra in self.extras:
            shape = shape_of(extra.type)
            fits = len(shape) == len(out) and all(a in (b, 1) for a, b in zip(shape, out, strict=True))
            self.expect(fits, f"extra input of shape {shape} does not broadcast to {out}")
        self._verify_prologue()
        if self.statistics is not None:
            self.expect(self.statistics.data in ("layer", "rms"), "statistics are those of a layer or an rms norm")
            wanted_type = statistics_type(self.result.type, self.statistics.data)
            self.expect([v.type for v in self.beside] == [wanted_type], f"the statistics' type must be {wanted_type}")
            plain = not self.multiplies_codes and not self.combines_pairs
            self.expect(plain, "a linear with statistics multiplies floats and combines no pairs")
        given = any(norm.statistics is not None for norm in self.norms)
        self.expect(not given or not self.multiplies_codes, "a norm of given statistics makes no rows of int8")
        if not self.epilogue.blocks:
            self.expect(not self.extras, "extra inputs without an epilogue")
            return
        arguments = [dtype_of(a.type) for a in self.epilogue.block.args]
        wanted = [*["f32"] * self.sums, *(tensor_dtype(e.type) for e in self.extras)]
        self.expect(arguments == wanted, f"epilogue arguments are {arguments}, expected {wanted}")
        last = self.epilogue.block.last_op
        yielded = [dtype_of(v.type) for v in last.operands] if isinstance(last, YieldOp) else []
        wanted = [tensor_dtype(self.result.type)]
        self.expect(yielded == wanted, f"the epilogue yields {yielded}, expected {wanted}")

    def _verify_prologue(self) -> None:
        if not self.prologue.blocks:
            self.expect(not self.affine and not self.kept, "operands or rows of a norm without a prologue")
            return
        block = self.prologue.block
        wanted = [self.x.type, *(value.type for value in self.affine)]
        self.expect([a.type for a in block.args] == wanted, "the prologue's arguments are x and `affine`, as they are")
        norms, last = self.norms, block.last_op
        steps = [*norms, *([self.quantised] if self.quantised is not None else [])]
        rows: SSAValue = block.args[0]
        given: list[SSAValue] = list(block.args[1:])
        chained = [*block.ops] == [*steps, last] and bool(steps) and isinstance(last, YieldOp)
        for each in steps:
            count = len(each.operands) - 1
            chained = chained and list(each.operands) == [rows, *given[:count]]
            rows, given = each.result, given[count:]
        kept = [rows] if self.keeps == "codes" else [norm.result for norm in norms[:1] if self.kept]
        self.expect(
            chained and not given and _yielded(self.prologue) == [rows, *kept],
            "a prologue is norms of its arguments, or rows of int8, or these of those, and a qc.yield of the result, "
            "behind which the first norm's, or the rows of int8, may stand again",
        )
        with_residual = [norm.residual is not None for norm in norms]
        self.expect(
            with_residual in ([], [False], [True], [True, False]),
            "a prologue has one norm, or one with a residual and then one without",
        )
        self.expect([v.type for v in self.kept] == [v.type for v in kept], "`kept` are the rows that the region gives")
        for norm in norms:
            made = norm.result.type
            self.expect(made == self.x.type, f"the norm gives {made}, and x is {self.x.type}")

    @property
    def kept(self) -> tuple[SSAValue, ...]:
        """The rows that the first norm makes, or those of int8, if other ops read them."""
        return () if self.statistics is not None else tuple(self.beside)

    @property
    def keeps(self) -> Keeps | None:
        """Which rows `kept` are."""
        if not self.kept:
            return None
        return "codes" if self.quantised is not None and tensor_dtype(self.kept[0].type) == "i8" else "norm"

    @property
    def norms(self) -> tuple[RmsNormOp | LayerNormOp, ...]:
        """The norms that the prologue holds, in order."""
        ops = self.prologue.block.ops if self.prologue.blocks else ()
        return tuple(op for op in ops if isinstance(op, NORMS))

    @property
    def norm(self) -> RmsNormOp | LayerNormOp | None:
        """The norm without a residual."""
        return next((norm for norm in self.norms if norm.residual is None), None)

    @property
    def residual_norm(self) -> RmsNormOp | LayerNormOp | None:
        """The norm with a residual."""
        return next((norm for norm in self.norms if norm.residual is not None), None)

    @property
    def quantised(self) -> QuantizeRowsOp | None:
        """What makes rows of int8 in the prologue."""
        last = self.prologue.block.last_op if self.prologue.blocks else None
        found = last.prev_op if last is not None else None
        return found if isinstance(found, QuantizeRowsOp) else None

    @property
    def multiplies_codes(self) -> bool:
        """Whether the rows that are multiplied are int8: those of x, or those that the prologue makes."""
        return tensor_dtype(self.x.type) == "i8" or self.quantised is not None

    @property
    def combines_pairs(self) -> bool:
        """Whether the epilogue combines rows of the two halves of w."""
        return self.pairs is not None

    @property
    def sums(self) -> int:
        """How many arguments of the epilogue are accumulators."""
        return 2 if self.combines_pairs else 1


def _yielded(region: Region) -> list[SSAValue]:
    """What a region yields; nothing if it does not end in a `qc.yield`."""
    last = region.block.last_op
    return list(last.operands) if isinstance(last, YieldOp) else []


@irdl_op_definition
class BatchMatmulOp(QCOp):
    """`a (b…, M, K) @ b (b…, K, N)`. Batch dims are equal (the importer inserts broadcasts)."""

    name = "qc.batch_matmul"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, a: SSAValue | Operation, b: SSAValue | Operation, type_: Attribute) -> None:
        super().__init__(operands=[a, b], result_types=[type_])

    def verify_op(self) -> None:
        a, b, out = shape_of(self.a.type), shape_of(self.b.type), shape_of(self.result.type)
        self.expect(len(a) == len(b) >= 2, f"ranks {len(a)} and {len(b)} must be equal and at least 2")
        self.expect(a[:-2] == b[:-2], f"batch dims {a[:-2]} and {b[:-2]} differ")
        self.expect(a[-1] == b[-2], f"a has K = {a[-1]} but b has K = {b[-2]}")
        self.expect(out == (*a[:-1], b[-1]), f"the result must have shape {(*a[:-1], b[-1])}, not {out}")


# --- terminator -------------------------------------------------------------------------------------------


@irdl_op_definition
class YieldOp(QCOp):
    """Ends an epilogue."""

    name = "qc.yield"
    values = var_operand_def(AnyAttr())
    traits = traits_def(IsTerminator())

    def __init__(self, *values: SSAValue | Operation) -> None:
        super().__init__(operands=[list(values)])


def _ops(*namespaces: Mapping[str, object]) -> list[type[Operation]]:
    """The ops that modules define, in the order in which they stand there."""
    return [
        each
        for names in namespaces
        for each in names.values()
        if isinstance(each, type)
        and issubclass(each, QCOp)
        and "name" in vars(each)
        and each.__module__ == names["__name__"]
    ]


QC = Dialect(
    "qc",
    _ops(
        globals(),
        *(
            vars(module)
            for module in (
                qc_attention,
                qc_cache,
                qc_conv,
                qc_experts,
                qc_hadamard,
                qc_index,
                qc_linear_attention,
                qc_norm,
                qc_recurrent,
                qc_rows,
                qc_torch,
            )
        ),
    ),
    [DimsAttr, FormatAttr, LayoutAttr, QTensorType],
)
