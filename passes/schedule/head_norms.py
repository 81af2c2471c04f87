"""Norms that move to the loop that alone reads them: of heads, and of whole rows.

    linear (1, 128) -> norm of its 4 heads (4, 16) -> loop (rotary embedding)      one part of a launch
    norm of hidden states (16, 3072) -> loop (scale and shift of a modulation)     a launch of one part

A loop can compute the norm of a row as it goes over that row, if every loop nest iteration reads one row, and the loops
of one row are apart from those over rows.  Wide rows (more than `MOST_COLUMNS`) must be read column by column; then the
two are a launch of their own.  There, and in a loop that is too large to share a launch, neighbours along a row must be
neighbours in the result: a transposing loop has a kernel that goes over tiles (kernels/cuda/loop.py).  A norm that a
linear reads has gone into that linear by now (fuse-norm-prologue), or stays a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir.affine import AffineMap

from qcompiler.errors import DimError, PlanError
from qcompiler.ir import qc
from qcompiler.ir.qc_norm import NORMS
from qcompiler.ir.rt import LaunchOp, StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.ir.types import tensor_dtype
from qcompiler.passes.lowering.kinds import loop as loops
from qcompiler.passes.lowering.kinds import norm as norms
from qcompiler.passes.schedule.touched import Touched
from qcompiler.plan.dims import Dim, contiguous_strides, dim, product
from qcompiler.plan.kernel import Operand
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.kinds.parts import PartNorm
from qcompiler.plan.parts_contract import MOST_COLUMNS, MOST_IN_ORDER, in_order, row_axes
from qcompiler.plan.plan import View
from qcompiler.plan.view_regions import is_packed


@dataclass(frozen=True)
class HeadNorm:
    """The launch of a norm, and the numbers of that step and of the loop that alone reads its result."""

    step: LaunchOp
    number: int
    loop: int
    op: qc.LayerNormOp | qc.RmsNormOp
    along: bool = False
    """Whether the loop writes its results of neighbouring columns side by side."""

    @property
    def views(self) -> tuple[View, ...]:
        """x, the weight and the bias, and the result."""
        return self.step.view_records

    @property
    def wide(self) -> bool:
        """Whether its rows are too wide to share a launch."""
        cols = self.views[0].shape[-1]
        return not isinstance(cols, int) or cols > MOST_COLUMNS

    @property
    def result(self) -> str:
        """The buffer that only the norm and its loop use."""
        return self.views[-1].buffer


def head_norms(steps: Sequence[StepOp], schedule: Schedule, touched: Touched) -> list[HeadNorm]:
    """The norms that may move to their loops; at most one for each loop."""
    found: dict[int, HeadNorm] = {}
    for number, step in enumerate(steps):
        norm = _norm_of(step, number, schedule, touched)
        if norm is None or norm.loop in found:
            continue
        between = list(range(number + 1, norm.loop))
        if touched.conflict([number], between):
            continue
        body = _by_rows(norm, steps[norm.loop], schedule)
        if body is not None and (along := _along(*body)) >= norm.wide:
            found[norm.loop] = replace(norm, along=along)
    return list(found.values())


def _norm_of(step: StepOp, number: int, schedule: Schedule, touched: Touched) -> HeadNorm | None:
    """The step as a norm of rows with one reader, or None."""
    if not isinstance(step, LaunchOp):
        return None
    body, views = schedule.kernels[step.kernel_name].body, step.view_records
    op = body.block.first_op if body is not None else None
    if not isinstance(op, NORMS) or op.residual is not None or any(is_packed(view) for view in views):
        return None
    cols, out = views[0].shape[-1], views[-1]
    if not isinstance(cols, int) or not 1 <= cols <= MOST_IN_ORDER:
        return None
    if any(schedule.arenas[schedule.buffers[view.buffer].arena_name].kind.data == "state" for view in views):
        return None
    users = touched.users(out.buffer)
    if len(users) != 2 or users[0] != number or not touched.passed_on(out.buffer, users):
        return None
    if tuple(out.strides) != contiguous_strides(out.shape) or out.offset != 0:
        return None
    return HeadNorm(step, number, users[1], op)


def _by_rows(norm: HeadNorm, step: StepOp, schedule: Schedule) -> tuple[LoopKernel, PartNorm] | None:
    """The reader, if it is a loop that goes over the norm's result row by row, and what it reads."""
    if not isinstance(step, LaunchOp):
        return None
    body, views = schedule.kernels[step.kernel_name].body, step.view_records
    op = body.block.first_op if body is not None else None
    if not isinstance(op, GenericOp) or any(view.buffer == norm.result for view in views[len(op.inputs) :]):
        return None
    if {view.buffer for view in views[len(op.inputs) :]} & {view.buffer for view in norm.views}:
        return None
    if norm.views[0] in views[: len(op.inputs)]:
        return None  # an operand of a part is read as it is, or normalised
    inputs = tuple(i for i, view in enumerate(views[: len(op.inputs)]) if view.buffer == norm.result)
    operands = []
    for i, view in enumerate(views):
        strides = view.strides
        if i in inputs:
            order = row_major(norm.views[-1], view)
            if order is None or view.dtype != tensor_dtype(norm.op.result.type):
                return None
        operands.append(
            Operand(name=f"{i}", dtype=view.dtype, access="r", shape=view.shape, strides=_plain(view.shape, strides))
        )
    try:
        body_ = loops.body(op, operands, "")
        x = Operand(name="x", dtype=norm.views[0].dtype, access="r", shape=norm.views[0].shape)
        read = PartNorm(body=norms.body(norm.op, [x], ""), inputs=inputs)
        row_axes(body_, read)
        return None if norm.wide and not in_order(body_, read) else (body_, read)
    except (PlanError, DimError):
        return None


def _along(loop: LoopKernel, norm: PartNorm) -> bool:
    """Whether each result of a loop lies along the columns of the norm's rows."""
    columns = set(range(len(loop.extents))) - set(row_axes(loop, norm))
    results = loop.accesses[len(loop.accesses) - len(loop.body.yields) :]
    return all(any(result.coefficients[axis] == 1 for axis in columns) for result in results)


def _plain(shape: Sequence[Dim], strides: Sequence[Dim]) -> tuple[Dim, ...]:
    """The strides, with 0 for dims of one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def row_major(result: View, view: View) -> tuple[int, ...] | None:
    """The order of a view's dims in which it is all of a result without gaps, or None."""
    if view.offset != 0 or product(view.shape) != product(result.shape):
        return None
    units = [axis for axis, size in enumerate(view.shape) if size == 1]
    left = {axis: dim(stride) for axis, stride in enumerate(view.strides) if axis not in units}
    order: list[int] = []
    step = dim(1)
    while left:
        axis = next((axis for axis, stride in left.items() if stride == step), None)
        if axis is None:
            return None
        order.insert(0, axis)
        step = step * dim(view.shape[axis])
        del left[axis]
    return (*units, *order)


def reordered(map_: AffineMap, order: Sequence[int]) -> AffineMap:
    """An indexing map for a tensor whose dims stand in another order."""
    return AffineMap(map_.num_dims, map_.num_symbols, tuple(map_.results[axis] for axis in order))
