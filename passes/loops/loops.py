"""Reads and edits `linalg.generic`: extents, index maps, and moving one body into another.

A *pointwise* nest has only parallel loops, and one result that each iteration writes once. A *reduction* nest has one
result whose initial value is a `linalg.fill` of a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import AffineMapAttr, ArrayAttr, DenseArrayBase, IndexType, IntegerAttr, TensorType, i32
from xdsl.dialects.linalg import attrs, ops
from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, SSAValue
from xdsl.ir.affine import (
    AffineBinaryOpExpr,
    AffineBinaryOpKind,
    AffineConstantExpr,
    AffineDimExpr,
    AffineExpr,
    AffineMap,
)

from qcompiler.errors import QCompilerError
from qcompiler.ir.effects import erase_dead, erase_if_dead
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.plan.dims import Dim

PARALLEL = attrs.IteratorTypeAttr.parallel()
REDUCTION = attrs.IteratorTypeAttr.reduction()
Index = tuple[AffineExpr, ...]
"""Where an iteration reads an operand: one affine expression of the loop dims for each dim of the operand."""


@functools.cache
def dim_expr(position: int) -> AffineExpr:
    return AffineDimExpr(position)


ZERO: AffineExpr = AffineConstantExpr(0)


@functools.cache
def identity(rank: int) -> Index:
    return tuple(dim_expr(i) for i in range(rank))


def without_units(index: Index, shape: Sequence[Dim]) -> Index:
    """The canonical index: 0 for each dim of size 1, since nothing else can be read there."""
    return tuple(ZERO if size == 1 else e for e, size in zip(index, shape, strict=True)) if 1 in shape else index


def own_index(shape: Sequence[Dim]) -> Index:
    """The canonical index that reads each element of a tensor at its own position."""
    return without_units(identity(len(shape)), shape)


def order_of(index: Index, shape: Sequence[Dim], result: Sequence[Dim]) -> tuple[int, ...] | None:
    """If the canonical index permutes dims: for each dim of `shape`, the dim of `result` it is. Else None.

    Canonical indices do not tell dims of size 1 apart; these keep their order.
    """
    if len(shape) != len(result):
        return None
    seen = [e.position if isinstance(e, AffineDimExpr) else None for e in index]
    units = iter([n for n, size in enumerate(result) if size == 1 and n not in seen])
    order = [next(units, None) if n is None and size == 1 else n for n, size in zip(seen, shape, strict=True)]
    found = tuple(n for n in order if n is not None)
    fits = sorted(found) == list(range(len(shape))) and tuple(shape) == tuple(result[n] for n in found)
    return found if fits else None


@functools.lru_cache(maxsize=4096)
def map_attr(num_dims: int, index: Index) -> AffineMapAttr:
    return AffineMapAttr(AffineMap(num_dims, 0, index))


@functools.lru_cache(maxsize=65536)
def compose(inner: Index, outer: Index) -> Index:
    """`inner` with its dims replaced by the expressions of `outer`."""
    if all(isinstance(e, AffineDimExpr | AffineConstantExpr) for e in inner):
        return tuple(outer[e.position] if isinstance(e, AffineDimExpr) else e for e in inner)
    return tuple(e.replace_dims_and_symbols(list(outer), []) for e in inner)


def inverse_permutation(index: Index) -> Index | None:
    """The inverse of an index that is a permutation of all dims 0…n-1; None for any other."""
    positions: list[AffineExpr | None] = [None] * len(index)
    for place, expr in enumerate(index):
        if not isinstance(expr, AffineDimExpr) or expr.position >= len(index) or positions[expr.position] is not None:
            return None
        positions[expr.position] = dim_expr(place)
    return tuple(e for e in positions if e is not None)


# --- reading ---------------------------------------------------------------------------------------------------------


def inputs_of(op: ops.GenericOp) -> list[tuple[SSAValue, Index]]:
    """The inputs, each with the index it is read at."""
    return [(v, m.data.results) for v, m in zip(op.inputs, op.indexing_maps.data, strict=False)]


def output_index(op: ops.GenericOp) -> Index:
    """The index of the first output."""
    return op.indexing_maps.data[len(op.inputs)].data.results


def num_loops(op: ops.GenericOp) -> int:
    return len(op.iterator_types.data)


def is_parallel(op: ops.GenericOp) -> bool:
    return all(it.data is attrs.IteratorType.PARALLEL for it in op.iterator_types.data)


def is_pointwise(op: Operation | Block) -> bool:
    """A generic with parallel loops, one result written by a permutation, whose body does not read the output."""
    if not isinstance(op, ops.GenericOp) or len(op.res) != 1 or not is_parallel(op):
        return False
    return inverse_permutation(output_index(op)) is not None and not op.body.block.args[-1].uses


def is_reduction(value: SSAValue) -> bool:
    """Whether a tensor is computed by a nest that runs over more dims than it has."""
    op = producer(value)
    return isinstance(op, ops.GenericOp) and not is_parallel(op)


def loop_extents(op: ops.GenericOp) -> tuple[Dim, ...]:
    """The size of every loop, taken from the outputs first, then from inputs indexed by a plain loop dim."""
    extents: list[Dim | None] = [None] * num_loops(op)
    count = len(op.inputs)
    values, maps = list(op.operands), op.indexing_maps.data
    for place in [*range(count, len(values)), *range(count)]:
        type_ = values[place].type
        if not isinstance(type_, TensorType):
            continue
        for expr, size in zip(maps[place].data.results, shape_of(type_), strict=True):
            if isinstance(expr, AffineDimExpr) and extents[expr.position] is None:
                extents[expr.position] = size
    if None in extents:
        raise QCompilerError(f"a linalg.generic at '{path_of(op)}' has a loop without a size: {op}")
    return tuple(e for e in extents if e is not None)


def yielded(op: ops.GenericOp) -> SSAValue:
    """The value that the body yields for the first result."""
    last = op.body.block.last_op
    assert last is not None
    return last.operands[0]


def producer(value: SSAValue) -> Operation | None:
    return value.owner if isinstance(value, OpResult) else None


def constant_of(value: SSAValue) -> Attribute | None:
    """The attribute of the `arith.constant` that makes a scalar; None otherwise."""
    op = producer(value)
    return op.value if isinstance(op, arith.ConstantOp) else None


def cost_of_body(op: ops.GenericOp) -> int:
    """Scalar operations of one iteration, not counting constants and the terminator."""
    return sum(1 for each in op.body.block.ops if not isinstance(each, arith.ConstantOp)) - 1


# --- making ----------------------------------------------------------------------------------------------------------


def insert_before(anchor: Operation, *new: Operation) -> None:
    block = anchor.parent_block()
    assert block is not None
    block.insert_ops_before(new, anchor)


# --- editing ---------------------------------------------------------------------------------------------------------


def set_inputs(op: ops.GenericOp, inputs: Sequence[tuple[SSAValue, Index]]) -> None:
    """Replaces the inputs (the body's arguments must already match); the outputs stay."""
    outputs = list(op.outputs)
    rank = num_loops(op)
    kept = op.indexing_maps.data[len(op.inputs) :]
    op.operands = [*(v for v, _ in inputs), *outputs]
    op.properties["operandSegmentSizes"] = DenseArrayBase.from_list(i32, [len(inputs), len(outputs)])
    op.properties["indexing_maps"] = ArrayAttr([*(map_attr(rank, index) for _, index in inputs), *kept])


def keeps_extents(op: ops.GenericOp, inputs: Sequence[tuple[SSAValue, Index]]) -> bool:
    """Whether every loop still gets its size from an output or from one of `inputs`."""
    count = len(op.inputs)
    indices = [m.data.results for m in op.indexing_maps.data[count:]] + [index for _, index in inputs]
    known = {e.position for index in indices for e in index if isinstance(e, AffineDimExpr)}
    return len(known) == num_loops(op)


def merge_equal_inputs(op: ops.GenericOp) -> None:
    """Reads each (operand, index) pair once, and drops inputs that neither the body nor a loop's size needs."""
    seen: dict[tuple[SSAValue, Index], BlockArgument] = {}
    kept: list[tuple[SSAValue, Index]] = []
    for (value, index), argument in zip(inputs_of(op), list(op.body.block.args), strict=False):
        first = seen.get((value, index))
        if first is not None:
            argument.replace_all_uses_with(first)
            op.body.block.erase_arg(argument)
        else:
            seen[(value, index)] = argument
            kept.append((value, index))
    used: list[tuple[SSAValue, Index]] = []
    rest = list(kept)
    for entry in kept:
        argument = seen[entry]
        rest.remove(entry)
        if argument.uses or not keeps_extents(op, [*used, *rest]):
            used.append(entry)
        else:
            op.body.block.erase_arg(argument)
    if len(used) != len(op.inputs):
        set_inputs(op, used)


def materialise(expr: AffineExpr, before: Operation) -> SSAValue:
    """Writes an index expression as ops of a body, before the op `before`."""
    made: Operation
    if isinstance(expr, AffineDimExpr):
        made = ops.IndexOp(expr.position)
    elif isinstance(expr, AffineConstantExpr):
        made = arith.ConstantOp(IntegerAttr(expr.value, IndexType()))
    elif isinstance(expr, AffineBinaryOpExpr):
        lhs, rhs = materialise(expr.lhs, before), materialise(expr.rhs, before)
        if expr.kind is AffineBinaryOpKind.Add:
            made = arith.AddiOp(lhs, rhs)
        elif expr.kind is AffineBinaryOpKind.Mul:
            made = arith.MuliOp(lhs, rhs)
        else:
            raise QCompilerError(f"index expression {expr} is not affine with constant factors")
    else:
        raise QCompilerError(f"index expression {expr} is not affine with constant factors")
    insert_before(before, made)
    return made.results[0]


def inline_body(
    source: Block, arguments: Sequence[SSAValue], index: Index | None, before: Operation, *, move: bool
) -> SSAValue:
    """Inserts the ops of body `source` before an op of another body. Returns the value that `source` yields.

    `arguments` replace the body's arguments; `linalg.index n` becomes `index[n]`. With `move` the ops leave `source`,
    which is unusable afterwards.
    """
    values: dict[SSAValue, SSAValue] = dict(zip(source.args, arguments, strict=False))
    terminator = source.last_op
    assert terminator is not None
    for op in list(source.ops):
        if op is terminator:
            break
        if isinstance(op, ops.IndexOp) and index is not None:
            values[op.result] = materialise(index[op.dim.value.data], before)
        elif move:
            source.detach_op(op)
            op.operands = [values.get(v, v) for v in op.operands]
            insert_before(before, op)
        else:
            insert_before(before, op.clone(values))
    return values.get(terminator.operands[0], terminator.operands[0])


_STEPS = (math.TruncOp, math.FloorOp, math.CeilOp, math.RoundOp, math.RoundEvenOp, arith.FPToSIOp, arith.FPToUIOp)
"""Ops that jump: 17.98 rounded to bf16 is 18, so `trunc` of the two differs by one."""


def _read_by_steps(block: Block) -> set[Operation]:
    """The ops of a body that some `_STEPS` op depends on."""
    found: set[Operation] = set()
    for op in reversed(list(block.ops)):
        if isinstance(op, _STEPS) or op in found:
            found.update(made for value in op.operands if (made := producer(value)) is not None)
    return found


def delete_rounding_pairs(block: Block) -> int:
    """Replaces `extf(truncf(x))` by `x` where the types agree. This is the only numeric change that fusion makes.
    Returns how many pairs it deleted.

    A pair stays if an op in `_STEPS` depends on it, since that op would turn the difference into a whole step.
    """
    deleted, stepped = 0, _read_by_steps(block)
    for op in list(block.ops):
        if not isinstance(op, arith.ExtFOp) or op in stepped:
            continue
        narrow = producer(op.operands[0])
        if isinstance(narrow, arith.TruncFOp) and narrow.operands[0].type == op.results[0].type:
            op.results[0].replace_all_uses_with(narrow.operands[0])
            erase_if_dead(op)
            deleted += 1
    return deleted


def tidy_body(block: Block) -> None:
    """Makes equal constants and indices one, and erases body ops whose results nothing reads."""
    known: dict[tuple[str, Attribute, Attribute], SSAValue] = {}
    for op in list(block.ops):
        if isinstance(op, arith.ConstantOp):
            key = (op.name, op.value, op.result.type)
        elif isinstance(op, ops.IndexOp):
            key = (op.name, op.dim, op.result.type)
        else:
            continue
        first = known.setdefault(key, op.results[0])
        if first is not op.results[0]:
            op.results[0].replace_all_uses_with(first)
    erase_dead(block)
