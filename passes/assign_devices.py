"""assign-devices: every op gets a device; a value that crosses gets an explicit copy.

    before  %h = qc.linear %x, %w0 {qc.path = "layers.0"}
            %y = qc.linear %h, %w1 {qc.path = "layers.1"}
    after   %h = qc.linear %x, %w0 {qc.device = "cuda:0"}
            %c = qc.copy %h from "cuda:0" to "cuda:1"
            %y = qc.linear %c, %w1 {qc.device = "cuda:1"}

The device map gives module-path prefixes; the longest prefix wins, the first device of the context is the default.
Arguments and results are on the default device.  Constants are placed where they are used, once for each device that
uses them, and views of them with them; a view of a computed value stays with the value.  A state lives where it is
first used.  What `@init` computes on the default device it copies, once, to the others that read it.  No other pass
chooses a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.dialects.tensor import ExtractSliceOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.errors import DeviceAssignmentError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import (
    INIT,
    functions,
    init_func,
    path_of,
    result_keys,
    return_op,
    set_result_keys,
    update_function_type,
)
from qcompiler.ir.qc import ConstOp, CopyOp, DimOp, StateOp, StateUpdateOp
from qcompiler.passes.lowering.places import VIEWS
from qcompiler.passes.support.states_on_devices import state_devices

DEVICE = "qc.device"
Placements = dict[tuple[str, str], list[ConstOp]]
"""Constants by key and device."""

_PLACED_BY_USERS = ("arith.constant", "tensor.empty", "linalg.fill")


@dataclass(frozen=True)
class DeviceMap:
    """Module-path prefixes to device names; `default` serves what no prefix matches."""

    default: str
    prefixes: tuple[tuple[str, str], ...]

    def device_for(self, path: str) -> str:
        best = max(
            (p for p in self.prefixes if not p[0] or path == p[0] or path.startswith(p[0] + ".")),
            key=lambda p: len(p[0]),
            default=("", self.default),
        )
        return best[1]


def device_of(value: SSAValue) -> str | None:
    """The device a value lives on; None for arguments (they live on the default device) and for sizes."""
    owner = value.owner
    attribute = owner.attributes.get(DEVICE) if isinstance(owner, Operation) else None
    return attribute.data if isinstance(attribute, StringAttr) else None


@dataclass(frozen=True)
class AssignDevicesPass(ModulePass):
    """Sets `qc.device` on every op of every function and inserts `qc.copy` where a value crosses."""

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
            _Placing(init, DeviceMap(devices.default, ()), {}).run()
        read: Placements = {}
        for function in entries:
            placing = _Placing(function, devices, states)
            placing.run()
            for place, constants in placing.constants.items():
                read.setdefault(place, []).extend(constants)
            check_devices(function, devices.default)
        if init is not None:
            _spread_init(init, read, devices.default)
            check_devices(init, devices.default)
        if len(context.devices) > 1:
            _report(entries, context)


@dataclass
class _Placing:
    """One function: what was copied, or made a second time, for which device."""

    function: FuncOp
    devices: DeviceMap
    states: dict[str, str]
    copies: dict[tuple[SSAValue, str], SSAValue] = field(default_factory=dict)
    constants: Placements = field(default_factory=dict)

    def run(self) -> None:
        for op in list(self.function.body.block.ops):
            if isinstance(op, DimOp) or _floats(op):
                continue  # sizes have no device; constants, their views and destinations are placed by their users
            device = self._device_for(op)
            op.attributes[DEVICE] = StringAttr(device)
            self._bring_operands(op, device, op)

    def _device_for(self, op: Operation) -> str:
        if isinstance(op, StateOp | StateUpdateOp):
            return self.states[op.key]
        if isinstance(op, VIEWS):
            return device_of(op.operands[0]) or self.devices.default
        return self.devices.default if op.name == "func.return" else self.devices.device_for(path_of(op))

    def _bring_operands(self, op: Operation, device: str, user: Operation) -> None:
        for index, operand in enumerate(op.operands):
            if not isinstance(operand.owner, DimOp):
                op.operands[index] = self._on_device(operand, device, user)

    def _on_device(self, value: SSAValue, device: str, user: Operation) -> SSAValue:
        """`value` where `user` needs it: itself, a second placement of a constant, or a copy in front of the user."""
        owner = value.owner
        if isinstance(owner, Operation) and DEVICE not in owner.attributes and _floats(owner):
            self._place(owner, device)
        source = device_of(value) or self.devices.default
        if source == device:
            return value
        if (value, device) not in self.copies:
            self.copies[value, device] = self._brought(value, source, device, user)
        return self.copies[value, device]

    def _brought(self, value: SSAValue, source: str, device: str, user: Operation) -> SSAValue:
        """A view is taken again of what it views, there; a part is cut out first, and then crosses."""
        owner, block = value.owner, self.function.body.block
        if isinstance(owner, Operation) and _floats(owner):
            clone = owner.clone()
            block.insert_op_after(clone, owner)
            self._place(clone, device)
            return clone.results[0]
        if isinstance(owner, VIEWS) and not isinstance(owner, ExtractSliceOp):
            clone = owner.clone()
            clone.attributes[DEVICE] = StringAttr(device)
            block.insert_op_before(clone, user)
            self._bring_operands(clone, device, clone)
            return clone.results[0]
        crossing = CopyOp(value, source=source, target=device)
        crossing.attributes["qc.path"] = StringAttr(path_of(user))
        crossing.attributes[DEVICE] = StringAttr(device)
        block.insert_op_before(crossing, user)
        return crossing.result

    def _place(self, op: Operation, device: str) -> None:
        op.attributes[DEVICE] = StringAttr(device)
        if isinstance(op, ConstOp):
            self.constants.setdefault((op.key, device), []).append(op)
        self._bring_operands(op, device, op)


def _floats(op: Operation) -> bool:
    """Constants, views of them, and destinations: made where they are used, once for each device."""
    while isinstance(op, VIEWS) and isinstance(op.operands[0].owner, Operation):
        op = op.operands[0].owner
    return isinstance(op, ConstOp) or op.name in _PLACED_BY_USERS


def _spread_init(init: FuncOp, read: Placements, default: str) -> None:
    """Gives `@init` a result for each device that reads one: "init.0", and "init.0.cuda1" for the copy on cuda:1."""
    last = return_op(init)
    keys: list[str] = []
    values: list[SSAValue] = []
    for key, value in zip(result_keys(init), last.operands, strict=True):
        for device in [where for each, where in read if each == key] or [default]:
            if device == default:
                keys.append(key)
                values.append(value)
                continue
            crossing = CopyOp(value, source=default, target=device)
            crossing.attributes[DEVICE] = StringAttr(device)
            init.body.block.insert_op_before(crossing, last)
            keys.append(f"{key}.{device.replace(':', '')}")
            values.append(crossing.result)
            for const in read[key, device]:
                const.sym = SymbolRefAttr(keys[-1])
    last.operands = values
    set_result_keys(init, keys)
    update_function_type(init)


def check_devices(function: FuncOp, default: str) -> None:
    """DeviceAssignmentError unless every operand lives on its op's device; only a copy crosses."""
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
            what = f"{function.sym_name.data}: {len(ops)} ops on {device}"
            arriving = sum(op.target.data == device for op in crossing)
            context.report.add(AssignDevicesPass.name, "", what, f"{arriving} values are copied there in each call")
