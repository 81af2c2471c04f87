"""Which parameters of a program have other values than in the model: the record of a plan, and its one reader.

    plan.moved    (MovedParameter("o_proj.weight", ("rotate-hidden", "smooth-scales")), …)

Whatever takes a stored matrix for the weight of a module asks `why_moved` first: a merge of an adapter, a conversion
of a program to a checkpoint, a comparison of layers with the float model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qcompiler.errors import ScheduleError
from qcompiler.plan.kinds.hadamard import HadamardKernel
from qcompiler.plan.plan import MovedParameter, Plan, Rewrite
from qcompiler.units import counted

Moved = Mapping[str, tuple[Rewrite, ...]]
"""What moved each parameter, by its path."""

UNKNOWN = (
    "the program does not record which of its weights are the model's own, since it was written before programs did: "
    "compile it again"
)


def record(moved: Moved | None, stored: Collection[str]) -> tuple[MovedParameter, ...] | None:
    """The record of a plan that stores the parameters `stored`."""
    if moved is None:
        return None
    return tuple(MovedParameter(parameter=path, by=by) for path, by in moved.items() if by and path in stored)


def moved_of(plan: Plan) -> Moved | None:
    """What moved each parameter; None if the plan does not record it."""
    return None if plan.moved is None else {each.parameter: each.by for each in plan.moved}


def why_moved(plan: Plan, parameters: Collection[str] | None = None) -> str:
    """Why stored values of `parameters` (None: any of the program's) are not the model's; "" if they are.

    A plan without a record is a reason, too.
    """
    moved = moved_of(plan)
    if moved is None:
        return UNKNOWN
    found = next((path for path in moved if parameters is None or path in parameters), None)
    return "" if found is None else f"'{found}' has other values than in the model ({', '.join(moved[found])})"


def counts(plan: Plan) -> dict[str, int] | None:
    """How many parameters each rewrite moved; None if the plan does not record it."""
    if plan.moved is None:
        return None
    found: dict[str, int] = {}
    for each in plan.moved:
        for name in each.by:
            found[name] = found.get(name, 0) + 1
    return found


def moved_text(found: Mapping[str, int] | None) -> str:
    """`counts` as one line."""
    if found is None:
        return "not recorded: the file is older than this record"
    return ", ".join(f"{counted(count, 'parameter')} by {name}" for name, count in found.items()) or "none"


def check_moved(plan: Plan) -> None:
    """ScheduleError for a record that names a parameter twice, one that is not stored, or nothing that moved it; and
    for one that leaves out the weight behind a transform of a linear's input."""
    stored = {path for weight in plan.weights for path in weight.paths}
    seen: set[str] = set()
    for each in plan.moved or ():
        if each.parameter in seen or each.parameter not in stored or not each.by:
            raise ScheduleError(
                f"the plan records that '{each.parameter}' was moved by {list(each.by)}; it must be a stored "
                "parameter, named once, with what moved it",
                rule="moved-parameter",
            )
        seen.add(each.parameter)
    transforms = next((kernel for kernel in plan.kernels if isinstance(kernel.body, HadamardKernel)), None)
    if plan.moved is not None and transforms is not None and "rotate-online" not in (counts(plan) or {}):
        raise ScheduleError(
            f"kernel '{transforms.name}' transforms the input of a linear, and the plan records no weight that was "
            "moved by rotate-online",
            rule="moved-parameter",
        )


__all__ = ["UNKNOWN", "Moved", "check_moved", "counts", "moved_of", "moved_text", "record", "why_moved"]
