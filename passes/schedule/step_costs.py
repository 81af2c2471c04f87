"""Estimated times of an entry's steps, at the largest sizes that the entry takes."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.context import Context

from qcompiler.ir.context import QCContext
from qcompiler.ir.rt import CopyOp, KernelOp, LaunchOp, SelectOp, StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.kernels.cost import (
    DEFAULT_GPU,
    GPUS,
    NO_COST,
    Cost,
    DeviceCost,
    copy_cost,
    device_cost,
    launch_cost,
    unknown_cost,
)
from qcompiler.passes.emit_kernels import kernel_specs
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.plan import View, taken


class StepCosts:
    """Estimated costs of steps. For a kernel without a region (schedules written by hand), only the operands' bytes
    count."""

    def __init__(self, schedule: Schedule, ctx: Context) -> None:
        self._schedule = schedule
        self._cpu_only = all(each.record.kind == "cpu" for each in schedule.devices.values())
        self._specs: dict[str, KernelSpec] | None = None
        target = ctx.target.isa if isinstance(ctx, QCContext) else ""
        self.isa = target if target in GPUS else DEFAULT_GPU

    @property
    def gpu(self) -> DeviceCost:
        """The figures of the target's GPU."""
        return device_cost(self.isa)

    def device(self, name: str) -> DeviceCost:
        """The figures of one of the schedule's devices."""
        return device_cost(self.isa, self._schedule.devices[name].record.kind)

    def of(self, step: StepOp, device: str, symbols: Mapping[str, int]) -> Cost:
        """One step on the device whose stream it will run on. Library calls (whose
        work is unknown), records and waits cost nothing."""
        figures = self.device(device)
        if self._cpu_only:
            return NO_COST  # there is nothing to choose
        match step:
            case CopyOp():
                source, target = step.view_records
                homes = {self._schedule.device_of(view.buffer) for view in (source, target)}
                return copy_cost(self._nbytes(source, symbols), figures, crossing=len(homes) > 1)
            case LaunchOp():
                return self._launch(step.kernel_name, device, figures, symbols)
            case SelectOp():
                value = dim(step.on.data).evaluate(symbols)
                cases = [case.record for case in step.cases]
                return self._launch((taken(cases, value) or cases[-1]).kernel, device, figures, symbols)
            case _:
                return NO_COST

    def _launch(self, name: str, device: str, figures: DeviceCost, symbols: Mapping[str, int]) -> Cost:
        kernel: KernelOp = self._schedule.kernels[name]
        if self._specs is None:
            self._specs = kernel_specs(self._schedule.module)
        if name not in self._specs:
            return unknown_cost(kernel.operand_records, symbols, figures)
        kind = self._schedule.devices[device].record.kind
        return launch_cost(self._specs[name], symbols, figures, self.isa, kind)

    def _nbytes(self, view: View, symbols: Mapping[str, int]) -> int:
        if view.format is not None:
            return self._schedule.buffers[view.buffer].nbytes.value.data
        return product(view.shape).evaluate(symbols) * ITEMSIZE[view.dtype]
