"""In which order a gather walks its result, on any target."""

from __future__ import annotations

from qcompiler.plan.kernel import Operand
from qcompiler.plan.kinds.gather import GatherKernel


def counts_fastest(body: GatherKernel, out: Operand) -> bool:
    """Whether neighbours in the result's memory differ in their place along the axis, and not behind it."""
    return body.mode == "along" and out.strides[1] == 1 and out.strides[2] != 1


__all__ = ["counts_fastest"]
