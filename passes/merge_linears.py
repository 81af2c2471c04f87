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

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda.geometry import MAX_EXTENT
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.linears.constants import Constants, finish, keys_of, read_elsewhere, rows_of
from qcompiler.passes.linears.copies import is_result, new_copies
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.paths import joined_paths

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

    def __post_init__(self) -> None:
        self.constants = Constants(self.context)

    def run(self) -> None:
        siblings = _in_one_order([group for function in functions(self.module) for group in _siblings(function)])
        for group in siblings:
            self._look_at(group)
        chosen = [group for each in siblings for group in self._agreeing(each)]
        kept = self._in_one_company(chosen)
        self._report(siblings, kept)
        for group in kept:
            self._merge(group)

    # --- what may be merged ---

    def _look_at(self, siblings: Group) -> None:
        """Adds to `apart` the linears that cannot be merged with any other."""
        wider = sum(rows_of(op) for op in siblings)
        for op in siblings:
            why = self._obstacle(op, wider)
            if why is not None and isinstance(op.w.owner, qc.ConstOp):
                self.apart.setdefault(op.w.owner.key, why)

    def _obstacle(self, op: qc.LinearOp, wider: int) -> str | None:
        why = self.constants.obstacle(op, self.separate)
        if why is not None:
            return why
        if op.combines_pairs:
            return "its epilogue combines the halves of its own rows"
        if op.extras:
            return "its epilogue reads " + ", ".join(_origin(extra) for extra in op.extras)
        if is_result(op.result):
            return "its result is the program's, or a state's"
        if copies := new_copies(op.result, wider):
            return f"{copies[0]} would read a copy of its result"
        return None

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
        if tensor_dtype(first.result.type) != tensor_dtype(last.result.type):
            return "their results have different types"
        if not first.epilogue.is_structurally_equivalent(last.epilogue):
            return "their epilogues differ"
        if sum(map(rows_of, group)) > MAX_EXTENT:
            return f"together they have more than {MAX_EXTENT:,} rows"
        return self.constants.disagreement(group)

    def _in_one_company(self, groups: list[Group]) -> list[Group]:
        """The groups whose constants are read by the same group in every function and by nothing else."""
        shared = read_elsewhere(self.module, groups)
        found = []
        for group in groups:
            alone = [key for key in keys_of(group) if key in shared]
            for op in group if alone else ():
                self.apart.setdefault(self.constants.weight(op).key, f"'{alone[0]}' is read elsewhere, too")
            if not alone:
                found.append(group)
        return found

    # --- the report ---

    def _report(self, siblings: list[Group], kept: list[Group]) -> None:
        paths = {path_of(op) for group in kept for op in group}
        for group in kept:
            what, path = f"{len(group)} linears are one of {sum(map(rows_of, group))} rows", [*map(path_of, group)]
            self.context.report.add_once(MergeLinearsPass.name, joined_paths(path), what, "they read the same rows")
        for each in siblings:
            for op in each:
                if path_of(op) not in paths:
                    why = self._why_apart(op, each)
                    self.context.report.add_once(MergeLinearsPass.name, path_of(op), "linear stays apart", why)

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

    def _merge(self, group: Group) -> None:
        first, path = _first_of(group), joined_paths([path_of(op) for op in group])
        builder = build.with_path(InsertPoint.before(first), path)
        w, bias = self.constants.insert(builder, group)
        shape = (*shape_of(first.x.type)[:-1], shape_of(w.type)[0])
        epilogue = first.epilogue.clone() if first.epilogue.blocks else None
        whole = qc.LinearOp(first.x, w, bias, tensor(shape, tensor_dtype(first.result.type)), (), epilogue)
        begun = builder.insert(whole)
        begin = 0
        for op in group:
            sizes, offsets = (*shape[:-1], rows_of(op)), [0] * (len(shape) - 1) + [begin]
            part = build.extract_slice(builder, whole.result, offsets, sizes)
            op.result.replace_all_uses_with(build.reshape(builder, part, shape_of(op.result.type)))
            begin += rows_of(op)
        finish(begun, first, path)
        for op in group:
            erase_if_dead(op)


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


def _in_one_order(groups: list[Group]) -> list[Group]:
    """The groups, each with its linears in the order in which the module names their weights first. Functions may have
    them in different orders, and the rows of a merged weight stand in one."""
    keys = [_key(op) for group in groups for op in group]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [sorted(group, key=lambda op: order[_key(op)]) for group in groups]


def _key(op: qc.LinearOp) -> str:
    """The weight's key; "" for a computed weight."""
    return op.w.owner.key if isinstance(op.w.owner, qc.ConstOp) else ""


def _first_of(group: Group) -> qc.LinearOp:
    """The linear that stands before the others."""
    first = group[0]
    for op in group[1:]:
        first = op if op.is_before_in_block(first) else first
    return first


def _origin(value: SSAValue) -> str:
    owner = unreshaped(value).owner
    return f"the result of '{path_of(owner)}'" if isinstance(owner, Operation) else "an argument"
