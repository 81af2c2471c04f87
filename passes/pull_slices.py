"""pull-slices: moves slices and gathers of rows in front of the ops that compute each row by itself.

    %y = qc.linear %x, %w : tensor<?x?x32000xf32, ["b", "s", 32000]>      %l = tensor.extract_slice %x[0, s - 1, 0]
    %l = tensor.extract_slice %y[0, s - 1, 0] [b, 1, 32000]           ->  %y = qc.linear %l, %w : tensor<?x1x32000xf32>

So a causal model whose caller needs only the last position computes its head for that position only. A *pick* is a
slice, or a gather along one axis, that keeps the last dim whole. Picks move in front of linears, norms, quantisation to
int8 rows, and pointwise loops over one tensor, if nothing else reads the results of these. A slice moves only if the
next op can read the remaining rows in place. A gather moves only if it picks no more rows than there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import tensor as tensor_dialect
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg import ops
from xdsl.dialects.linalg.attrs import IteratorType, IteratorTypeAttr
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import shape_of, tensor, tensor_dtype
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.lowering import views as memory
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim

Pick = tensor_dialect.ExtractSliceOp | qc.GatherOp
Maker = qc.LinearOp | qc.LayerNormOp | qc.RmsNormOp | qc.QuantizeRowsOp | ops.GenericOp


@dataclass(frozen=True)
class PullSlicesPass(ModulePass):
    """Moves picks of rows in front of the ops that compute each row by itself."""

    name = "pull-slices"
    # another number of rows may take a kernel that sums in another order
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            for each in reversed(list(function.body.block.ops)):
                pick = each
                while isinstance(pick, Pick) and pick.parent is not None:
                    maker = _maker(pick)
                    if maker is None or not _is_of_rows(pick):
                        break
                    place, pick = path_of(maker), _move(pick, maker)
                    if isinstance(ctx, QCContext):
                        why = f"nothing reads the other rows of '{place}'"
                        ctx.report.add(self.name, path_of(pick), "rows are picked before they are computed with", why)


def _maker(pick: Pick) -> Maker | None:
    """The op whose rows are picked, through reshapes of leading dims, if nothing else reads its result."""
    value, cols = pick.operands[0], shape_of(pick.operands[0].type)[-1]
    while value.has_one_use():
        op = producer(value)
        if isinstance(op, views.Reshape) and shape_of(op.src.type)[-1:] == (cols,):
            value = op.src
        else:
            return op if isinstance(op, Maker) and _is_by_rows(op) else None
    return None


def _is_by_rows(op: Maker) -> bool:
    """Whether each row of the result is computed from the same row of the one tensor that has its shape."""
    if isinstance(op, qc.LinearOp):
        return not op.extras
    if isinstance(op, qc.QuantizeRowsOp):
        return op.largest is None  # rows of an image share its scale
    if not isinstance(op, ops.GenericOp):
        return True
    if not loops.is_pointwise(op) or any(isinstance(each, ops.IndexOp) for each in op.body.block.ops):
        return False
    rank = len(shape_of(op.res[0].type))
    same = [index == loops.identity(rank) for _, index in loops.inputs_of(op)]
    others = [index for _, index in loops.inputs_of(op) if index != loops.identity(rank)]
    by_column = all(all(expr == loops.dim_expr(rank - 1) for expr in index) for index in others)
    return sum(same) == 1 and by_column and loops.output_index(op) == loops.identity(rank)


def _is_of_rows(pick: Pick) -> bool:
    """Whether the pick takes whole rows, and fewer than there are, and the next op can read them in place."""
    shape = shape_of(pick.operands[0].type)
    if isinstance(pick, qc.GatherOp):
        axis = pick.axis.value.data
        index = shape_of(pick.index.type)
        fewer = all(size == 1 for size in index) or (len(index) == 1 and _at_most(index[0], shape[axis]))
        return pick.mode.data == "take" and axis < len(shape) - 1 and fewer
    found = views.slice_of(pick)
    if found is None or len(found[1]) != len(shape):
        return False
    offsets, sizes, steps = found
    if offsets[-1] != 0 or steps[-1] != 1 or sizes[-1] != shape[-1]:
        return False
    whole = memory.contiguous("", tensor_dtype(pick.source.type), shape)
    return memory.as_matrix(memory.slice_(whole, offsets, sizes, steps)) is not None


def _at_most(size: Dim, limit: Dim) -> bool:
    return isinstance(size, int) and isinstance(limit, int) and size <= limit


def _move(pick: Pick, maker: Maker) -> Pick:
    """Replaces the op by the same op on the picked rows. Returns the pick that the new op reads."""
    builder = build.with_path(InsertPoint.before(pick), path_of(pick))
    rows = shape_of(pick.operands[0].type)[:-1]
    picked = shape_of(pick.results[0].type)[:-1]
    source = _input(maker)
    cols = shape_of(source.type)[-1]
    moved = _picked(builder, pick, build.reshape(builder, source, (*rows, cols)), cols)
    outer = build.with_path(InsertPoint.before(pick), path_of(maker))
    made = _remade(outer, maker, moved.results[0], (*picked, shape_of(maker.results[0].type)[-1]))
    result = build.reshape(builder, made, shape_of(pick.results[0].type))
    pick.results[0].replace_all_uses_with(result)
    erase_if_dead(pick)
    return moved


def _input(maker: Maker) -> SSAValue:
    """The tensor whose row n gives row n of the result."""
    if isinstance(maker, ops.GenericOp):
        rank = len(shape_of(maker.res[0].type))
        return next(value for value, index in loops.inputs_of(maker) if index == loops.identity(rank))
    return maker.operands[0]


def _picked(builder: Builder, pick: Pick, value: SSAValue, cols: Dim) -> Pick:
    """Picks the same rows of another tensor."""
    if isinstance(pick, qc.GatherOp):
        type_ = tensor((*shape_of(pick.result.type)[:-1], cols), tensor_dtype(value.type))
        return builder.insert(qc.GatherOp(value, pick.index, type_, axis=pick.axis.value.data))
    found = views.slice_of(pick)
    assert found is not None
    offsets, sizes, steps = found
    made = build.extract_slice(builder, value, offsets, (*sizes[:-1], cols), steps).owner
    assert isinstance(made, tensor_dialect.ExtractSliceOp)
    return made


def _remade(builder: Builder, maker: Maker, x: SSAValue, shape: tuple[Dim, ...]) -> SSAValue:
    """The same op on the rows of `x`."""
    type_ = tensor(shape, tensor_dtype(maker.results[0].type))
    if isinstance(maker, ops.GenericOp):
        return _loop(builder, maker, x, shape, type_)
    made = type(maker).create(
        operands=[x, *maker.operands[1:]], result_types=[type_], properties=dict(maker.properties),
        attributes=dict(maker.attributes), regions=[region.clone() for region in maker.regions],
    )  # fmt: skip
    return builder.insert(made).results[0]


def _loop(builder: Builder, maker: ops.GenericOp, x: SSAValue, shape: tuple[Dim, ...], type_: TensorType) -> SSAValue:
    """The same pointwise nest on the rows of `x`. Its rank changes if `x` has another rank."""
    old, rank = len(shape_of(maker.res[0].type)), len(shape)
    inputs = [x if index == loops.identity(old) else value for value, index in loops.inputs_of(maker)]
    maps = [
        loops.identity(rank) if index == loops.identity(old) else tuple(loops.dim_expr(rank - 1) for _ in index)
        for _, index in loops.inputs_of(maker)
    ]
    out = build.empty(builder, shape, tensor_dtype(type_))
    parallel = IteratorTypeAttr(IteratorType.PARALLEL)
    indexing = [loops.map_attr(rank, index) for index in (*maps, loops.identity(rank))]
    made = ops.GenericOp(inputs, [out], maker.body.clone(), indexing, [parallel] * rank, [type_])
    return builder.insert(made).res[0]
