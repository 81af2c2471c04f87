"""The declarations and entries of an rt module, by name."""

from __future__ import annotations

from typing import TypeVar

from xdsl.dialects.builtin import ModuleOp

from qcompiler.errors import PlanError, ScheduleError
from qcompiler.ir.rt import (
    ArenaOp,
    BufferOp,
    CopyOp,
    DeviceOp,
    EntryOp,
    EventOp,
    KernelOp,
    LaunchOp,
    NamedOp,
    SelectOp,
    StepOp,
    StreamOp,
    TorchCallOp,
    name_of,
)
from qcompiler.plan.plan import View

_Named = TypeVar("_Named", bound=NamedOp)


def _by_name(module: ModuleOp, kind: type[_Named]) -> dict[str, _Named]:
    found: dict[str, _Named] = {}
    for op in module.body.block.ops:
        if isinstance(op, kind):
            if op.sym in found:
                raise ScheduleError(f"two {op.name} ops are named @{op.sym}; rename one", rule="duplicate-name")
            found[op.sym] = op
    return found


class Schedule:
    """The declarations and entries of an rt module, by name. A snapshot: make a new one after changing the module.

    ScheduleError (duplicate-name) if two declarations of one kind have the same name.
    """

    def __init__(self, module: ModuleOp) -> None:
        self.module = module
        self.devices = _by_name(module, DeviceOp)
        self.streams = _by_name(module, StreamOp)
        self.events = _by_name(module, EventOp)
        self.arenas = _by_name(module, ArenaOp)
        self.buffers = _by_name(module, BufferOp)
        self.kernels = _by_name(module, KernelOp)
        self.entries = _by_name(module, EntryOp)

    def device_of(self, buffer: str) -> str:
        """The device a buffer lives on. PlanError for a name that is not declared."""
        if buffer not in self.buffers:
            raise PlanError(f"no buffer is named '{buffer}'")
        arena = self.buffers[buffer].arena_name
        if arena not in self.arenas:
            raise PlanError(f"buffer '{buffer}' lies in the arena '{arena}', which is not declared")
        return name_of(self.arenas[arena].device)

    @staticmethod
    def kernels_of(step: StepOp) -> list[str]:
        """The kernels that a step may run; none for a step that is no launch."""
        match step:
            case LaunchOp():
                return [step.kernel_name]
            case SelectOp():
                return [case.record.kernel for case in step.cases]
        return []

    def accesses(self, step: StepOp) -> tuple[tuple[View, str], ...]:
        """Every view that a step touches, with "r", "w" or "rw". Record and wait touch none."""
        match step:
            case LaunchOp() | SelectOp():
                kernels = self.kernels_of(step)
            case CopyOp():
                return (step.source.record, "r"), (step.target.record, "w")
            case TorchCallOp():
                reads = tuple((view.record, "r") for view in step.inputs)
                return reads + tuple((view.record, "w") for view in step.outputs)
            case _:
                return ()
        for kernel in kernels:
            if kernel not in self.kernels:
                raise PlanError(f"no kernel is named '{kernel}'")
        operands = self.kernels[kernels[0]].operand_records
        return tuple((v, o.access) for v, o in zip(step.view_records, operands, strict=True))
