"""Finds the readers of a value that would need a copy if the value were a slice of columns of a wider matrix.

It runs the rules of the lowering (lowering/placer.py, lowering/drafts.py) on imaginary memory: once with the value's
rows contiguous, and once with other columns between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.tensor import CollapseShapeOp, ConcatOp, ExpandShapeOp, InsertSliceOp
from xdsl.ir import Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor_dtype
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.kinds import DRAFTS, draft
from qcompiler.passes.lowering.placer import Placer
from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.plan import View

_WATCHED, _OTHER = "watched", "other"


class _Trial(Placer):
    """Places of one value and its views. All other values have memory of their own. Implements `drafts.ValueMemory`."""

    def __init__(self) -> None:
        super().__init__(self._default, self._default, self.contiguous_copy)
        self.copied: dict[Operation, None] = {}

    def view(self, value: SSAValue) -> View:
        return self._views[value] if value in self._views else _own(value)

    def contiguous_copy(self, view: View, op: Operation) -> View:
        if view.buffer == _WATCHED:
            self.copied[op] = None
        return views.contiguous(_OTHER, view.dtype, view.shape)

    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View:
        return views.contiguous(_OTHER, tensor_dtype(value.type), shape)

    def updated(self, op: Operation, base: SSAValue) -> View:
        return _own(base)

    def _default(self, op: qc.ConstOp | qc.StateOp) -> View:
        return _own(op.result)

    def follow(self, value: SSAValue, view: View) -> None:
        """Places the value, and runs the rule of each op that reads it, directly or through views."""
        self.define(value, view)
        pending, asked = [value], set[Operation]()
        while pending:
            for use in pending.pop().uses:
                user = use.operation
                if user in asked:
                    continue
                asked.add(user)
                if self.place(user):
                    pending += user.results
                else:
                    self._ask(user)

    def _ask(self, op: Operation) -> None:
        if isinstance(op, qc.CopyOp | qc.TorchCallOp):  # they read whole tensors in row-major order
            for operand in op.operands:
                if isinstance(operand.type, TensorType) and not views.is_contiguous(self.view(operand)):
                    self.contiguous_copy(self.view(operand), op)
        elif type(op) in DRAFTS and not isinstance(op, ConcatOp | InsertSliceOp):
            try:
                draft(op, self)
            except KernelSelectionError:
                return  # the op has no lowering with either place; lower-to-rt raises the error


def _own(value: SSAValue) -> View:
    """A value in memory of its own."""
    type_ = value.type
    if isinstance(type_, QTensorType):
        return View(buffer=_OTHER, dtype=type_.dtype, shape=type_.shape, format=type_.format.ref, layout="canonical")
    return views.contiguous(_OTHER, tensor_dtype(type_), shape_of(type_))


def new_copies(value: SSAValue, wider: int) -> list[str]:
    """The ops that now read the matrix in place, and would read a copy if its rows were parts of `wider` elements."""
    shape, dtype = shape_of(value.type), tensor_dtype(value.type)
    before, after = _Trial(), _Trial()
    before.follow(value, views.contiguous(_WATCHED, dtype, shape))
    whole = contiguous_strides((*shape[:-1], wider))
    after.follow(value, View(buffer=_WATCHED, dtype=dtype, shape=tuple(shape), strides=whole))
    return [f"{op.name} at '{path_of(op)}'" for op in after.copied if op not in before.copied]


def is_result(value: SSAValue) -> bool:
    """Whether a value, or a reshape of it, is a result of the program or the new value of a state. It is then computed
    in that memory, so it cannot be a part of a wider matrix."""
    for use in value.uses:
        user = use.operation
        if user.name == "func.return" or isinstance(user, qc.StateUpdateOp):
            return True
        if isinstance(user, ExpandShapeOp | CollapseShapeOp) and any(is_result(result) for result in user.results):
            return True
    return False
