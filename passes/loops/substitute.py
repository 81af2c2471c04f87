"""Gives values to symbols inside a function or a list of ops. Types, sizes and `qc.dim`s follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects import arith, func, tensor
from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, IndexType, IntegerAttr, StringAttr, TensorType, i32, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.rewriter import Rewriter

from qcompiler.ir import qc
from qcompiler.ir.effects import is_dead
from qcompiler.ir.module import ranges_of, set_ranges, update_function_type
from qcompiler.ir.types import DYNAMIC, DimsAttr, dtype_of, shape_of
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.plan.dims import dim


def substitute_symbols(function: func.FuncOp, values: Mapping[str, int]) -> None:
    """Replaces symbols by integers throughout a function, in place, and removes them from its `qc.ranges`."""
    if not values:
        return
    set_ranges(function, {name: bounds for name, bounds in ranges_of(function).items() if name not in values})
    _retype_arguments(function.body.block, values)
    substitute_in_ops(function.body.block.ops, values)
    for op in list(function.body.block.ops):  # sizes that stand in the ops' own lists now
        if isinstance(op, arith.ConstantOp) and isinstance(op.result.type, IndexType) and is_dead(op):
            function.body.block.erase_op(op)
    update_function_type(function)


def substitute_in_ops(ops: Iterable[Operation], values: Mapping[str, int]) -> None:
    """The same for ops of one block. They must not use retyped values from outside the block."""
    for op in list(ops):
        for result in op.results:
            _retype(result, values)
        for region in op.regions:
            for block in region.blocks:
                _retype_arguments(block, values)
                substitute_in_ops(block.ops, values)
        if isinstance(op, qc.DimOp):
            _evaluate_dim(op, values)
        elif isinstance(op, qc.TorchCallOp):
            sizes = (StringAttr(str(dim(size).substitute(values))) for size in op.size_dims)
            op.properties["sizes"] = ArrayAttr(sizes)
        else:
            _make_sizes_static(op)


def _retype_arguments(block: Block, values: Mapping[str, int]) -> None:
    for argument in block.args:
        _retype(argument, values)


def _retype(value: SSAValue, values: Mapping[str, int]) -> None:
    type_ = value.type
    if isinstance(type_, TensorType) and isinstance(type_.encoding, DimsAttr):
        new = [dim(d).substitute(values) for d in shape_of(type_)]
        Rewriter.replace_value_with_new_type(value, tensor_type(new, dtype_of(type_.element_type)))


def _evaluate_dim(op: qc.DimOp, values: Mapping[str, int]) -> None:
    """Replaces `qc.dim "s - 1"` by an index constant if s is known, also in dynamic size lists."""
    expr = dim(op.expr.data).substitute(values)
    if not expr.is_static:
        op.properties["expr"] = StringAttr(str(expr))
        return
    constant = arith.ConstantOp(IntegerAttr(expr.value, IndexType()))
    block = op.parent_block()
    assert block is not None
    block.insert_op_before(constant, op)
    op.result.replace_all_uses_with(constant.result)
    block.erase_op(op)


# --- ops that hold sizes in addition to their types ------------------------------------------------------------------


def _static_index(value: SSAValue) -> int | None:
    op = value.owner
    if isinstance(op, arith.ConstantOp) and isinstance(op.value, IntegerAttr):
        return op.value.value.data
    return None


def _settle(static: Sequence[int], dynamic: Sequence[SSAValue]) -> tuple[list[int], list[SSAValue]]:
    """Moves operands that have become constants from the dynamic list to the static one."""
    rest = iter(dynamic)
    sizes: list[int] = []
    kept: list[SSAValue] = []
    for each in static:
        if each != DYNAMIC:
            sizes.append(each)
            continue
        value = next(rest)
        known = _static_index(value)
        sizes.append(DYNAMIC if known is None else known)
        if known is None:
            kept.append(value)
    return sizes, kept


def _ints(attribute: Attribute) -> list[int]:
    assert isinstance(attribute, DenseArrayBase)
    return [int(v) for v in attribute.get_values()]


def _make_sizes_static(op: Operation) -> None:
    if isinstance(op, tensor.EmptyOp):
        kept = [v for v in op.dynamic_sizes if _static_index(v) is None]
        if len(kept) != len(op.dynamic_sizes):
            op.operands = kept
    elif isinstance(op, tensor.ExpandShapeOp):
        sizes, kept = _settle(_ints(op.static_output_shape), op.dynamic_output_shape)
        op.properties["static_output_shape"] = DenseArrayBase.from_list(i64, sizes)
        op.operands = [op.src, *kept]
    elif isinstance(op, tensor.ExtractSliceOp | tensor.InsertSliceOp):
        _settle_slice(op)
    elif isinstance(op, tensor.PadOp):
        low, low_kept = _settle(_ints(op.static_low), op.low)
        high, high_kept = _settle(_ints(op.static_high), op.high)
        op.properties["static_low"] = DenseArrayBase.from_list(i64, low)
        op.properties["static_high"] = DenseArrayBase.from_list(i64, high)
        op.properties["operandSegmentSizes"] = DenseArrayBase.from_list(i32, [1, len(low_kept), len(high_kept)])
        op.operands = [op.source, *low_kept, *high_kept]


def _settle_slice(op: tensor.ExtractSliceOp | tensor.InsertSliceOp) -> None:
    leading = [op.source] if isinstance(op, tensor.ExtractSliceOp) else [op.source, op.dest]
    operands: list[SSAValue] = list(leading)
    segments = [1] * len(leading)
    lists = {"offsets": list(op.offsets), "sizes": list(op.sizes), "strides": list(op.strides)}
    for name, dynamic in lists.items():
        static, kept = _settle(_ints(op.properties[f"static_{name}"]), dynamic)
        op.properties[f"static_{name}"] = DenseArrayBase.from_list(i64, static)
        operands += kept
        segments.append(len(kept))
    op.properties["operandSegmentSizes"] = DenseArrayBase.from_list(i32, segments)
    op.operands = operands
