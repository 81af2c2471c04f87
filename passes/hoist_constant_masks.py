"""hoist-constant-masks: moves computation that depends on no input to `@init`, which runs once at load.

    %m = linalg.generic {                                 func.func @init() -> (tensor<512x512xi1>)
      linalg.index; arith.cmpi } : tensor<?x?xi1>    ->   %t = qc.const @init.0 : tensor<512x512xi1>
    qc.attention … mask %m                                %m = tensor.extract_slice %t[0, 0] [%s, %s] [1, 1]
                                                          qc.attention … mask %m

Masks, rope tables and position grids of symbolic size are built at the symbols' maximum and read through a view. Dims
along which they repeat have size 1. A value whose elements would differ at a smaller size (a reversed range) stays and
is reported. An iota that a loop nest can compute itself stays for fuse-elementwise.

The pass also removes masks without effect: an attention mask that keeps everything, and `causal` for one token that
sees one key. A comparison with the same outcome at all sizes of the entry point becomes a constant. For example,
`max(iota(s)) + 1 > 128` is false for s <= 128, so a value selected by it no longer depends on a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import func, tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, Use
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_dead
from qcompiler.ir.module import (
    entry_funcs,
    path_of,
    ranges_of,
    set_path,
)
from qcompiler.ir.scalar_ops import ARITH_OPS
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.canonicalize import canonicalize_block
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.hoisting.cones import FREE, Built, ConeBuilder, input_independent
from qcompiler.passes.hoisting.init_function import InitBuilder, cone_text
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.fusion import is_trivial
from qcompiler.passes.masks import masks
from qcompiler.passes.masks.value_ranges import ValueRanges, decide
from qcompiler.passes.views.view_rules import fold_views
from qcompiler.passes.views.views import VIEWS, readers
from qcompiler.plan.kernel import ITEMSIZE

MAX_TABLE_BYTES = 1 << 28  # a boolean mask of 16384 x 16384; computing a larger one is cheaper than keeping it


@dataclass(frozen=True)
class HoistConstantMasksPass(ModulePass):
    """Moves computation that depends on no input to `@init`."""

    name = "hoist-constant-masks"
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # a matmul inside a rope table may run at a different size

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in entry_funcs(op):
            masks.remove_useless_masks(function, context)
        init = InitBuilder.of(op)
        for function in entry_funcs(op):
            _decide_comparisons(function, context)
            _hoist_from(function, init, context)
        init.finish()


def _decide_comparisons(function: func.FuncOp, context: QCContext) -> None:
    """Replaces booleans in loop nests by constants if they are the same at every size of the entry point."""
    ranges = ValueRanges(ranges_of(function))
    decided = [op for op in function.body.block.ops if isinstance(op, ops.GenericOp) and decide(op, ranges)]
    for op in decided:
        what = "a comparison of sizes is decided before the call"
        context.report.add(HoistConstantMasksPass.name, path_of(op), what, "the sizes' ranges allow one outcome only")
    if decided:
        canonicalize_block(function.body.block)


def _hoist_from(function: func.FuncOp, init: InitBuilder, context: QCContext) -> None:
    independent = input_independent(function.body.block)
    scratch = Block()
    cones = ConeBuilder(scratch, ranges_of(function))
    work = [op for op in independent_work(function, independent) if not _loops_can_compute(op, independent)]
    # Build all cones before any replacement. A cone that contains a replaced value would read @init inside @init.
    for op, built in [(op, cones.build(op.results[0])) for op in work]:
        too_large = built is not None and table_bytes(built) > MAX_TABLE_BYTES
        if built is None or too_large:
            why = "its elements depend on the extents, so a table at the maximum would be wrong"
            if too_large:
                why = f"a table at the maximum would take more than {MAX_TABLE_BYTES >> 20} MiB"
            context.report.add(HoistConstantMasksPass.name, path_of(op), f"{op.name} stays in every call", why)
            continue
        key = init.add(built, cone_text(built.value))
        _read_table(op, built, key)
        what = f"{op.name} of shape {'x'.join(map(str, built.shape)) or 'scalar'} is computed at load"
        context.report.add(HoistConstantMasksPass.name, path_of(op), what, f"it depends on no input: @{key}")
    for op in list(scratch.ops):
        scratch.detach_op(op)
        init.block.add_op(op)
    erase_dead(function.body.block)
    fold_views(list(function.body.block.ops))


def table_bytes(built: Built) -> int:
    """The size of a hoisted result in bytes."""
    return math.prod(built.shape) * ITEMSIZE[tensor_dtype(built.value.type)]


def independent_work(function: func.FuncOp, independent: set[Operation]) -> Iterator[Operation]:
    """Ops that depend on no input, compute something, and have a reader (an op or the caller) that needs a tensor."""
    for op in function.body.block.ops:
        if op not in independent or isinstance(op, (*FREE, *VIEWS)) or _is_scalar(op) or _is_empty(op):
            continue
        if any(_reads_table(op, reader, independent) for result in op.results for reader, _ in readers(result)):
            yield op


def _is_scalar(op: Operation) -> bool:
    return type(op) in ARITH_OPS or not op.results or not hasattr(op.results[0].type, "get_shape")


def _is_empty(op: Operation) -> bool:
    """Whether a result has no elements."""
    return any(0 in shape_of(result.type) for result in op.results)


def _reads_table(op: Operation, reader: Operation, independent: set[Operation]) -> bool:
    """Whether `reader` needs the result of `op` in memory. A loop nest does not need a constant fill: its body contains
    the constant, or its reduction starts from it."""
    if reader in independent:
        return False
    return not (isinstance(op, ops.FillOp) and isinstance(reader, ops.GenericOp))


def _loops_can_compute(op: Operation, independent: set[Operation]) -> bool:
    """Whether the op is a little index arithmetic that every reader can do itself. A slice cannot, since it is read
    with strides."""
    if not isinstance(op, ops.GenericOp) or op.inputs or not loops.is_pointwise(op) or not is_trivial(op):
        return False
    if any(isinstance(use.operation, tensor.ExtractSliceOp) for use in op.res[0].uses):
        return False
    return all(isinstance(r, ops.GenericOp) or r in independent for r, _ in readers(op.res[0]))


def _read_table(op: Operation, built: Built, key: str) -> None:
    """Replaces a value by a view of its table: a slice for symbolic sizes, a broadcast where the value repeats."""
    value = op.results[0]
    builder = build.with_path(InsertPoint.before(op), path_of(op))
    table = qc.ConstOp(key, built.value.type)
    set_path(table, path_of(op))
    loops.insert_before(op, table)
    shape = shape_of(value.type)
    sizes = [1 if r else s for r, s in zip(built.repeats, shape, strict=True)]
    view = build.extract_slice(builder, table.result, [0] * len(sizes), sizes)
    if any(built.repeats):
        view = build.broadcast_in(builder, view, shape, range(len(shape)))
    value.replace_uses_with_if(view, lambda use: not _starts_reduction(use))


def _starts_reduction(use: Use) -> bool:
    """Whether this use is the initial value of a loop nest's result, which must stay a fill."""
    reader = use.operation
    return isinstance(reader, ops.GenericOp) and use.index >= len(reader.inputs)
