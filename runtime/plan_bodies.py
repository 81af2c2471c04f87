"""Checks of a plan's kernels and packed weights: the part of a plan's checks beside its schedule."""

from __future__ import annotations

import math

from qcompiler import formats
from qcompiler.errors import FormatError, PlanError
from qcompiler.kernels import layouts
from qcompiler.plan.plan import Plan, WeightEntry
from qcompiler.plan.verify_kernels import check_kernels


def check_bodies(plan: Plan) -> None:
    """PlanError names the kernel that breaks its contract (plan/contracts.py), or the weight with wrong bytes."""
    check_kernels(plan)
    for weight in plan.weights:
        check_weight(weight)


def check_weight(weight: WeightEntry) -> None:
    """PlanError unless a weight has exactly the bytes that its format and layout need."""
    if weight.format is None and weight.layout == "canonical":
        return  # verify_plan checks the size of plain values
    if len(weight.shape) != 2 or min(weight.shape) < 1:
        raise PlanError(f"the packed weight '{weight.name}' has the shape {list(weight.shape)}, not (rows, cols)")
    try:
        fmt = None if weight.format is None else formats.get(weight.format.name, **weight.format.params)
        nbytes = layouts.get(weight.layout).nbytes(fmt, weight.dtype, *weight.shape)
    except FormatError as error:
        raise PlanError(f"the weight '{weight.name}' of {math.prod(weight.shape)} values: {error}") from error
    if nbytes != weight.nbytes:
        raise PlanError(
            f"the weight '{weight.name}' has {weight.nbytes} bytes, its layout {weight.layout!r} needs {nbytes}"
        )
