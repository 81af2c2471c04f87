"""fuse-dequant-matmul: makes matmuls read quantised weights in their packed form.

    %w = qc.dequantize %q                                 %y = qc.linear %x, %q
    %t = linalg.transpose %w [1, 0]                  ->
    %y = qc.batch_matmul %x, %t

The pass first normalises. A matmul whose right side is a weight becomes `qc.linear`, which takes `(N, K)`; plain
weights are transposed at compile time, and two transposes cancel. Then one pattern is enough, `linear(dequantize(w)) ->
linear(w)`, and the same for the table of an embedding and for the weights of experts.

If x is dequantised int8 rows and the weight's format has an integer product, the linear multiplies codes:
`linear(dequantize_rows(q), dequantize(w)) -> linear(q, w)`. A convolution reads windows of its pixels, which are rows
with the scale of their image: `linear(windows(dequantize_rows(q)), dequantize(w)) -> linear(windows(q), w)`. On GPUs, x
is rounded to the type of a weight in bf16. A weight that another op reads in full is decoded by an embedding of all its
rows, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineMap
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler import formats
from qcompiler.formats import int8_rows
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of, set_path
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.types import ELEMENT_TYPES, QTensorType, shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.rewriting import pattern, rewrite
from qcompiler.passes.views import views
from qcompiler.passes.views.im2col import windows_of
from qcompiler.passes.views.view_rules import fold_views
from qcompiler.plan.dims import Dim
from qcompiler.plan.weights import StoredTensor, Transposed


@dataclass(frozen=True)
class FuseDequantMatmulPass(ModulePass):
    """Linears and embeddings read packed weights."""

    name = "fuse-dequant-matmul"
    # a (M, K) x (K, N) product and its linear may sum over K in different orders
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            body = function.body.block
            rewrite(list(body.ops), [matmul_to_linear], again=False)
            fold_views(list(body.ops))
            for each in list(body.ops):
                if isinstance(each, qc.LinearOp):
                    _transpose_at_compile_time(each, context)
            rewrite(list(body.ops), [read_packed, read_rows, read_windows])
            if context.target.kind == "cuda":
                rewrite(list(body.ops), [round_rows], again=False)
            for each in list(body.ops):
                if isinstance(each, qc.DequantizeOp) and each.result.uses:
                    _report(each, context)
            rewrite(list(body.ops), [decode_all_rows], again=False)


@pattern
def read_packed(
    op: qc.LinearOp | qc.EmbeddingOp | qc.GroupedLinearOp | qc.RecurrentOp, rewriter: PatternRewriter
) -> SSAValue | None:
    """Makes an op read the packed weight instead of the result of `qc.dequantize`."""
    sources = [(n, producer(op.operands[n])) for n in (op.weights if isinstance(op, qc.RecurrentOp) else (1,))]
    decoded = [(n, source) for n, source in sources if isinstance(source, qc.DequantizeOp)]
    for operand, source in decoded:
        op.operands[operand] = source.input
        erase_if_dead(source, rewriter.erase)
    return op.results[0] if decoded else None


@pattern
def read_rows(op: qc.LinearOp | qc.GroupedLinearOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Makes a linear, or the products of experts, read int8 rows instead of the result of `qc.dequantize_rows`, if both
    sides have integer codes. A reshape of x becomes a reshape of its codes."""
    shape, weight = shape_of(op.x.type), op.w.type
    source, view = producer(views.unreshaped(op.x)), producer(op.x)
    if not isinstance(source, qc.DequantizeRowsOp) or not isinstance(weight, QTensorType) or view is None:
        return None
    if not _multiplies_integers(weight) or shape_of(source.result.type)[-1] != shape[-1]:
        return None
    op.operands[0] = build.reshape(rewriter, source.rows, (*shape[:-1], shape_of(source.rows.type)[-1]))
    erase_if_dead(view, rewriter.erase)
    return op.results[0]


@pattern
def read_windows(op: qc.LinearOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Makes the linear of a convolution read windows of int8 rows instead of windows of their values, if both sides
    have integer codes, and all pixels of each image one scale."""
    windows, weight = windows_of(op.x), op.w.type
    if windows is None or not isinstance(weight, QTensorType) or not _multiplies_integers(weight):
        return None
    source = producer(views.unreshaped(windows.x))
    channels = windows.depth
    if not isinstance(source, qc.DequantizeRowsOp) or shape_of(source.result.type)[-1] != channels:
        return None
    if not _has_scales_of_images(source.rows, shape_of(windows.x.type)[0]):
        return None
    image = build.reshape(rewriter, source.rows, (*shape_of(windows.x.type)[:3], int8_rows.row_bytes(channels)))
    width = int8_rows.row_bytes(int(shape_of(windows.result.type)[-1]))
    kernel, strides, padding, dilation = (
        numbers(each) for each in (windows.kernel, windows.strides, windows.padding, windows.dilation)
    )
    made = qc.WindowsOp(
        image, tensor_type((*shape_of(windows.result.type)[:3], width), "i8"), kernel=kernel, strides=strides,
        padding=padding, dilation=dilation, channels=channels,
    )  # fmt: skip
    rows = rewriter.insert(made).result
    view = producer(op.x)
    op.operands[0] = build.reshape(rewriter, rows, (*shape_of(op.x.type)[:-1], width))
    if view is not None:
        erase_if_dead(view, rewriter.erase)
    return op.result


def _has_scales_of_images(rows: SSAValue, images: Dim) -> bool:
    """Whether int8 rows are the pixels of `images` images with a scale each. A window has the scale of the first pixel
    of its image, so that rows with scales of their own, and pixels of several images in one, cannot be read so."""
    made = producer(views.unreshaped(rows))
    return isinstance(made, qc.QuantizeRowsOp) and made.kind.data == "image" and shape_of(made.x.type)[0] == images


def _multiplies_integers(weight: QTensorType) -> bool:
    reference = weight.format.ref
    return isinstance(integer_product(formats.get(reference.name, **reference.params)), IntegerProduct)


@pattern
def round_rows(op: qc.LinearOp | qc.GroupedLinearOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Rounds x to the weight's type in front of a product whose kernels multiply on tensor cores, which read both in
    one type. A CPU's kernels round the rows that they read."""
    dtype = tensor_dtype(op.w.type)
    if dtype != "bf16" or tensor_dtype(op.x.type) not in ("f32", "f16"):
        return None
    op.operands[0] = build.rounded(rewriter, op.x, dtype)
    return op.result


def _report(op: qc.DequantizeOp, context: QCContext) -> None:
    readers = ", ".join(sorted({use.operation.name for use in op.result.uses}))
    type_ = op.input.type
    assert isinstance(type_, QTensorType)
    name = f"the {type_.format.format_name.data} weight {'x'.join(map(str, type_.shape))} is decoded to a full tensor"
    context.report.add(FuseDequantMatmulPass.name, path_of(op), name, f"it is read by {readers}")


@pattern
def decode_all_rows(op: qc.DequantizeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Decodes a weight that an op reads in full by an embedding of all its rows, since that has a kernel."""
    if not op.result.uses:
        return None

    def count(inner: Builder, _: Sequence[SSAValue]) -> SSAValue:
        return inner.insert(arith.IndexCastOp(inner.insert(ops.IndexOp(0)).result, ELEMENT_TYPES["i64"])).result

    rows = shape_of(op.result.type)[0]
    ids = build.generic(rewriter, [], [AffineMap.identity(1)], [rows], "i64", ["parallel"], count)
    return rewriter.insert(qc.EmbeddingOp(ids, op.input, op.result.type)).result


# --- normalisation ---------------------------------------------------------------------------------------------------


@pattern
def matmul_to_linear(op: qc.BatchMatmulOp, rewriter: PatternRewriter) -> SSAValue | None:
    """`a @ b` with b a weight (K, N), or the same weight broadcast over the batch, becomes `linear(a, bᵀ)`."""
    weight = _weight_matrix(op.b)
    if weight is None:
        return None
    transposed = build.transpose(rewriter, weight, (1, 0))
    return rewriter.insert(qc.LinearOp(op.a, transposed, None, op.result.type)).result


def _weight_matrix(value: SSAValue) -> SSAValue | None:
    """The rank-2 weight that `value` is, through broadcasts over leading batch dims, or None."""
    rank = views.rank_of(value)
    while rank > 2:
        op = producer(value)
        if isinstance(op, ops.BroadcastOp) and views.added_dims(op) == tuple(range(len(views.added_dims(op)))):
            value = op.input
        elif isinstance(op, tensor.ExpandShapeOp) and all(d == 1 for d in shape_of(value.type)[: rank - 2]):
            value = op.src
        else:
            return None
        rank = views.rank_of(value)
    fixed = all(isinstance(size, int) for size in shape_of(value.type))  # a result of @init may be cut to a symbol
    return value if rank == 2 and fixed and _is_weight(value) else None


def _is_weight(value: SSAValue) -> bool:
    """Whether a value is a constant or a decoded constant, with or without a transpose."""
    op = producer(views.base_of(value))
    if isinstance(op, qc.DequantizeOp):
        op = producer(op.input)
    return isinstance(op, qc.ConstOp)


def _transpose_at_compile_time(op: qc.LinearOp, context: QCContext) -> None:
    """Makes `linear(x, transpose(const))` read a transposed constant, whose bytes are rearranged once."""
    view = producer(op.w)
    if not isinstance(view, ops.TransposeOp):
        return
    constant = producer(view.inputs[0])
    if not isinstance(constant, qc.ConstOp) or isinstance(constant.result.type, QTensorType):
        return
    if constant.key not in context.weights:  # a result of @init exists only at run time
        return
    key = f"{constant.key}.transposed"
    if key not in context.weights:
        stored = context.weights[constant.key]
        rows, cols = stored.shape
        context.weights.add(
            StoredTensor(key, stored.dtype, (cols, rows), Transposed(stored), parameters=stored.parameters)
        )
    made = qc.ConstOp(key, tensor_type(shape_of(op.w.type), tensor_dtype(op.w.type)))
    set_path(made, path_of(op))
    loops.insert_before(op, made)
    op.operands[1] = made.result
    erase_if_dead(view)
