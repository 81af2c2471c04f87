"""The order in which a gather walks its result, on any target."""

from __future__ import annotations

from qcompiler.plan.kernel import Operand
from qcompiler.plan.kinds.gather import GatherKernel


def counts_fastest(body: GatherKernel, out: Operand) -> bool:
    """Whether the axis, and not the dim behind it, is contiguous in the result's memory."""
    return body.mode == "along" and out.strides[1] == 1 and out.strides[2] != 1


__all__ = ["counts_fastest"]
