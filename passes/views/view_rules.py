"""The rules by which views cancel each other and disappear into their readers. See passes/fold_views.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import path_of, set_path
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.rewriting import pattern, rewrite
from qcompiler.passes.views import factors, views
from qcompiler.passes.views.canonical import JOIN_VIEWS
from qcompiler.passes.views.factors import Dims
from qcompiler.plan.dims import Dim, dim


def fold_views(ops_: Block | Iterable[Operation]) -> None:
    """Applies every rule to the ops given and to what the rules make, until none applies."""
    rewrite(ops_, RULES)


# --- views of other ops ----------------------------------------------------------------------------------------------


@pattern
def fold_view_of_fill(
    op: tensor.ExpandShapeOp | tensor.CollapseShapeOp | ops.BroadcastOp, rewriter: PatternRewriter
) -> SSAValue | None:
    """A view of one value everywhere is a fill of the view's shape, where nothing else reads the fill."""
    inner = producer(op.operands[0])
    if not isinstance(inner, ops.FillOp) or not inner.res[0].has_one_use():
        return None
    type_ = op.results[0].type
    return build.fill(rewriter, inner.inputs[0], shape_of(type_), tensor_dtype(type_))


@pattern
def move_reshape_before_linear(
    op: tensor.ExpandShapeOp | tensor.CollapseShapeOp, rewriter: PatternRewriter
) -> SSAValue | None:
    """`reshape(linear(x))` -> `linear(reshape(x))` where only leading dims change and nothing else reads the linear."""
    linear = producer(op.src)
    groups = views.groups_of(op)  # none where a single element loses all its dims
    if not isinstance(linear, qc.LinearOp) or not linear.result.has_one_use() or not groups or len(groups[-1]) != 1:
        return None
    if linear.prologue.blocks or linear.statistics is not None:
        return None
    leading = shape_of(op.result.type)[:-1]
    before = shape_of(linear.result.type)[:-1]
    if any(shape_of(e.type)[:-1] not in (before, (1,) * len(before)) for e in linear.extras):
        return None
    x = build.reshape(rewriter, linear.x, (*leading, shape_of(linear.x.type)[-1]))
    extras: list[SSAValue] = []
    for extra in linear.extras:
        shape = shape_of(extra.type)
        wanted = leading if shape[:-1] == before else (1,) * len(leading)
        extras.append(build.reshape(rewriter, extra, (*wanted, shape[-1])))
    epilogue = linear.detach_region(linear.epilogue)
    moved = qc.LinearOp(x, linear.w, linear.bias, op.result.type, extras, epilogue, pairs=linear.combines_pairs)
    linear.add_region(Region())
    set_path(moved, path_of(linear))
    return rewriter.insert(moved).result


@pattern
def reshape_for_transposed_units(op: ops.TransposeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A transpose that moves dims of size 1 only is a reshape."""
    shape = shape_of(op.inputs[0].type)
    wide = [p for p in views.permutation_of(op) if shape[p] != 1]
    return build.reshape(rewriter, op.inputs[0], shape_of(op.res[0].type)) if wide == sorted(wide) else None


@pattern
def join_slices(op: tensor.ExtractSliceOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A slice of a slice is one."""
    below = producer(op.source)
    if not isinstance(below, tensor.ExtractSliceOp):
        return None
    inner, outer = views.slice_of(below), views.slice_of(op)
    if inner is None or outer is None:
        return None
    offsets, sizes, steps = outer
    starts = [(dim(a) + dim(b) * step).to_dim() for a, b, step in zip(inner[0], offsets, inner[2], strict=True)]
    joined = [a * b for a, b in zip(inner[2], steps, strict=True)]
    return build.extract_slice(rewriter, below.source, starts, sizes, joined)


# --- views inside readers --------------------------------------------------------------------------------------------


@pattern
def fold_into_maps(op: ops.GenericOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Transposes, broadcasts and unit dims of the inputs become indexing maps, in place."""
    inputs = loops.inputs_of(op)
    folded: list[SSAValue] = []
    for place, (value, index) in enumerate(inputs):
        found = views.look_through(value, index)
        if found is not None and loops.keeps_extents(op, [*inputs[:place], found, *inputs[place + 1 :]]):
            inputs[place] = found
            folded.append(value)
    if not folded:
        return None
    loops.set_inputs(op, inputs)
    for view in map(producer, folded):
        if view is not None:
            erase_if_dead(view, rewriter.erase)
    return op.res[0]


@pattern
def fold_into_attention(op: qc.AttentionOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Masks are read at their unit dims, repeated key/value heads once."""
    mask = _unit_mask(rewriter, op.mask) if op.mask is not None else None
    keys, values = _unrepeated(op.k), _unrepeated(op.v)
    k, v = op.k, op.v
    if keys is not None and values is not None and _heads(keys) == _heads(values):
        k, v = factors.arranged(rewriter, *keys), factors.arranged(rewriter, *values)
    if mask is None and k is op.k:
        return None
    return rewriter.insert(op.rebuilt(op.q, k, v, mask if mask is not None else op.mask, op.last, op.sinks)).result


def _unit_mask(builder: Builder, mask: SSAValue) -> SSAValue | None:
    """The source of a broadcast mask, with size 1 where it repeats; else None."""
    inner = producer(mask)
    if not isinstance(inner, ops.BroadcastOp):
        return None
    shape = tuple(1 if n in views.added_dims(inner) else s for n, s in enumerate(shape_of(mask.type)))
    if shape == shape_of(mask.type):  # a scalar with unit dims, which is written as a broadcast
        return None
    return build.reshape(builder, inner.input, shape)


def _heads(unrepeated: tuple[SSAValue, Dims, Dims]) -> Dim:
    return factors.size_of(unrepeated[2][1])


def _unrepeated(value: SSAValue) -> tuple[SSAValue, Dims, Dims] | None:
    """(x, its dims, the dims wanted of it), where the value is x as (B, Hkv, T, D) with each head repeated n times."""
    chain = [value]
    while isinstance(view := producer(chain[-1]), views.Reshape | ops.TransposeOp):
        chain.append(views.source_of(view))
    repeat = producer(chain[-1])
    dims = _dims_of_source(chain) if isinstance(repeat, ops.BroadcastOp) else None
    if dims is None or not isinstance(repeat, ops.BroadcastOp):
        return None
    top, below = dims
    added = [factor for n in views.added_dims(repeat) for factor in below[n]]
    heads, count = top[1], len(top[1]) - len(added)
    if not added or count < 0 or heads[count:] != added:
        return None  # what is repeated is not the fastest part of the heads
    kept = [dim for n, dim in enumerate(below) if n not in views.added_dims(repeat)]
    return repeat.input, kept, [top[0], heads[:count], *top[2:]]


def _dims_of_source(chain: Sequence[SSAValue]) -> tuple[Dims, Dims] | None:
    """The dims of the first value and of the last one in common factors; each is a view of the next one."""
    found = [factors.fresh(shape_of(chain[0].type))]
    for value, source in itertools.pairwise(chain):
        view, shape = producer(value), shape_of(source.type)
        if isinstance(view, ops.TransposeOp):
            permutation = views.permutation_of(view)
            found.append([found[-1][permutation.index(n)] for n in range(len(shape))])
            continue
        below = factors.reshaped((factor for dim in found[-1] for factor in dim), shape)
        if below is None:
            return None
        found.append(below)
    return factors.leaves(found[0]), factors.leaves(found[-1])


@pattern
def split_batch(op: qc.BatchMatmulOp, rewriter: PatternRewriter) -> SSAValue | None:
    """`matmul(collapse(a), b)` over joined batch dims -> `collapse(matmul(a, expand(b)))`, where `a` is strided.

    Heads that a transpose has put in front, or that repeat over the batch, would be copied to become one dim.  Not one
    of `RULES`: attention is recognised before.
    """
    joined = [_joined_batch(value) for value in (op.a, op.b)]
    strided = [each for each in joined if each is not None and _is_strided(producer(each[0]))]
    if not strided or len(shape_of(op.a.type)) != 3:
        return None
    batch = strided[0][1]
    operands: list[SSAValue] = []
    for value, found in zip((op.a, op.b), joined, strict=True):
        rows, cols = shape_of(value.type)[1:]
        if found is None or found[1] != batch:
            operands.append(build.reshape(rewriter, value, (*batch, rows, cols)))
            continue
        source, _, turned = found
        inner = (cols, rows) if turned else (rows, cols)
        split = build.reshape(rewriter, source, (*batch, *inner))
        rank = len(batch)
        operands.append(build.transpose(rewriter, split, [*range(rank), rank + 1, rank]) if turned else split)
    shape = shape_of(op.result.type)
    made = qc.BatchMatmulOp(operands[0], operands[1], tensor_type((*batch, *shape[1:]), tensor_dtype(op.result.type)))
    return build.reshape(rewriter, rewriter.insert(made).result, shape)


def _is_strided(op: Operation | None) -> bool:
    """Whether a view's elements lie in another order than they are counted, or several times."""
    while isinstance(op, views.Reshape):
        op = producer(op.src)
    return isinstance(op, ops.TransposeOp | ops.BroadcastOp)


def _joined_batch(value: SSAValue) -> tuple[SSAValue, tuple[Dim, ...], bool] | None:
    """(source, its batch dims, whether its last two dims are transposed) for a (batch, rows, cols) operand."""
    op, turned = producer(value), False
    if isinstance(op, ops.TransposeOp) and views.permutation_of(op) == (0, 2, 1):
        op, turned = producer(op.inputs[0]), True
    if not isinstance(op, tensor.CollapseShapeOp) or len(shape_of(op.result.type)) != 3:
        return None
    groups, shape = views.groups_of(op), shape_of(op.src.type)
    batch = tuple(shape[n] for n in groups[0] if shape[n] != 1)
    plain = all(sum(shape[n] != 1 for n in group) <= 1 for group in groups[1:])
    return (op.src, batch, turned) if plain and len(batch) > 1 else None


RULES = (
    *JOIN_VIEWS, fold_view_of_fill, move_reshape_before_linear, reshape_for_transposed_units, join_slices,
    fold_into_maps, fold_into_attention,
)  # fmt: skip
