"""The meaning of `linalg` on tensors and of the `tensor` view ops.

A `linalg.generic` is evaluated on whole arrays. Each operand becomes a strided view of the iteration space, and the
body runs once. A reduction whose body is a plain accumulation is one `ufunc.reduce`. Any other reducing body runs once
per reduction index, still vectorised over the parallel loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, I64, DenseArrayBase, TensorType
from xdsl.dialects.linalg.abstract_ops import LinalgStructuredOperation
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import BroadcastOp, FillOp, IndexOp, ReduceOp, TransposeOp, YieldOp
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.ir.affine import (
    AffineBinaryOpExpr,
    AffineBinaryOpKind,
    AffineConstantExpr,
    AffineDimExpr,
    AffineExpr,
    AffineMap,
)

from qcompiler.errors import InterpreterError
from qcompiler.ir.interpreter_base import Array, Frame, rule, where
from qcompiler.ir.interpreter_scalar import evaluate_scalar, numpy_dtype
from qcompiler.ir.qc import YieldOp as QCYieldOp

# --- scalar bodies on whole arrays -----------------------------------------------------------------------------------


Values = Mapping[SSAValue, Array]
NOTHING: Values = MappingProxyType({})


def evaluate_body(
    block: Block, arguments: Sequence[Array], indices: Sequence[Array] = (), captured: Values = NOTHING
) -> list[Array]:
    """Runs a scalar body on arrays that broadcast together; `indices` are the values of `linalg.index`. `captured` are
    the whole tensors outside of the body that it reads by `tensor.extract`."""
    values: dict[SSAValue, Array] = {**captured, **dict(zip(block.args, arguments, strict=True))}
    for op in block.ops:
        if isinstance(op, YieldOp | QCYieldOp):
            return [values[v] for v in op.operands]
        values[op.results[0]] = _scalar_value(op, values, indices)
    raise InterpreterError(f"the body of {block.parent_op()} has no terminator")


def _scalar_value(op: Operation, values: dict[SSAValue, Array], indices: Sequence[Array]) -> Array:
    if isinstance(op, IndexOp):
        return indices[op.dim.value.data]
    missing = [v for v in op.operands if v not in values]
    if missing:
        raise InterpreterError(f"{where(op)} uses a value from outside of its body")
    if isinstance(op, tensor.ExtractOp):
        return np.asarray(values[op.tensor][tuple(values[i] for i in op.indices)])
    result = evaluate_scalar(op, tuple(values[v] for v in op.operands))
    if result is None:
        raise InterpreterError(f"{where(op)} has no meaning inside a scalar body")
    return result


# --- operands as views of the iteration space ------------------------------------------------------------------------


def _linear_form(expr: AffineExpr, rank: int) -> tuple[int, list[int]] | None:
    """(constant, coefficient of each loop), or None if the expression divides."""
    match expr:
        case AffineConstantExpr(value=value):
            return value, [0] * rank
        case AffineDimExpr(position=position):
            return 0, [int(i == position) for i in range(rank)]
        case AffineBinaryOpExpr(kind=AffineBinaryOpKind.Add, lhs=lhs, rhs=rhs):
            left, right = _linear_form(lhs, rank), _linear_form(rhs, rank)
            if left is None or right is None:
                return None
            return left[0] + right[0], [a + b for a, b in zip(left[1], right[1], strict=True)]
        case AffineBinaryOpExpr(kind=AffineBinaryOpKind.Mul, lhs=lhs, rhs=rhs):
            left, right = _linear_form(lhs, rank), _linear_form(rhs, rank)
            if left is None or right is None or any(right[1]):
                return None
            return left[0] * right[0], [a * right[0] for a in left[1]]
        case _:
            return None


def _view(array: Array, map_: AffineMap, extents: Sequence[int]) -> Array:
    """The operand over the iteration space: one axis per loop, of size 1 if the operand does not move along it."""
    forms = [_linear_form(expr, len(extents)) for expr in map_.results]
    if any(form is None for form in forms):
        return _gathered(array, map_, extents)
    offset, strides, used = 0, [0] * len(extents), [False] * len(extents)
    for axis, (constant, coefficients) in enumerate(form for form in forms if form is not None):
        low = constant + sum(min(0, c * (n - 1)) for c, n in zip(coefficients, extents, strict=True))
        high = constant + sum(max(0, c * (n - 1)) for c, n in zip(coefficients, extents, strict=True))
        if 0 not in extents and not 0 <= low <= high < array.shape[axis]:
            size = array.shape[axis]
            raise InterpreterError(f"indexing map {map_} reads [{low}, {high}] of axis {axis}, which has size {size}")
        offset += constant * array.strides[axis]
        for loop, coefficient in enumerate(coefficients):
            strides[loop] += coefficient * array.strides[axis]
            used[loop] = used[loop] or coefficient != 0
    shape = tuple(n if u else 1 for n, u in zip(extents, used, strict=True))
    if 0 in shape or array.size == 0:
        return np.empty(shape, array.dtype)
    base = array[tuple(slice(form[0], None) if form else slice(None) for form in forms)] if offset else array
    return np.lib.stride_tricks.as_strided(base, shape, strides, writeable=False)


def _loop_indices(extents: Sequence[int]) -> list[Array]:
    """The value of each loop index, broadcastable over the iteration space."""
    rank = len(extents)
    return [np.arange(n).reshape([n if i == axis else 1 for i in range(rank)]) for axis, n in enumerate(extents)]


def _gathered(array: Array, map_: AffineMap, extents: Sequence[int]) -> Array:
    """Operands whose maps divide (`d0 floordiv 2`), indexed element by element."""
    loops = _loop_indices(extents)
    index = tuple(_index_value(expr, loops) for expr in map_.results)
    used = [any(loop in expr.used_dims() for expr in map_.results) for loop in range(len(extents))]
    shape = tuple(n if u else 1 for n, u in zip(extents, used, strict=True))
    picked: Array = array[tuple(np.broadcast_to(i, shape) for i in index)]
    return picked


def _index_value(expr: AffineExpr, loops: Sequence[Array]) -> Array:
    match expr:
        case AffineConstantExpr(value=value):
            return np.asarray(value)
        case AffineDimExpr(position=position):
            return loops[position]
        case AffineBinaryOpExpr(kind=kind, lhs=lhs, rhs=rhs):
            a, b = _index_value(lhs, loops), _index_value(rhs, loops)
            match kind:
                case AffineBinaryOpKind.Add:
                    return np.asarray(a + b)
                case AffineBinaryOpKind.Mul:
                    return np.asarray(a * b)
                case AffineBinaryOpKind.FloorDiv:
                    return np.asarray(a // b)
                case AffineBinaryOpKind.CeilDiv:
                    return np.asarray(-(-a // b))
                case AffineBinaryOpKind.Mod:
                    return np.asarray(a % b)
        case _:
            raise InterpreterError(f"the affine expression {expr} has no meaning here")


def loop_extents(maps: Sequence[AffineMap], shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The size of each loop, from operand dims that a single loop indexes. InterpreterError if they disagree."""
    extents: dict[int, int] = {}
    for map_, shape in zip(maps, shapes, strict=True):
        for expr, size in zip(map_.results, shape, strict=True):
            if isinstance(expr, AffineDimExpr) and extents.setdefault(expr.position, size) != size:
                raise InterpreterError(f"loop d{expr.position} has sizes {extents[expr.position]} and {size}")
    missing = [i for i in range(maps[0].num_dims) if i not in extents]
    if missing:
        raise InterpreterError(f"no operand gives the size of loop d{missing[0]}")
    return tuple(extents[i] for i in range(maps[0].num_dims))


# --- linalg.generic and every structured op with a body --------------------------------------------------------------

_ACCUMULATE: dict[str, np.ufunc] = {
    "arith.addf": np.add, "arith.mulf": np.multiply, "arith.maximumf": np.maximum, "arith.minimumf": np.minimum,
    "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin, "arith.addi": np.add, "arith.muli": np.multiply,
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum, "arith.ori": np.bitwise_or, "arith.andi": np.bitwise_and,
}  # fmt: skip


def _captured(block: Block, frame: Frame) -> Values:
    """The values of the function that a body reads."""
    return {value: frame.values[value] for op in block.ops for value in op.operands if value in frame.values}


def evaluate_structured(op: LinalgStructuredOperation, operands: Sequence[Array], frame: Frame) -> list[Array]:
    """Any linalg op with indexing maps, iterator types and a scalar body."""
    maps = [attribute.data for attribute in op.get_indexing_maps()]
    reducing = [i for i, kind in enumerate(op.get_iterator_types()) if kind.data is IteratorType.REDUCTION]
    extents = loop_extents(maps, (x.shape for x in operands)) if maps and maps[0].num_dims else ()
    count = len(op.inputs)
    views = [_view(x, m, extents) for x, m in zip(operands[:count], maps[:count], strict=True)]
    starts = [_view(x, m, extents) for x, m in zip(operands[count:], maps[count:], strict=True)]
    block = op.body.block
    captured = _captured(block, frame)
    if not reducing:
        yielded = evaluate_body(block, [*views, *starts], _loop_indices(extents), captured)
        return [_placed(v, m, extents) for v, m in zip(yielded, maps[count:], strict=True)]
    accumulated = _accumulate(block, views, starts, extents, reducing, captured)
    if accumulated is None:
        accumulated = _reduce_by_steps(block, views, starts, extents, reducing, captured)
    parallel = [1 if i in reducing else n for i, n in enumerate(extents)]
    return [_placed(v, m, parallel) for v, m in zip(accumulated, maps[count:], strict=True)]


def _placed(value: Array, map_: AffineMap, extents: Sequence[int]) -> Array:
    """A value over the parallel loops as an output tensor. The output map permutes the parallel loops."""
    full = np.broadcast_to(value, tuple(extents))
    positions = [expr.position for expr in map_.results if isinstance(expr, AffineDimExpr)]
    if len(positions) != len(map_.results) or len(set(positions)) != len(positions):
        raise InterpreterError(f"the output map {map_} is not a permutation of loops")
    dropped = [i for i in range(len(extents)) if i not in positions]
    if any(extents[i] != 1 for i in dropped):
        raise InterpreterError(f"the output map {map_} drops a parallel loop")
    return np.asarray(full.transpose([*positions, *dropped]).reshape([extents[i] for i in positions]), order="C")


def _accumulate(
    block: Block,
    views: Sequence[Array],
    starts: Sequence[Array],
    extents: Sequence[int],
    reducing: Sequence[int],
    captured: Values = NOTHING,
) -> list[Array] | None:
    """All outputs, computed by `ufunc.reduce`; None if the body is not a set of independent plain accumulations."""
    arguments = block.args[len(views) :]
    last = block.last_op
    if last is None or len(last.operands) != len(arguments):
        return None
    found: list[tuple[np.ufunc, SSAValue]] = []
    for value, accumulator in zip(last.operands, arguments, strict=True):
        added = _plain_accumulation(value, accumulator)
        if added is None:
            return None
        found.append(added)
    values: dict[SSAValue, Array] = {**captured, **dict(zip(block.args, [*views, *starts], strict=True))}
    indices = _loop_indices(extents)
    final = {v.owner for v in last.operands}
    for op in block.ops:
        if op is not last and op not in final:
            values[op.results[0]] = _scalar_value(op, values, indices)
    results: list[Array] = []
    for (ufunc, value), start in zip(found, starts, strict=True):
        terms = np.broadcast_to(values[value], tuple(extents))
        if terms.dtype == np.bool_ and ufunc not in (np.bitwise_or, np.bitwise_and):
            return None  # i1 arithmetic is modulo two, unlike NumPy's
        reduced = (
            ufunc.reduce(terms, axis=tuple(reducing), dtype=terms.dtype, keepdims=True, initial=None)
            if terms.size
            else None
        )
        results.append(start if reduced is None else ufunc(start, reduced))
    return results


def _plain_accumulation(value: SSAValue, accumulator: BlockArgument) -> tuple[np.ufunc, SSAValue] | None:
    """(ufunc, term) if `value` is `ufunc(accumulator, term)` and the accumulator has no other use."""
    op = value.owner
    if not isinstance(op, Operation) or op.name not in _ACCUMULATE or len(list(accumulator.uses)) != 1:
        return None
    if accumulator not in op.operands or len(list(value.uses)) != 1:
        return None
    term = op.operands[1] if op.operands[0] is accumulator else op.operands[0]
    return (_ACCUMULATE[op.name], term) if term is not accumulator else None


def _reduce_by_steps(
    block: Block,
    views: Sequence[Array],
    starts: Sequence[Array],
    extents: Sequence[int],
    reducing: Sequence[int],
    captured: Values = NOTHING,
) -> list[Array]:
    """Runs the body once per reduction index, in row-major order."""
    parallel = tuple(1 if i in reducing else n for i, n in enumerate(extents))
    current = [np.broadcast_to(start, parallel) for start in starts]
    loops = _loop_indices(extents)
    for step in itertools.product(*(range(extents[i]) for i in reducing)):
        at = dict(zip(reducing, step, strict=True))

        def here(array: Array, at: dict[int, int] = at) -> Array:
            pick = tuple(
                slice(at[i], at[i] + 1) if i in at and array.shape[i] > 1 else slice(None) for i in range(array.ndim)
            )
            return array[pick]

        current = evaluate_body(block, [*map(here, views), *current], [here(i) for i in loops], captured)
    return [np.broadcast_to(value, parallel) for value in current]


@rule(FillOp)
def _fill(op: FillOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [np.broadcast_to(operands[0].astype(operands[1].dtype), operands[1].shape)]


@rule(TransposeOp)
def _transpose(op: TransposeOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [operands[0].transpose(op.permutation.get_values())]


@rule(BroadcastOp)
def _broadcast(op: BroadcastOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [np.broadcast_to(np.expand_dims(operands[0], tuple(op.dimensions.get_values())), operands[1].shape)]


@rule(ReduceOp)
def _reduce(op: ReduceOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    source, start = operands
    axes = [int(axis) for axis in op.dimensions.get_values()]
    wide = np.expand_dims(start, tuple(axes))
    results = _accumulate(op.region.block, [source], [wide], source.shape, axes)
    if results is None:
        results = _reduce_by_steps(op.region.block, [source], [wide], source.shape, axes)
    return [result.reshape(start.shape) for result in results]


# --- tensor ops ------------------------------------------------------------------------------------------------------

_POISON: dict[str, Any] = {"f": np.nan, "V": np.nan, "i": -0x55, "u": 0x55, "b": True}


@rule(tensor.EmptyOp)
def _empty(op: tensor.EmptyOp, _operands: Sequence[Array], frame: Frame) -> list[Array]:
    dtype = numpy_dtype(op.tensor.type)
    # a poison value that is visible in the result if it is read
    return [np.broadcast_to(np.asarray(_POISON[dtype.kind]).astype(dtype), frame.shape(op.tensor.type))]


@rule(tensor.CollapseShapeOp, tensor.ExpandShapeOp)
def _reshape(op: tensor.CollapseShapeOp | tensor.ExpandShapeOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    return [operands[0].reshape(frame.shape(op.result.type))]


@rule(tensor.CastOp)
def _cast(op: tensor.CastOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [operands[0]]


def _index_list(static: DenseArrayBase[I64], dynamic: Iterable[Array]) -> list[int]:
    """A mixed list of static integers and index operands."""
    values = iter(dynamic)
    return [int(next(values)) if entry == DYNAMIC_INDEX else int(entry) for entry in static.get_values()]


def _slices(op: tensor.ExtractSliceOp | tensor.InsertSliceOp, operands: Sequence[Array]) -> tuple[slice, ...]:
    given = iter(operands)
    offsets = _index_list(op.static_offsets, [next(given) for _ in op.offsets])
    sizes = _index_list(op.static_sizes, [next(given) for _ in op.sizes])
    strides = _index_list(op.static_strides, [next(given) for _ in op.strides])
    return tuple(slice(o, o + n * s if n else o, s) for o, n, s in zip(offsets, sizes, strides, strict=True))


@rule(tensor.ExtractSliceOp)
def _extract_slice(op: tensor.ExtractSliceOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    return [operands[0][_slices(op, operands[1:])].reshape(frame.shape(op.result.type))]


@rule(tensor.InsertSliceOp)
def _insert_slice(op: tensor.InsertSliceOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    result = np.array(operands[1])
    target = result[_slices(op, operands[2:])]
    target[...] = operands[0].reshape(target.shape)
    return [result]


@rule(tensor.ConcatOp)
def _concat(op: tensor.ConcatOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [np.concatenate(operands, axis=op.dim.value.data)]


@rule(tensor.PadOp)
def _pad(op: tensor.PadOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    given = iter(operands[1:])
    low = _index_list(op.static_low, [next(given) for _ in op.low])
    high = _index_list(op.static_high, [next(given) for _ in op.high])
    block = op.region.block
    last = block.last_op
    assert last is not None
    value = last.operands[0].owner
    if not isinstance(value, arith.ConstantOp):
        raise InterpreterError(f"{where(op)}: only constant padding has a meaning here")
    fill = evaluate_scalar(value, ())
    assert fill is not None
    width = list(zip(low, high, strict=True))
    result = np.full([n + a + b for n, (a, b) in zip(operands[0].shape, width, strict=True)], fill, operands[0].dtype)
    result[tuple(slice(a, a + n) for n, (a, _) in zip(operands[0].shape, width, strict=True))] = operands[0]
    return [result]


@rule(tensor.DimOp)
def _dim(op: tensor.DimOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [np.asarray(operands[0].shape[int(operands[1])], np.int64)]


@rule(tensor.ExtractOp)
def _extract(op: tensor.ExtractOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [np.asarray(operands[0][tuple(int(i) for i in operands[1:])])]


@rule(tensor.SplatOp)
def _splat(op: tensor.SplatOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    return [np.broadcast_to(operands[0], frame.shape(op.result.type))]


@rule(tensor.FromElementsOp)
def _from_elements(op: tensor.FromElementsOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    assert isinstance(op.result.type, TensorType)
    return [np.array(operands).reshape(frame.shape(op.result.type))]
