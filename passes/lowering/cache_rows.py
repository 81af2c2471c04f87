"""Rows of a cache as kernels take them: three dims of rows, whatever strides they have, in the program's own memory."""

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.dialects.func import ReturnOp
from xdsl.dialects.linalg.ops import TransposeOp
from xdsl.ir import Block, Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.module import path_of
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import ValueMemory
from qcompiler.plan.plan import View

_VIEWS = (tensor.ExpandShapeOp, tensor.CollapseShapeOp, tensor.ExtractSliceOp, TransposeOp)


def in_three_dims(view: View, op: Operation, memory: ValueMemory) -> View:
    """The view as (outer, middle, inner, columns). More dims of rows are joined, in a copy where strides require it."""
    rank = len(view.shape)
    if rank <= 4:
        missing = 4 - rank
        return views.with_shape(view, (*[1] * missing, *view.shape), (*[0] * missing, *view.strides))
    groups = [tuple(range(rank - 3)), (rank - 3,), (rank - 2,), (rank - 1,)]
    joined = views.collapse(view, groups) or views.collapse(memory.contiguous_copy(view, op), groups)
    assert joined is not None
    return joined


def require_own_memory(op: Operation, rows: SSAValue) -> None:
    """KernelSelectionError for rows in the caller's arrays, which may begin anywhere: rows begin at multiples of 16
    bytes."""
    source = rows
    while isinstance(source.owner, _VIEWS):
        source = source.owner.operands[0]
    if isinstance(source.owner, Block):
        _refuse(op, "reads the rows of a cache from an input")
    users = [use.operation for use in rows.uses]
    while users:
        user = users.pop()
        if isinstance(user, ReturnOp):
            _refuse(op, "makes the rows of a cache, which are returned")
        if isinstance(user, _VIEWS):
            users += [use.operation for use in user.results[0].uses]


def _refuse(op: Operation, what: str) -> None:
    raise KernelSelectionError(
        f"'{path_of(op)}': {op.name} {what}, where they may begin at any byte; keep the rows in a buffer of the module "
        "(docs/state.md), and pass what they mean"
    )
