"""The declarations and entries of an rt module, by name."""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from qcompiler.errors import PlanError
from qcompiler.ir.rt import (
    ArenaOp,
    BufferOp,
    CopyOp,
    DeviceOp,
    EntryOp,
    EventOp,
    KernelOp,
    LaunchOp,
    LibraryCallOp,
    SelectOp,
    StepOp,
    StreamOp,
    name_of,
)
from qcompiler.plan.plan import View


class Schedule:
    """The declarations and entries of an rt module, by name. A snapshot: make a new one after changing the module."""

    def __init__(self, module: ModuleOp) -> None:
        self.module = module
        ops = list(module.body.block.ops)
        self.devices = {o.sym: o for o in ops if isinstance(o, DeviceOp)}
        self.streams = {o.sym: o for o in ops if isinstance(o, StreamOp)}
        self.events = {o.sym: o for o in ops if isinstance(o, EventOp)}
        self.arenas = {o.sym: o for o in ops if isinstance(o, ArenaOp)}
        self.buffers = {o.sym: o for o in ops if isinstance(o, BufferOp)}
        self.kernels = {o.sym: o for o in ops if isinstance(o, KernelOp)}
        self.entries = {o.sym: o for o in ops if isinstance(o, EntryOp)}

    def device_of(self, buffer: str) -> str:
        """The device a buffer lives on. PlanError for a name that is not declared."""
        if buffer not in self.buffers:
            raise PlanError(f"no buffer is named '{buffer}'")
        arena = self.buffers[buffer].arena_name
        if arena not in self.arenas:
            raise PlanError(f"buffer '{buffer}' lies in the arena '{arena}', which is not declared")
        return name_of(self.arenas[arena].device)

    def accesses(self, step: StepOp) -> tuple[tuple[View, str], ...]:
        """Every view a step touches with "r", "w" or "rw"; record and wait touch none."""
        match step:
            case LaunchOp():
                kernels = [step.kernel_name]
            case SelectOp():
                kernels = [c.record.kernel for c in step.cases]
            case CopyOp():
                return (step.source.record, "r"), (step.target.record, "w")
            case LibraryCallOp():
                writes = set(step.record.writes)
                return tuple((v, "rw" if i in writes else "r") for i, v in enumerate(step.view_records))
            case _:
                return ()
        for kernel in kernels:
            if kernel not in self.kernels:
                raise PlanError(f"no kernel is named '{kernel}'")
        operands = self.kernels[kernels[0]].operand_records
        return tuple((v, o.access) for v, o in zip(step.view_records, operands, strict=True))
