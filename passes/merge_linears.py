"""merge-linears: merges linears that read the same rows into one wider linear, and slices its result.

    %q = qc.linear %x, %wq      (64 rows)       %all = qc.linear %x, %wqkv      (128 rows)
    %k = qc.linear %x, %wk      (32 rows)  ->   %q = tensor.extract_slice %all[…, 0]  [64]
    %v = qc.linear %x, %wv      (32 rows)       %k = tensor.extract_slice %all[…, 64] [32]
                                                %v = tensor.extract_slice %all[…, 96] [32]

The rows of their weights are stacked as they are stored (formats/stacking.py), and so are their biases. The sum of a
row does not depend on other rows, so results are equal to the bit. Linears are merged if their weights have the same
format, layout and element type, and if their epilogues are equal.

A linear stays separate if
- its epilogue reads another tensor, since the epilogue would then need a launch of its own;
- a reader of its result would need a copy of the slice;
- its weight or bias is also read outside the group, or in different groups in different functions.

`separate` has patterns of module paths whose linears stay separate; `*` stands for all of them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.formats import stacking
from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of, set_path
from qcompiler.ir.types import QTensorType, shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda.geometry import MAX_EXTENT
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.linears.copies import is_result, new_copies
from qcompiler.passes.linears.stacked import format_of, nothing_to_add, stacked
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.weights import StoredTensor

Group = list[qc.LinearOp]

MOST_MERGED = 8
"""The most linears in one. The whole result stays in memory until its last part is read."""

_BORDERS = (qc.AttentionOp, qc.BatchMatmulOp, qc.GroupedLinearOp, qc.RecurrentOp)
"""Linears on different sides of such an op are not merged, because the result would stay in memory too long. An example
are the keys and values that every layer of a decoder computes from the encoder's rows."""


@dataclass(frozen=True)
class MergeLinearsPass(ModulePass):
    """Merges the linears of each function that read the same rows."""

    name = "merge-linears"
    separate: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the interpreter's matmul may sum a wider matrix differently

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        _Merging(op, qc_context(ctx), self.separate).run()


@dataclass
class _Merging:
    """The merging of one module. `apart` says for the key of a weight why its linears stay separate."""

    module: ModuleOp
    context: QCContext
    separate: tuple[str, ...]
    apart: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        siblings = [group for function in functions(self.module) for group in _siblings(function)]
        for group in siblings:
            self._look_at(group)
        chosen = [group for each in siblings for group in self._agreeing(each)]
        kept = self._in_one_company(chosen)
        self._report(siblings, kept)
        made: dict[tuple[str, ...], StoredTensor] = {}
        for group in kept:
            self._merge(group, made)

    # --- what may be merged ---

    def _look_at(self, siblings: Group) -> None:
        """Adds to `apart` the linears that cannot be merged with any other."""
        wider = sum(_rows(op) for op in siblings)
        for op in siblings:
            why = self._obstacle(op, wider)
            if why is not None and isinstance(op.w.owner, qc.ConstOp):
                self.apart.setdefault(op.w.owner.key, why)

    def _obstacle(self, op: qc.LinearOp, wider: int) -> str | None:
        for value in (op.w, *([op.bias] if op.bias is not None else [])):
            constant = value.owner
            if not isinstance(constant, qc.ConstOp) or constant.key not in self.context.weights:
                return "its weight is computed"
            if self.context.weights[constant.key].layout != "canonical":
                return "its weight is packed for its kernel already"
        if self._is_named(op):
            return "the recipe keeps it separate"
        if isinstance(unreshaped(op.x).owner, qc.WindowsOp):
            return "it is a convolution"
        if op.extras:
            return "its epilogue reads " + ", ".join(_origin(extra) for extra in op.extras)
        if is_result(op.result):
            return "its result is the program's, or a state's"
        if copies := new_copies(op.result, wider):
            return f"{copies[0]} would read a copy of its result"
        return None

    def _is_named(self, op: qc.LinearOp) -> bool:
        """Whether `separate` names the module or its weight."""
        assert isinstance(op.w.owner, qc.ConstOp)
        paths = self.context.weights[op.w.owner.key].paths
        names = {path_of(op), *paths, *(path.rpartition(".")[0] for path in paths)}
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.separate)

    def _agreeing(self, siblings: Group) -> Iterator[Group]:
        """The groups of two or more siblings that can be merged with each other."""
        classes: list[Group] = []
        for op in siblings:
            if not isinstance(op.w.owner, qc.ConstOp) or op.w.owner.key in self.apart:
                continue
            fitting = next((group for group in classes if self._disagreement([*group, op]) is None), None)
            if fitting is None:
                classes.append([op])
            else:
                fitting.append(op)
        yield from (group for group in classes if len(group) > 1)

    def _disagreement(self, group: Group) -> str | None:
        """Why the last linear of a group cannot be merged with the others, or None."""
        first, last = group[0], group[-1]
        if first.attributes.get(DEVICE) != last.attributes.get(DEVICE):
            return "they are on different devices"
        ours, theirs = self._weight(last), self._weight(first)
        if (ours.format, ours.dtype) != (theirs.format, theirs.dtype):
            return f"the weights are stored as {_stored(theirs)} and as {_stored(ours)}"
        if tensor_dtype(first.result.type) != tensor_dtype(last.result.type):
            return "their results have different types"
        if not first.epilogue.is_structurally_equivalent(last.epilogue):
            return "their epilogues differ"
        biases = {tensor_dtype(op.bias.type) for op in group if op.bias is not None}
        if len(biases) > 1:
            return "their biases have different types"
        if len(set(_constants(group))) < len(_constants(group)):
            return "they share a weight or a bias"
        if sum(map(_rows, group)) > MAX_EXTENT:
            return f"together they have more than {MAX_EXTENT:,} rows"
        fmt = format_of(ours)
        return None if fmt is None else stacking.obstacle(fmt, [_rows(op) for op in group], ours.shape[1])

    def _in_one_company(self, groups: list[Group]) -> list[Group]:
        """The groups whose constants are read by the same group in every function and by nothing else."""
        company: dict[str, set[tuple[str, ...]]] = {}
        for group in groups:
            for key in _constants(group):
                company.setdefault(key, set()).add(tuple(_constants(group)))
        grouped = {op for group in groups for op in group}
        for op in self.module.walk():
            for operand in op.operands:
                constant = operand.owner
                if op not in grouped and isinstance(constant, qc.ConstOp) and constant.key in company:
                    company[constant.key].add(())
        found = []
        for group in groups:
            alone = [key for key in _constants(group) if len(company[key]) > 1]
            for op in group if alone else ():
                self.apart.setdefault(self._weight(op).key, f"'{alone[0]}' is read elsewhere, too")
            if not alone:
                found.append(group)
        return found

    def _weight(self, op: qc.LinearOp) -> StoredTensor:
        assert isinstance(op.w.owner, qc.ConstOp)
        return self.context.weights[op.w.owner.key]

    # --- the report ---

    def _report(self, siblings: list[Group], kept: list[Group]) -> None:
        paths = {path_of(op) for group in kept for op in group}
        said: dict[tuple[str, str], None] = {}
        for group in kept:
            what = f"{len(group)} linears are one of {sum(map(_rows, group))} rows"
            said[joined_paths([path_of(op) for op in group]), what] = None
        for path, what in said:
            self.context.report.add(MergeLinearsPass.name, path, what, "they read the same rows")
        left: dict[tuple[str, str], None] = {}
        for each in siblings:
            for op in each:
                if path_of(op) not in paths:
                    left[path_of(op), self._why_apart(op, each)] = None
        for path, why in left:
            self.context.report.add(MergeLinearsPass.name, path, "linear stays apart", why)

    def _why_apart(self, op: qc.LinearOp, siblings: Group) -> str:
        if isinstance(op.w.owner, qc.ConstOp) and op.w.owner.key in self.apart:
            return self.apart[op.w.owner.key]
        others = [other for other in siblings if other is not op]
        free = [each for each in others if isinstance(each.w.owner, qc.ConstOp) and each.w.owner.key not in self.apart]
        if not isinstance(op.w.owner, qc.ConstOp):
            return "its weight is computed"
        if not free:
            return f"{path_of(others[0])}, which reads the same rows, does"
        return f"beside {path_of(free[0])}: {self._disagreement([free[0], op])}"

    # --- the rewriting ---

    def _merge(self, group: Group, made: dict[tuple[str, ...], StoredTensor]) -> None:
        first, path = group[0], joined_paths([path_of(op) for op in group])
        builder = build.with_path(InsertPoint.before(first), path)
        weight = self._stack(group, [op.w for op in group], made)
        w = builder.insert(_constant(weight, first.w)).result
        bias = None
        if any(op.bias is not None for op in group):
            like = next(op.bias for op in group if op.bias is not None)
            bias = builder.insert(_constant(self._stack(group, [op.bias for op in group], made), like)).result
        shape = (*shape_of(first.x.type)[:-1], weight.shape[0])
        epilogue = first.epilogue.clone() if first.epilogue.blocks else None
        whole = qc.LinearOp(first.x, w, bias, tensor(shape, tensor_dtype(first.result.type)), (), epilogue)
        begun = builder.insert(whole)
        begin = 0
        for op in group:
            sizes, offsets = (*shape[:-1], _rows(op)), [0] * (len(shape) - 1) + [begin]
            part = build.extract_slice(builder, whole.result, offsets, sizes)
            op.result.replace_all_uses_with(build.reshape(builder, part, shape_of(op.result.type)))
            begin += _rows(op)
        _finish(begun, first, path)
        for op in group:
            erase_if_dead(op)

    def _stack(
        self, group: Group, values: Sequence[SSAValue | None], made: dict[tuple[str, ...], StoredTensor]
    ) -> StoredTensor:
        """Replaces the constants `values` by one stacked tensor in the weight store. A missing bias (None) adds
        zero."""
        keys = [value.owner.key for value in values if value is not None and isinstance(value.owner, qc.ConstOp)]
        if tuple(keys) in made:
            return made[tuple(keys)]
        like = self.context.weights[keys[0]]
        tensors = [
            self.context.weights[value.owner.key]
            if value is not None and isinstance(value.owner, qc.ConstOp)
            else nothing_to_add(_rows(op), like.dtype)
            for op, value in zip(group, values, strict=True)
        ]
        tensor_ = made[tuple(keys)] = stacked(joined_paths(keys), tensors)
        self.context.weights.merge(keys, tensor_)
        return tensor_


def _siblings(function: FuncOp) -> list[Group]:
    """The groups of two or more linears that read the same rows, directly or through reshapes."""
    found: dict[tuple[SSAValue, object, int], Group] = {}
    border = 0
    for op in function.body.block.ops:
        if isinstance(op, _BORDERS):
            border += 1
        if isinstance(op, qc.LinearOp):
            found.setdefault((unreshaped(op.x), shape_of(op.x.type)[-1], border), []).append(op)
    return [group[at : at + MOST_MERGED] for group in found.values() for at in range(0, len(group) - 1, MOST_MERGED)]


def _rows(op: qc.LinearOp) -> int:
    return int(shape_of(op.w.type)[0])


def _constants(group: Group) -> list[str]:
    """The keys of a group's weights and biases."""
    values = [value for op in group for value in (op.w, *([op.bias] if op.bias is not None else []))]
    return [value.owner.key for value in values if isinstance(value.owner, qc.ConstOp)]


def _origin(value: SSAValue) -> str:
    owner = unreshaped(value).owner
    return f"the result of '{path_of(owner)}'" if isinstance(owner, Operation) else "an argument"


def _stored(tensor_: StoredTensor) -> str:
    return tensor_.dtype if tensor_.format is None else f"{tensor_.format.name} ({tensor_.dtype})"


def _constant(stored: StoredTensor, like: SSAValue) -> qc.ConstOp:
    """A constant for a stacked tensor. Its type is like that of its parts."""
    if isinstance(like.type, QTensorType):
        assert stored.format is not None
        rows, cols = stored.shape
        return qc.ConstOp(stored.key, QTensorType.of((rows, cols), stored.dtype, stored.format, stored.layout))
    assert isinstance(like.type, TensorType)
    return qc.ConstOp(stored.key, tensor(stored.shape, stored.dtype))


def _finish(begun: Operation, end: Operation, path: str) -> None:
    """Gives the new ops before `end` the device of the ops that they replace."""
    device = end.attributes.get(DEVICE)
    each: Operation | None = end.prev_op
    while each is not None and DEVICE not in each.attributes and device is not None:
        each.attributes[DEVICE] = device
        each = each.prev_op
    set_path(begun, path)
