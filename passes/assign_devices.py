"""assign-devices: gives every op a device, and inserts a copy where a value crosses devices.

    before  %h = qc.linear %x, %w0 {qc.path = "layers.0"}
            %y = qc.linear %h, %w1 {qc.path = "layers.1"}
    after   %h = qc.linear %x, %w0 {qc.device = "cuda:0"}
            %c = qc.copy %h from "cuda:0" to "cuda:1"
            %y = qc.linear %c, %w1 {qc.device = "cuda:1"}

The device map gives a device for module-path prefixes; the longest matching prefix wins. The default is the context's
first device, which also has the arguments and results. A constant is placed on each device that uses it, together with
the views of it. A view of a computed value stays on the value's device. A state is on the device of its first use.
`@init` computes on the default device, and copies its results once to the other devices that read them. No other pass
chooses a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.passes import ModulePass

from qcompiler.errors import DeviceAssignmentError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import INIT, functions, init_func, path_of
from qcompiler.ir.qc import CopyOp, DimOp
from qcompiler.passes.devices.placing import DEVICE, DeviceMap, Placements, Placing, device_of, spread_init
from qcompiler.passes.devices.states_on_devices import state_devices
from qcompiler.units import counted


@dataclass(frozen=True)
class AssignDevicesPass(ModulePass):
    """Sets `qc.device` on every op of every function, and inserts `qc.copy` where a value crosses devices."""

    name = "assign-devices"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        devices = DeviceMap(context.devices[0], tuple(context.device_map.items()))
        for prefix, device in devices.prefixes:
            if device not in context.devices:
                raise DeviceAssignmentError(
                    f"the device map sends '{prefix}' to '{device}', which is not among the program's devices "
                    f"({', '.join(context.devices)})"
                )
        entries = [function for function in functions(op) if function.sym_name.data != INIT]
        states = state_devices(entries, devices.device_for)
        init = init_func(op)
        if init is not None:
            Placing(init, DeviceMap(devices.default, ()), {}).run()
        read: Placements = {}
        for function in entries:
            placing = Placing(function, devices, states)
            placing.run()
            for place, constants in placing.constants.items():
                read.setdefault(place, []).extend(constants)
            check_devices(function, devices.default)
        if init is not None:
            spread_init(init, read, devices.default)
            check_devices(init, devices.default)
        if len(context.devices) > 1:
            _report(entries, context)


def check_devices(function: FuncOp, default: str) -> None:
    """DeviceAssignmentError unless every operand is on its op's device. Only a copy may read another device."""
    for op in function.body.block.ops:
        device = op.attributes.get(DEVICE)
        if isinstance(op, DimOp | CopyOp) or not isinstance(device, StringAttr):
            continue
        if op.name == "func.return" and function.sym_name.data == INIT:
            continue  # its results are on the devices that read them
        for operand in op.operands:
            if isinstance(operand.owner, DimOp):
                continue
            actual = device_of(operand) or default
            if actual != device.data:
                raise DeviceAssignmentError(
                    f"{op.name} at '{path_of(op)}' runs on {device.data} but reads a value on {actual}; "
                    "only qc.copy may cross devices"
                )


def _report(entries: list[FuncOp], context: QCContext) -> None:
    for function in entries:
        crossing = [op for op in function.body.block.ops if isinstance(op, CopyOp)]
        for device in context.devices:
            ops = [op for op in function.body.block.ops if op.attributes.get(DEVICE) == StringAttr(device)]
            what = f"{function.sym_name.data}: {counted(len(ops), 'op')} on {device}"
            arriving = sum(op.target.data == device for op in crossing)
            why = f"{counted(arriving, 'value is', 'values are')} copied there in each call"
            context.report.add(AssignDevicesPass.name, "", what, why)
