"""assign-devices: every op gets a device; a value that crosses gets an explicit copy.

    before  %h = qc.linear %x, %w0 {qc.path = "layers.0"}
            %y = qc.linear %h, %w1 {qc.path = "layers.1"}
    after   %h = qc.linear %x, %w0 {qc.device = "cuda:0"}
            %c = qc.copy %h from "cuda:0" to "cuda:1"
            %y = qc.linear %c, %w1 {qc.device = "cuda:1"}

The device map gives module-path prefixes; the longest prefix wins, the first device of the context is the default.
Constants are placed where they are used, once for each device that uses them.  No other pass chooses a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.errors import DeviceAssignmentError
from qcompiler.ir.context import qc_context
from qcompiler.ir.module import path_of
from qcompiler.ir.qc import ConstOp, CopyOp, DimOp

DEVICE = "qc.device"
_PLACED_BY_USERS = ("arith.constant", "tensor.empty", "linalg.fill")


@dataclass(frozen=True)
class DeviceMap:
    """Module-path prefixes to device names; `default` serves what no prefix matches."""

    default: str
    prefixes: tuple[tuple[str, str], ...]

    def device_for(self, path: str) -> str:
        best = max(
            (p for p in self.prefixes if path == p[0] or path.startswith(p[0] + ".")),
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
        for function in op.body.block.ops:
            if isinstance(function, FuncOp):
                _assign(function, devices)
                _check(function, devices.default)


def _assign(function: FuncOp, devices: DeviceMap) -> None:
    copies: dict[tuple[SSAValue, str], SSAValue] = {}
    for op in list(function.body.block.ops):
        if isinstance(op, DimOp | ConstOp) or op.name in _PLACED_BY_USERS:
            continue  # sizes have no device; constants and destinations are placed by their users below
        is_return = op.name == "func.return"
        device = devices.default if is_return else devices.device_for(path_of(op))
        op.attributes[DEVICE] = StringAttr(device)
        for index, operand in enumerate(op.operands):
            if isinstance(operand.owner, DimOp):
                continue
            op.operands[index] = _on_device(operand, device, op, devices.default, copies)


def _on_device(
    value: SSAValue, device: str, user: Operation, default: str, copies: dict[tuple[SSAValue, str], SSAValue]
) -> SSAValue:
    """`value` where `user` needs it: itself, a second placement of a constant, or a copy in front of the user."""
    owner = value.owner
    if isinstance(owner, Operation) and DEVICE not in owner.attributes and _is_placeless(owner):
        owner.attributes[DEVICE] = StringAttr(device)
        return value
    source = device_of(value) or default
    if source == device:
        return value
    if (value, device) not in copies:
        block = user.parent_block()
        assert block is not None
        crossing: Operation
        if isinstance(owner, Operation) and _is_placeless(owner):
            crossing = owner.clone()
            block.insert_op_after(crossing, owner)
        else:
            crossing = CopyOp(value, source=source, target=device)
            crossing.attributes["qc.path"] = StringAttr(path_of(user))
            block.insert_op_before(crossing, user)
        crossing.attributes[DEVICE] = StringAttr(device)
        copies[value, device] = crossing.results[0]
    return copies[value, device]


def _is_placeless(op: Operation) -> bool:
    """Constants and destinations: made where they are used, once for each device."""
    return isinstance(op, ConstOp) or op.name in _PLACED_BY_USERS


def _check(function: FuncOp, default: str) -> None:
    """Every tensor operand lives on its op's device; only a copy crosses."""
    for op in function.body.block.ops:
        device = op.attributes.get(DEVICE)
        if isinstance(op, DimOp | CopyOp) or not isinstance(device, StringAttr):
            continue
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, DimOp) or (isinstance(owner, Operation) and _is_placeless(owner)):
                continue
            actual = device_of(operand) or default
            if actual != device.data:
                raise DeviceAssignmentError(
                    f"{op.name} at '{path_of(op)}' runs on {device.data} but reads a value on {actual}; "
                    "only qc.copy may cross devices"
                )
