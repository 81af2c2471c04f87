"""Weights and biases of linears that become one: whether their bytes can stand in one tensor, and that tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.builder import Builder
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from qcompiler.formats import stacking
from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import is_named, path_of, set_path
from qcompiler.ir.types import QTensorType, shape_of, tensor, tensor_dtype
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.linears.stacked import format_of, nothing_to_add, stacked
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.weights import StoredTensor

Group = Sequence[qc.LinearOp]


@dataclass
class Constants:
    """The weight store of a module whose linears are put together. `made`: what was stacked, by the parts' keys."""

    context: QCContext
    made: dict[tuple[str, ...], StoredTensor] = field(default_factory=dict)

    def weight(self, op: qc.LinearOp) -> StoredTensor:
        """The stored weight of a linear that has one."""
        assert isinstance(op.w.owner, qc.ConstOp)
        return self.context.weights[op.w.owner.key]

    def obstacle(self, op: qc.LinearOp, separate: Sequence[str]) -> str | None:
        """Why the weight and the bias of a linear stay what they are, or None. `separate` are globs over paths."""
        for value in (op.w, *([op.bias] if op.bias is not None else [])):
            constant = value.owner
            if not isinstance(constant, qc.ConstOp) or constant.key not in self.context.weights:
                return "its weight is computed"
            if self.context.weights[constant.key].layout != "canonical":
                return "its weight is packed for its kernel already"
        if self._is_named(op, separate):
            return "the recipe keeps it separate"
        if isinstance(unreshaped(op.x).owner, qc.WindowsOp):
            return "it is a convolution"
        if op.prologue.blocks:
            return "it has a prologue already"
        return None

    def _is_named(self, op: qc.LinearOp, separate: Sequence[str]) -> bool:
        """Whether `separate` names the module or its weight."""
        paths = self.weight(op).paths
        names = {path_of(op), *paths, *(path.rpartition(".")[0] for path in paths)}
        return any(is_named(name, separate) for name in names)

    def disagreement(self, group: Group) -> str | None:
        """Why the constants of the last of a group cannot be put below those of the others, or None."""
        first, last = group[0], group[-1]
        if first.attributes.get(DEVICE) != last.attributes.get(DEVICE):
            return "they are on different devices"
        ours, theirs = self.weight(last), self.weight(first)
        if (ours.format, ours.dtype) != (theirs.format, theirs.dtype):
            return f"the weights are stored as {_stored(theirs)} and as {_stored(ours)}"
        if tensor_dtype(first.w.type) != tensor_dtype(last.w.type):
            return "their products have different arithmetic"
        biases = {tensor_dtype(op.bias.type) for op in group if op.bias is not None}
        if len(biases) > 1:
            return "their biases have different types"
        if len(set(keys_of(group))) < len(keys_of(group)):
            return "they share a weight or a bias"
        fmt = format_of(ours)
        return None if fmt is None else stacking.obstacle(fmt, [rows_of(op) for op in group], ours.shape[1])

    def stack(self, group: Group, values: Sequence[SSAValue | None]) -> StoredTensor:
        """The constants `values` as one in the weight store, where every function finds it; None adds nothing."""
        keys = [value.owner.key for value in values if value is not None and isinstance(value.owner, qc.ConstOp)]
        if tuple(keys) in self.made:
            return self.made[tuple(keys)]
        like = self.context.weights[keys[0]]
        tensors = [
            self.context.weights[value.owner.key]
            if value is not None and isinstance(value.owner, qc.ConstOp)
            else nothing_to_add(rows_of(op), like.dtype)
            for op, value in zip(group, values, strict=True)
        ]
        tensor_ = self.made[tuple(keys)] = stacked(joined_paths(keys), tensors)
        self.context.weights.merge(keys, tensor_)
        return tensor_

    def insert(self, builder: Builder, group: Group) -> tuple[SSAValue, SSAValue | None]:
        """The weight and the bias of the whole group as constants; no bias if no linear has one."""
        w = builder.insert(constant(self.stack(group, [op.w for op in group]), group[0].w)).result
        biases = [op.bias for op in group]
        like = next((each for each in biases if each is not None), None)
        return w, None if like is None else builder.insert(constant(self.stack(group, biases), like)).result


def read_elsewhere(module: ModuleOp, groups: Sequence[Group]) -> set[str]:
    """Keys of constants that something beside their own group reads, in any function: they would be stored twice."""
    company: dict[str, set[tuple[str, ...]]] = {}
    for group in groups:
        for key in keys_of(group):
            company.setdefault(key, set()).add(tuple(keys_of(group)))
    grouped = {op for group in groups for op in group}
    found = {key for key, companies in company.items() if len(companies) > 1}
    for op in module.walk():
        for operand in op.operands:
            constant = operand.owner
            if op not in grouped and isinstance(constant, qc.ConstOp) and constant.key in company:
                found.add(constant.key)
    return found


def rows_of(op: qc.LinearOp) -> int:
    """Rows of a linear's weight."""
    return int(shape_of(op.w.type)[0])


def keys_of(group: Group) -> list[str]:
    """Keys of the weights and biases of a group."""
    values = [value for op in group for value in (op.w, *([op.bias] if op.bias is not None else []))]
    return [value.owner.key for value in values if isinstance(value.owner, qc.ConstOp)]


def _stored(tensor_: StoredTensor) -> str:
    return tensor_.dtype if tensor_.format is None else f"{tensor_.format.name} ({tensor_.dtype})"


def constant(stored: StoredTensor, like: SSAValue) -> qc.ConstOp:
    """The constant of a stacked tensor, of the type that its parts have."""
    if isinstance(like.type, QTensorType):
        assert stored.format is not None
        rows, cols = stored.shape
        return qc.ConstOp(stored.key, QTensorType.of((rows, cols), like.type.dtype, stored.format, stored.layout))
    assert isinstance(like.type, TensorType)
    return qc.ConstOp(stored.key, tensor(stored.shape, stored.dtype))


def finish(begun: Operation, end: Operation, path: str) -> None:
    """Gives the new ops before `end` the device of what they replace, and the first of them its path."""
    device = end.attributes.get(DEVICE)
    each: Operation | None = end.prev_op
    while each is not None and DEVICE not in each.attributes and device is not None:
        each.attributes[DEVICE] = device
        each = each.prev_op
    set_path(begun, path)
