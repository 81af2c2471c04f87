"""One compute op as a kernel draft: normalised operands, the op rebuilt on block arguments, the views to launch it on.

The lowering of each kind (`kinds/`) takes an op whose inputs already have places (strided views), asks the `Places` for
whatever the kernel requires (a matrix, a contiguous copy), allocates the result, and returns a `Draft`.
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


class Places(Protocol):
    """What a rule may ask of the lowering: where values are, copies, and room for results."""

    def view(self, value: SSAValue) -> View: ...
    def contiguous_copy(self, view: View, op: Operation) -> View: ...
    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View: ...
    def updated(self, op: Operation, base: SSAValue) -> View: ...


@dataclass
class Draft:
    """A kernel before it has a name: `body` holds the one op on block arguments that match `operands`.

    A kernel of several parts has more ops; `written` are then their results, one for each written operand.
    """

    stem: str
    path: str
    operands: list[Operand] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    body: Block = field(default_factory=Block)
    written: list[SSAValue] = field(default_factory=list)

    def add(self, name: str, access: Access, view: View) -> SSAValue:
        """One more operand; returns the block argument that stands for it."""
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


def matrix_of(value: SSAValue, op: Operation, places: Places) -> View:
    """The value as (rows, cols), copied if its strides do not allow that."""
    view = places.view(value)
    matrix = views.as_matrix(view)
    if matrix is None:
        matrix = views.as_matrix(places.contiguous_copy(view, op))
    assert matrix is not None
    return matrix


def vector_of(value: SSAValue, op: Operation, places: Places) -> View:
    view = places.view(value)
    vector = views.as_vector(view) or views.as_vector(places.contiguous_copy(view, op))
    assert vector is not None
    return vector


def unit_last(value: SSAValue, op: Operation, places: Places) -> View:
    """The value with unit stride along its last dim, copied if need be."""
    view = places.view(value)
    return view if view.strides[-1] == 1 or view.shape[-1] == 1 else places.contiguous_copy(view, op)


def collapsed(view: View, groups: Sequence[Sequence[int]], op: Operation, places: Places) -> View:
    result = views.collapse(view, groups) or views.collapse(places.contiguous_copy(view, op), groups)
    assert result is not None
    return result


def axis_groups(rank: int, axis: int) -> list[Sequence[int]]:
    """(outer, axis, inner) as groups of dims."""
    return [tuple(range(axis)), (axis,), tuple(range(axis + 1, rank))]


def along_groups(x: View, index: View, axis: int) -> list[Sequence[int]]:
    """Groups that need no copy if there are such: each element is picked for itself, so the dims beside the axis may
    be put in front of it or behind it as both operands lie. An index that repeats over heads is read where it is."""
    others = [n for n in range(len(x.shape)) if n != axis]
    usual = axis_groups(len(x.shape), axis)
    candidates: list[list[Sequence[int]]] = [usual]
    candidates += [[tuple(others[:n]), (axis,), tuple(others[n:])] for n in range(len(others), -1, -1)]
    for groups in candidates:
        if views.collapse(x, groups) is not None and views.collapse(index, groups) is not None:
            return groups
    return usual


def copy_draft(source: View, target: View, path: str) -> Draft:
    """An elementwise copy between views of one shape."""
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
