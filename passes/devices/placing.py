"""Gives ops, constants and the results of `@init` their devices, one function at a time (the work of assign-devices).

%w = qc.const @w                         %w = qc.const @w {qc.device = "cuda:0"}
%a = qc.linear %x, %w {layers.0}         %v = qc.const @w {qc.device = "cuda:1"}         once for each device
%b = qc.linear %a, %w {layers.1}    ->   %a = qc.linear %x, %w
                                         %c = qc.copy %a from "cuda:0" to "cuda:1"       once for each device
                                         %b = qc.linear %c, %v
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects.builtin import StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.dialects.tensor import ExtractSliceOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir.module import path_of, result_keys, return_op, set_result_keys, update_function_type
from qcompiler.ir.qc import ConstOp, CopyOp, DimOp, StateOp, StateUpdateOp
from qcompiler.passes.views.views import VIEWS

DEVICE = "qc.device"

Placements = dict[tuple[str, str], list[ConstOp]]
"""Constants, by key and device."""

_PLACED_BY_USERS = ("arith.constant", "tensor.empty", "linalg.fill")


@dataclass(frozen=True)
class DeviceMap:
    """Maps module-path prefixes to device names. `default` is for paths that match no prefix."""

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
    """The device a value lives on. None for arguments (they live on the default device) and for sizes."""
    owner = value.owner
    attribute = owner.attributes.get(DEVICE) if isinstance(owner, Operation) else None
    return attribute.data if isinstance(attribute, StringAttr) else None


@dataclass
class Placing:
    """Places one function, and remembers which values it has copied or made again for which device."""

    function: FuncOp
    devices: DeviceMap
    states: dict[str, str]
    copies: dict[tuple[SSAValue, str], SSAValue] = field(default_factory=dict)
    constants: Placements = field(default_factory=dict)

    def run(self) -> None:
        for op in list(self.function.body.block.ops):
            if isinstance(op, DimOp) or _floats(op):
                continue  # sizes have no device; users place constants, their views, and destinations
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
        """`value` on the device of `user`: the value itself, a second placement of a constant, or a copy before the
        user."""
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
        """Brings `value` from `source` to `device`. A view is made again there, except a slice: it is cut out first,
        and only the part is copied."""
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
    """Whether an op is a constant, a view of one, or a destination. These are made where they are used, once per
    device."""
    while isinstance(op, VIEWS) and isinstance(op.operands[0].owner, Operation):
        op = op.operands[0].owner
    return isinstance(op, ConstOp) or op.name in _PLACED_BY_USERS


def spread_init(init: FuncOp, read: Placements, default: str) -> None:
    """Gives `@init` one result for each device that reads it: "init.0", and "init.0.cuda1" for the copy on cuda:1."""
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
