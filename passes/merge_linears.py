"""merge-linears: linears that read the same rows become one, whose result they are columns of.

    %q = qc.linear %x, %wq      (64 rows)       %all = qc.linear %x, %wqkv      (128 rows)
    %k = qc.linear %x, %wk      (32 rows)  ->   %q = tensor.extract_slice %all[…, 0]  [64]
    %v = qc.linear %x, %wv      (32 rows)       %k = tensor.extract_slice %all[…, 64] [32]
                                                %v = tensor.extract_slice %all[…, 96] [32]

The rows of their weights are put one below the other, as they are stored (formats/stacking.py), and so are biases.  A
row's sum does not depend on the rows beside it: results are the same to the bit.  Merged are linears whose weights
agree in format, layout and element type, and that do the same with a sum.  One that reads another's result in its
epilogue stays what it is: merged, that epilogue would be a launch again.  So does one whose result something would have
to copy first, and one whose weight is read anywhere else in another company.

`separate` are patterns of module paths whose linears stay apart; `*` is all of them.
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
from qcompiler.passes.linears.constants import Constants, constant, finish, keys_of, readers_of, rows_of
from qcompiler.passes.linears.copies import is_result, new_copies
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.paths import joined_paths

Group = list[qc.LinearOp]

MOST = 8
"""Linears in one: all of its result is kept until the last part of it is read."""

_BORDERS = (qc.AttentionOp, qc.BatchMatmulOp, qc.GroupedLinearOp, qc.RecurrentOp)
"""Linears on both sides of such an op are not merged, for the same reason.  The keys and values that every layer of a
decoder makes from the encoder's rows are an example."""


@dataclass(frozen=True)
class MergeLinearsPass(ModulePass):
    """Puts together the linears of each function that read the same rows."""

    name = "merge-linears"
    separate: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the interpreter's matmul may sum a wider matrix in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        _Merging(op, qc_context(ctx), self.separate).run()


@dataclass
class _Merging:
    """One module. `apart`: why the weight of a key stays apart, in every function."""

    module: ModuleOp
    context: QCContext
    separate: tuple[str, ...]
    apart: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants = Constants(self.context)

    def run(self) -> None:
        siblings = [group for function in functions(self.module) for group in _siblings(function)]
        for group in siblings:
            self._look_at(group)
        chosen = [group for each in siblings for group in self._agreeing(each)]
        kept = self._in_one_company(chosen)
        self._report(siblings, kept)
        for group in kept:
            self._merge(group)

    # --- what may be merged ---

    def _look_at(self, siblings: Group) -> None:
        """Fills `apart` with what can be said of each linear alone."""
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
        """Those of them that agree, if there are several."""
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
        """Why the last of a group cannot be put below the others, or None."""
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
        """Groups whose constants nothing else reads: in every function the same ones are together."""
        company: dict[str, set[tuple[str, ...]]] = {}
        for group in groups:
            for key in keys_of(group):
                company.setdefault(key, set()).add(tuple(keys_of(group)))
        grouped = {op for group in groups for op in group}
        for key, readers in readers_of(self.module, list(company)).items():
            if any(op not in grouped for op in readers):
                company[key].add(())
        found = []
        for group in groups:
            alone = [key for key in keys_of(group) if len(company[key]) > 1]
            for op in group if alone else ():
                self.apart.setdefault(self.constants.weight(op).key, f"'{alone[0]}' is read elsewhere, too")
            if not alone:
                found.append(group)
        return found

    # --- the report ---

    def _report(self, siblings: list[Group], kept: list[Group]) -> None:
        paths = {path_of(op) for group in kept for op in group}
        said: dict[tuple[str, str], None] = {}
        for group in kept:
            what = f"{len(group)} linears are one of {sum(map(rows_of, group))} rows"
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

    def _merge(self, group: Group) -> None:
        first, path = group[0], joined_paths([path_of(op) for op in group])
        builder = build.with_path(InsertPoint.before(first), path)
        weight = self.constants.stack(group, [op.w for op in group])
        w = builder.insert(constant(weight, first.w)).result
        bias = None
        if any(op.bias is not None for op in group):
            like = next(op.bias for op in group if op.bias is not None)
            bias = builder.insert(constant(self.constants.stack(group, [op.bias for op in group]), like)).result
        shape = (*shape_of(first.x.type)[:-1], weight.shape[0])
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
    """Linears of a function that read the same rows, directly or through reshapes, where there are several."""
    found: dict[tuple[SSAValue, object, int], Group] = {}
    border = 0
    for op in function.body.block.ops:
        if isinstance(op, _BORDERS):
            border += 1
        if isinstance(op, qc.LinearOp):
            found.setdefault((unreshaped(op.x), shape_of(op.x.type)[-1], border), []).append(op)
    return [group[at : at + MOST] for group in found.values() for at in range(0, len(group) - 1, MOST)]


def _origin(value: SSAValue) -> str:
    owner = unreshaped(value).owner
    return f"the result of '{path_of(owner)}'" if isinstance(owner, Operation) else "an argument"
