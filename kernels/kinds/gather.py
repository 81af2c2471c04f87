"""Gather along one dim: `take` (one index list for all) and `along` (one index per element)."""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Copy, Index, Items
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.gather import GatherKernel

BLOCK = 4096


def form(spec: KernelSpec) -> Items:
    """An item copies elements that lie side by side in the result."""
    body = spec.body
    assert isinstance(body, GatherKernel)
    out = spec.operands[2]
    mid, run = Axis("i", body.count), Axis("n", body.inner)
    if body.mode == "along" and out.strides[1] == 1 and out.strides[2] != 1:
        mid, run = run, mid
    return Items(
        note=f"gather ({body.mode})",
        outer=(Axis("o", body.outer), mid),
        run=run,
        block=BLOCK,
        index=Index(("i",) if body.mode == "take" else ("o", "i", "n"), body.length),
        step=Copy("out", ("o", "i", "n"), "x", ("o", "at", "n")),
        cost=4,
    )
