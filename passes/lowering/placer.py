"""The place of every value: a strided view of a buffer. View ops only change the view, so they cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xdsl.dialects import tensor as tensor_dialect
from xdsl.dialects.builtin import DYNAMIC_INDEX, ArrayAttr, IntegerAttr
from xdsl.dialects.linalg.ops import BroadcastOp, GenericOp, TransposeOp
from xdsl.ir import Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering import views
from qcompiler.passes.views.views import VIEWS, unreshaped
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.plan import View

Groups = list[list[int]]

Steps = tuple[list[Dim], list[Dim], list[Dim]]


def root_of(value: SSAValue) -> SSAValue | None:
    """The op result that a returned value is a reshape of. None if the value must be copied (arguments, constants)."""
    value = unreshaped(value)
    owner = value.owner
    if not isinstance(owner, Operation) or isinstance(owner, qc.ConstOp | qc.StateOp | qc.IndexUpdateOp):
        return None
    if isinstance(owner, qc.LinearAttentionOp) and value is owner.after:
        return None
    if isinstance(owner, qc.SoftmaxOp) and owner.axis.value.data != len(shape_of(owner.result.type)) - 1:
        return None
    return None if isinstance(owner, VIEWS) else value


class Placer:
    """Maps values to strided views. Constants and states are placed on first use."""

    def __init__(
        self,
        constant: Callable[[qc.ConstOp], View],
        state: Callable[[qc.StateOp], View],
        contiguous_copy: Callable[[View, Operation], View],
    ) -> None:
        self._views: dict[SSAValue, View] = {}
        self._constant, self._state, self._copy = constant, state, contiguous_copy

    def define(self, value: SSAValue, view: View) -> None:
        self._views[value] = view

    def view(self, value: SSAValue) -> View:
        if value not in self._views:
            owner = value.owner
            if isinstance(owner, qc.ConstOp):
                self._views[value] = self._constant(owner)
            elif isinstance(owner, qc.StateOp):
                self._views[value] = self._state(owner)
            else:
                name = owner.name if isinstance(owner, Operation) else "a block argument"
                raise KernelSelectionError(f"lower-to-rt: the result of {name} has no place in memory")
        return self._views[value]

    # --- view ops ---

    def place(self, op: Operation) -> bool:
        """Places the result of a view op, a constant or a state; False for an op that computes."""
        match op:
            case qc.ConstOp() | qc.StateOp():
                return True  # on first use
            case TransposeOp():
                permutation = [int(i) for i in op.permutation.get_values()]
                self.define(op.results[0], views.transpose(self.view(op.inputs[0]), permutation))
            case BroadcastOp():
                added = [int(i) for i in op.dimensions.get_values()]
                result = op.results[0]
                self.define(result, views.broadcast(self.view(op.input), added, shape_of(result.type)))
            case tensor_dialect.ExpandShapeOp():
                groups = _groups(op.reassociation)
                self.define(op.result, views.expand(self.view(op.src), groups, shape_of(op.result.type)))
            case tensor_dialect.CollapseShapeOp():
                source, groups = self.view(op.src), _groups(op.reassociation)
                merged = views.collapse(source, groups) or views.collapse(self._copy(source, op), groups)
                assert merged is not None
                self.define(op.result, merged)
            case tensor_dialect.ExtractSliceOp():
                offsets, sizes, steps = slice_of(op)
                sliced = views.slice_(self.view(op.source), offsets, sizes, steps)
                self.define(op.result, _drop_unit_dims(sliced, shape_of(op.result.type)))
            case tensor_dialect.CastOp():
                view = self.view(op.source)
                self.define(op.dest, views.with_shape(view, shape_of(op.dest.type), view.strides))
            case _:
                return False
        return True

    def layout_hint(self, value: SSAValue) -> tuple[int, ...] | None:
        """The storage order of a result, from the slowest dim to the fastest; None for row-major.

        The only reader of an attention is nearly always the transpose that moves heads behind the sequence. If the
        result is stored in that order, the transpose and the reshape after it are free. The same is true of a
        batch-first recurrent layer, whose last state is read as well. Softmax is computed with its axis innermost.
        """
        owner = value.owner
        if isinstance(owner, qc.RecurrentOp):
            readers = [use.operation for use in value.uses]
            orders = {tuple(map(int, r.permutation.get_values())) for r in readers if isinstance(r, TransposeOp)}
            order = next(iter(orders)) if len(orders) == 1 else ()
            return order if order and order[-1] == len(order) - 1 else None
        if isinstance(owner, qc.AttentionOp):
            users = [use.operation for use in value.uses]
            if len(users) == 1 and isinstance(users[0], TransposeOp):
                order = tuple(int(i) for i in users[0].permutation.get_values())
                return order if order[-1] == len(order) - 1 else None
        if isinstance(owner, qc.SoftmaxOp):
            rank, axis = len(shape_of(value.type)), owner.axis.value.data
            if axis != rank - 1:
                return (*(i for i in range(rank) if i != axis), axis)
        return None

    def fill_is_read(self, op: Operation) -> bool:
        """Whether some op reads the values of a fill. A reduction that starts from them does not."""
        for use in op.results[0].uses:
            user = use.operation
            if not (isinstance(user, GenericOp) and use.index >= len(user.inputs)):
                return True
        return False

    def assemble(self, op: tensor_dialect.ConcatOp, target: View) -> Iterator[tuple[View, View]]:
        """The copies that write a concat into `target`, in order: (source, target)."""
        axis, start = op.dim.value.data, dim(0)
        for value in op.inputs:
            source = self.view(value)
            offsets = [start.to_dim() if i == axis else 0 for i in range(len(source.shape))]
            yield source, views.slice_(target, offsets, source.shape, [1] * len(offsets))
            start = start + dim(source.shape[axis])

    def inserted(self, op: tensor_dialect.InsertSliceOp, target: View) -> tuple[View, View]:
        """The copy that writes the slice of an insert_slice: (source, target). `target` already has the other
        elements."""
        offsets, sizes, steps = slice_of(op)
        source = self.view(op.source)
        return source, _drop_unit_dims(views.slice_(target, offsets, sizes, steps), source.shape)

    def move(self, value: SSAValue, view: View) -> None:
        """Gives a value another place, and updates the places of its views."""
        self.define(value, view)
        for use in value.uses:
            user = use.operation
            if isinstance(user, VIEWS) and all(result in self._views for result in user.results):
                self.place(user)
                for result in user.results:
                    self.move(result, self._views[result])


def _groups(attribute: ArrayAttr[ArrayAttr[IntegerAttr]]) -> Groups:
    return [[index.value.data for index in group] for group in attribute]


def slice_of(
    op: tensor_dialect.ExtractSliceOp | tensor_dialect.InsertSliceOp,
) -> Steps:
    """The offsets, sizes and steps of a slice op as dims. A dynamic one must be the result of a `qc.dim`."""

    def resolve(static: tuple[int, ...], dynamic: list[SSAValue]) -> list[Dim]:
        remaining = iter(dynamic)
        return [_dim_of(next(remaining), op) if entry == DYNAMIC_INDEX else int(entry) for entry in static]

    return (
        resolve(op.static_offsets.get_values(), list(op.offsets)),
        resolve(op.static_sizes.get_values(), list(op.sizes)),
        resolve(op.static_strides.get_values(), list(op.strides)),
    )


def _dim_of(value: SSAValue, op: Operation) -> Dim:
    if isinstance(value.owner, qc.DimOp):
        return dim(value.owner.expr.data).to_dim()
    raise KernelSelectionError(f"{op.name} at '{path_of(op)}' has a size that is not a shape expression")


def _drop_unit_dims(view: View, shape: tuple[Dim, ...]) -> View:
    """The view of a rank-reducing slice: without the dims of size 1 that the result does not have."""
    sizes: list[Dim] = []
    strides: list[Dim] = []
    wanted = list(shape)
    for size, stride in zip(view.shape, view.strides, strict=True):
        if wanted and size == wanted[0]:
            sizes.append(size)
            strides.append(stride)
            wanted.pop(0)
        elif size != 1:
            raise KernelSelectionError(f"a slice of shape {view.shape} cannot become {shape}")
    if wanted:
        raise KernelSelectionError(f"a slice of shape {view.shape} cannot become {shape}")
    return views.with_shape(view, sizes, strides)
