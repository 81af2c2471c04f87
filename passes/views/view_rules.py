"""The rules by which views cancel each other and disappear into their readers; see passes/fold_views.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.errors import PassError
from qcompiler.ir import build, qc
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import path_of, set_path
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim, dim, product


def fold_views(worklist: Sequence[Operation]) -> None:
    """Applies every rule to the ops given and to what the rules make, until none applies."""
    stack = list(reversed(worklist))
    budget = 1000 + 50 * len(stack)  # each op folds a few times; more means that two rules undo each other
    while stack:
        op = stack.pop()
        budget -= 1
        if budget < 0:
            raise PassError(f"folding views does not end at {op.name} of '{path_of(op)}'", stage="fold-views")
        if op.parent is None:
            continue
        rule = _RULES.get(type(op))
        if rule is None:
            continue
        replacement = rule(op)
        if replacement is None:
            continue
        made = producer(replacement)
        if replacement is not op.results[0]:
            readers = [use.operation for use in op.results[0].uses]
            op.results[0].replace_all_uses_with(replacement)
            erase_if_dead(op)
            stack += [r for r in readers if r.parent is not None]
        # the ops a rule made, ending in `made`, may fold on
        for each in _chain(made):
            stack.append(each)


def _chain(op: Operation | None) -> list[Operation]:
    """An op and the foldable ops close in front of it, it first: what a rule may have made."""
    found: list[Operation] = []
    level = [op] if op is not None else []
    while level and len(found) < 12:
        level = [each for each in level if type(each) in _RULES]
        found += level
        level = [p for each in level for p in map(producer, each.operands) if isinstance(p, views.VIEWS)]
    return found


def _before(op: Operation) -> Builder:
    return build.with_path(InsertPoint.before(op), path_of(op))


# --- views of views: a rule returns the value that replaces the result, or None ---------------------------------------


def _fold_reshape(op: Operation) -> SSAValue | None:
    assert isinstance(op, views.Reshape)
    inner = producer(op.src)
    shape = shape_of(op.result.type)
    if shape == shape_of(op.src.type):
        return op.src
    if isinstance(inner, views.Reshape):
        needed = views.reshape_ops_needed(shape_of(inner.src.type), shape)
        if needed < 2:
            return build.reshape(_before(op), inner.src, shape)
        return _merge_longer_chain(op, inner, shape)
    if isinstance(inner, qc.LinearOp):
        return _reshape_before_linear(op, inner)
    if isinstance(inner, ops.FillOp) and inner.res[0].has_one_use():
        return build.fill(_before(op), inner.inputs[0], shape, tensor_dtype(op.result.type))
    return None


def _merge_longer_chain(op: Operation, inner: views.Reshape, shape: Sequence[Dim]) -> SSAValue | None:
    """Three reshapes in a row become the two that any reshape needs at most."""
    third = producer(inner.src)
    if not isinstance(third, views.Reshape):
        return None
    return build.reshape(_before(op), third.src, tuple(shape))


def _reshape_before_linear(op: views.Reshape, linear: qc.LinearOp) -> SSAValue | None:
    """`reshape(linear(x))` -> `linear(reshape(x))` where only leading dims change and nothing else reads the linear."""
    groups = views.groups_of(op)  # none where a single element loses all its dims
    if not linear.result.has_one_use() or not groups or len(groups[-1]) != 1:
        return None
    leading = shape_of(op.result.type)[:-1]
    before = shape_of(linear.result.type)[:-1]
    if any(shape_of(e.type)[:-1] not in (before, (1,) * len(before)) for e in linear.extras):
        return None
    builder = _before(op)
    x = build.reshape(builder, linear.x, (*leading, shape_of(linear.x.type)[-1]))
    extras: list[SSAValue] = []
    for extra in linear.extras:
        shape = shape_of(extra.type)
        wanted = leading if shape[:-1] == before else (1,) * len(leading)
        extras.append(build.reshape(builder, extra, (*wanted, shape[-1])))
    epilogue = linear.detach_region(linear.epilogue)
    moved = qc.LinearOp(x, linear.w, linear.bias, op.result.type, extras, epilogue)
    linear.add_region(Region())
    set_path(moved, path_of(linear))
    loops.insert_before(op, moved)
    return moved.result


def _fold_transpose(op: Operation) -> SSAValue | None:
    assert isinstance(op, ops.TransposeOp)
    permutation = views.permutation_of(op)
    if permutation == tuple(range(len(permutation))):
        return op.inputs[0]
    inner = producer(op.inputs[0])
    if isinstance(inner, ops.TransposeOp):
        first = views.permutation_of(inner)
        return build.transpose(_before(op), inner.inputs[0], [first[p] for p in permutation])
    shape = shape_of(op.inputs[0].type)
    wide = [p for p in permutation if shape[p] != 1]
    if wide == sorted(wide):  # only unit dims move
        return build.reshape(_before(op), op.inputs[0], shape_of(op.res[0].type))
    return None


def _fold_slice(op: Operation) -> SSAValue | None:
    assert isinstance(op, tensor.ExtractSliceOp)
    outer = views.slice_of(op)
    if outer is None:
        return None
    offsets, sizes, steps = outer
    if sizes == shape_of(op.source.type) and all(o == 0 for o in offsets) and all(s == 1 for s in steps):
        return op.source
    inner_op = producer(op.source)
    if not isinstance(inner_op, tensor.ExtractSliceOp):
        return None
    inner = views.slice_of(inner_op)
    if inner is None:
        return None
    starts = [(dim(a) + dim(b) * step).to_dim() for a, b, step in zip(inner[0], offsets, inner[2], strict=True)]
    joined = [a * b for a, b in zip(inner[2], steps, strict=True)]
    return build.extract_slice(_before(op), inner_op.source, starts, sizes, joined)


def _fold_broadcast(op: Operation) -> SSAValue | None:
    assert isinstance(op, ops.BroadcastOp)
    inner = producer(op.input)
    shape = shape_of(op.result[0].type)
    if isinstance(inner, ops.FillOp) and inner.res[0].has_one_use():
        return build.fill(_before(op), inner.inputs[0], shape, tensor_dtype(op.result[0].type))
    if not isinstance(inner, ops.BroadcastOp):
        return None
    kept = [n for n in range(len(shape)) if n not in views.added_dims(op)]
    axes = [kept[n] for n in range(len(kept)) if n not in views.added_dims(inner)]
    return build.broadcast_in(_before(op), inner.input, shape, axes)


# --- views inside readers --------------------------------------------------------------------------------------------


def _fold_into_maps(op: Operation) -> SSAValue | None:
    """Transposes, broadcasts and unit dims of the inputs become indexing maps, in place."""
    assert isinstance(op, ops.GenericOp)
    inputs = loops.inputs_of(op)
    changed = False
    for place, (value, index) in enumerate(inputs):
        found = views.look_through(value, index)
        if found is None or not loops.keeps_extents(op, [*inputs[:place], found, *inputs[place + 1 :]]):
            continue
        inputs[place] = found
        changed = True
        loops.set_inputs(op, inputs)
        view = producer(value)
        assert view is not None
        erase_if_dead(view)
    return op.res[0] if changed else None


def _fold_into_attention(op: Operation) -> SSAValue | None:
    """Masks are read at their unit dims, repeated key/value heads once."""
    assert isinstance(op, qc.AttentionOp)
    builder = _before(op)
    mask = _unit_mask(builder, op.mask) if op.mask is not None else None
    k, v = _unrepeated(builder, op.k), _unrepeated(builder, op.v)
    if k is None or v is None or shape_of(k.type)[1] != shape_of(v.type)[1]:
        k, v = op.k, op.v
    if mask is None and k is op.k:
        return None
    new_mask = mask if mask is not None else op.mask
    made = op.rebuilt(op.q, k, v, new_mask, op.last)
    set_path(made, path_of(op))
    loops.insert_before(op, made)
    return made.result


def _unit_mask(builder: Builder, mask: SSAValue) -> SSAValue | None:
    """The source of a broadcast mask with unit dims where it repeats, or None."""
    inner = producer(mask)
    if not isinstance(inner, ops.BroadcastOp):
        return None
    shape = tuple(1 if n in views.added_dims(inner) else s for n, s in enumerate(shape_of(mask.type)))
    if shape == shape_of(mask.type):  # a scalar seen as unit dims, which is spelt as a broadcast
        return None
    return build.reshape(builder, inner.input, shape)


def _unrepeated(builder: Builder, value: SSAValue) -> SSAValue | None:
    """`x (B, Hkv, T, D)` where value is x with each head repeated n times, wherever sizes of 1 stand between."""
    batch, heads, keys, depth = shape_of(value.type)
    repeat = producer(views.unreshaped(value))
    if not isinstance(repeat, ops.BroadcastOp):
        return None
    shape = shape_of(repeat.result[0].type)
    added = [n for n in views.added_dims(repeat) if shape[n] != 1]
    if len(added) != 1 or not isinstance(heads, int) or not isinstance(times := shape[added[0]], int) or heads % times:
        return None
    before, behind = product(shape[: added[0]]), product(shape[added[0] + 1 :])
    if before * dim(times) != product((batch, heads)) or behind != product((keys, depth)):
        return None
    return build.reshape(builder, repeat.input, (batch, heads // times, keys, depth))


def split_batch(op: qc.BatchMatmulOp) -> SSAValue | None:
    """`matmul(collapse(a), b)` over joined batch dims -> `collapse(matmul(a, expand(b)))`, where `a` is strided.

    Heads that a transpose has put in front, or that repeat over the batch, would be copied to become one dim.  Not one
    of the rules of `fold_views`: attention is recognised before.
    """
    joined = [_joined_batch(value) for value in (op.a, op.b)]
    strided = [each for each in joined if each is not None and _is_strided(producer(each[0]))]
    if not strided or len(shape_of(op.a.type)) != 3:
        return None
    batch = strided[0][1]
    builder = _before(op)
    operands: list[SSAValue] = []
    for value, found in zip((op.a, op.b), joined, strict=True):
        rows, cols = shape_of(value.type)[1:]
        if found is None or found[1] != batch:
            operands.append(build.reshape(builder, value, (*batch, rows, cols)))
            continue
        source, _, turned = found
        inner = (cols, rows) if turned else (rows, cols)
        split = build.reshape(builder, source, (*batch, *inner))
        rank = len(batch)
        operands.append(build.transpose(builder, split, [*range(rank), rank + 1, rank]) if turned else split)
    shape = shape_of(op.result.type)
    made = qc.BatchMatmulOp(operands[0], operands[1], tensor_type((*batch, *shape[1:]), tensor_dtype(op.result.type)))
    set_path(made, path_of(op))
    loops.insert_before(op, made)
    return build.reshape(builder, made.result, shape)


def _is_strided(op: Operation | None) -> bool:
    """Whether a view's elements lie in another order than they are counted, or several times."""
    while isinstance(op, views.Reshape):
        op = producer(op.src)
    return isinstance(op, ops.TransposeOp | ops.BroadcastOp)


def _joined_batch(value: SSAValue) -> tuple[SSAValue, tuple[Dim, ...], bool] | None:
    """(source, its batch dims, whether the two last dims are transposed after) of a (batch, rows, cols) operand."""
    op, turned = producer(value), False
    if isinstance(op, ops.TransposeOp) and views.permutation_of(op) == (0, 2, 1):
        op, turned = producer(op.inputs[0]), True
    if not isinstance(op, tensor.CollapseShapeOp) or len(shape_of(op.result.type)) != 3:
        return None
    groups, shape = views.groups_of(op), shape_of(op.src.type)
    batch = tuple(shape[n] for n in groups[0] if shape[n] != 1)
    plain = all(sum(shape[n] != 1 for n in group) <= 1 for group in groups[1:])
    return (op.src, batch, turned) if plain and len(batch) > 1 else None


_RULES: dict[type[Operation], Callable[[Operation], SSAValue | None]] = {
    tensor.ExpandShapeOp: _fold_reshape,
    tensor.CollapseShapeOp: _fold_reshape,
    ops.TransposeOp: _fold_transpose,
    ops.BroadcastOp: _fold_broadcast,
    tensor.ExtractSliceOp: _fold_slice,
    ops.GenericOp: _fold_into_maps,
    qc.AttentionOp: _fold_into_attention,
}
