"""The draft of a kernel for one compute op: its operands, the op rebuilt on block arguments, and the views of a launch.

The inputs of the op already have places (strided views). The lowering of a kind (`kinds/`) asks the `ValueMemory` for
what the kernel requires, such as a matrix or a contiguous copy, allocates the result, and returns a `Draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xdsl.dialects.builtin import AffineMapAttr
from xdsl.dialects.linalg.attrs import IteratorType, IteratorTypeAttr
from xdsl.dialects.linalg.ops import GenericOp, YieldOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap

from qcompiler.ir.types import QTensorType, tensor
from qcompiler.passes.lowering import views
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import Access, Operand
from qcompiler.plan.plan import View


class ValueMemory(Protocol):
    """The services that a rule may use: the view of a value, copies, and memory for results."""

    def view(self, value: SSAValue) -> View: ...
    def contiguous_copy(self, view: View, op: Operation) -> View: ...
    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View: ...
    def updated(self, op: Operation, base: SSAValue) -> View: ...


@dataclass
class Draft:
    """A kernel without a name. `body` has the one op; its block arguments match `operands`.

    A kernel of several parts has more ops. `written` are then their results, one for each written operand.
    """

    stem: str
    path: str
    operands: list[Operand] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    body: Block = field(default_factory=Block)
    written: list[SSAValue] = field(default_factory=list)

    def add(self, name: str, access: Access, view: View) -> SSAValue:
        """Adds an operand; returns its block argument."""
        self.operands.append(
            Operand(
                name=name,
                dtype=view.dtype,
                access=access,
                shape=view.shape,
                strides=view.strides,
                format=view.format,
                layout=view.layout,
            )
        )
        self.views.append(view)
        return self.body.insert_arg(operand_type(self.operands[-1]), len(self.body.args))


def operand_type(operand: Operand) -> Attribute:
    """The tensor type of a kernel operand."""
    if operand.format is None:
        return tensor(operand.shape, operand.dtype)
    rows, cols = operand.shape
    return QTensorType.of((int(rows), int(cols)), operand.dtype, operand.format, operand.layout or "canonical")


# --- helpers ---------------------------------------------------------------------------------------------------------


def matrix_of(value: SSAValue, op: Operation, memory: ValueMemory) -> View:
    """The value as a (rows, cols) matrix, copied if its strides require it."""
    view = memory.view(value)
    matrix = views.as_matrix(view)
    if matrix is None:
        matrix = views.as_matrix(memory.contiguous_copy(view, op))
    assert matrix is not None
    return matrix


def rows_of(value: SSAValue, op: Operation, memory: ValueMemory) -> View:
    """The value as (rows, cols), or else as (rows, inner, cols) for rows with two strides; copied if it is neither."""
    view = memory.view(value)
    rows = views.as_matrix(view) or views.as_rows_of_rows(view)
    return rows if rows is not None else matrix_of(value, op, memory)


def vector_of(value: SSAValue, op: Operation, memory: ValueMemory) -> View:
    view = memory.view(value)
    vector = views.as_vector(view) or views.as_vector(memory.contiguous_copy(view, op))
    assert vector is not None
    return vector


def unit_vector_of(value: SSAValue, op: Operation, memory: ValueMemory) -> View:
    """The vector with its elements side by side; one number for all of them is copied."""
    vector = vector_of(value, op, memory)
    return vector if vector.strides[-1] == 1 or vector.shape[-1] == 1 else memory.contiguous_copy(vector, op)


def unit_last(value: SSAValue, op: Operation, memory: ValueMemory) -> View:
    """The value with unit stride along its last dim, copied if needed."""
    view = memory.view(value)
    return view if view.strides[-1] == 1 or view.shape[-1] == 1 else memory.contiguous_copy(view, op)


def collapsed(view: View, groups: Sequence[Sequence[int]], op: Operation, memory: ValueMemory) -> View:
    result = views.collapse(view, groups) or views.collapse(memory.contiguous_copy(view, op), groups)
    assert result is not None
    return result


def axis_groups(rank: int, axis: int) -> list[Sequence[int]]:
    """The dims in three groups: (outer, axis, inner)."""
    return [tuple(range(axis)), (axis,), tuple(range(axis + 1, rank))]


def along_groups(x: View, index: View, axis: int) -> list[Sequence[int]]:
    """Three groups of dims for a gather along `axis`, so that x and index need no copy if possible.

    Each element is picked on its own, so the other dims may go before or after the axis. The order is chosen by the
    strides of both operands. An index that repeats over heads then needs no copy.
    """
    others = [n for n in range(len(x.shape)) if n != axis]
    usual = axis_groups(len(x.shape), axis)
    candidates: list[list[Sequence[int]]] = [usual]
    candidates += [[tuple(others[:n]), (axis,), tuple(others[n:])] for n in range(len(others), -1, -1)]
    for groups in candidates:
        if views.collapse(x, groups) is not None and views.collapse(index, groups) is not None:
            return groups
    return usual


def copy_draft(source: View, target: View, path: str) -> Draft:
    """An elementwise copy between two views of the same shape."""
    result = Draft("copy", path)
    read = result.add("in0", "r", source)
    write = result.add("out0", "w", target)
    element = tensor((), source.dtype).element_type
    body = Block(arg_types=[element, element])
    body.add_op(YieldOp(body.args[0]))
    result.body.add_op(parallel([read], [write], body, len(source.shape)))
    return result


def parallel(inputs: Sequence[SSAValue], outputs: Sequence[SSAValue], body: Block, rank: int) -> Operation:
    identity = AffineMapAttr(AffineMap.identity(rank))
    parallel = IteratorTypeAttr(IteratorType.PARALLEL)
    return GenericOp(
        inputs,
        outputs,
        Region(body),
        [identity] * (len(inputs) + len(outputs)),
        [parallel] * rank,
        [value.type for value in outputs],
    )
