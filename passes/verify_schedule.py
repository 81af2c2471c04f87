"""verify-schedule: refuses a schedule that is not safe to run. It changes nothing.

    rt.launch @linear_0 [#rt.view<@b0, …>]          refused (no-stream): it names no stream
    rt.launch @linear_0 on @s1 [#rt.view<@b0, …>]   refused (unordered-read): … record an event … and wait for it here

The rules are those of qcompiler/plan/verify.py, which also checks every program file at load. docs/schedule.md lists
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.ir.context import qc_context
from qcompiler.ir.rt_plan import plan_from_rt, skeleton_kernels
from qcompiler.plan.verify import verify_plan


@dataclass(frozen=True)
class VerifySchedulePass(ModulePass):
    """ScheduleError at the first broken rule."""

    name = "verify-schedule"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        weights = qc_context(ctx).weights
        verify_plan(plan_from_rt(op, skeleton_kernels(op), weights, weights.moved))
