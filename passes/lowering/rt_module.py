"""The rt module under construction (`RtModule`), and the memory of one of its entry points (`EntryMemory`).

    rt.arena @constants.cpu {kind = constants}               rt.buffer @w.layer.weight in @constants.cpu
    rt.arena @activations.main.cpu {kind = activations}      rt.buffer @main.tmp.0 in @activations.main.cpu

Arenas and buffers are declared on first use. plan-memory sets the offsets later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects.builtin import StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import qc, rt
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import INIT, ranges_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.lowering.kernels import KernelTable
from qcompiler.passes.lowering.views import contiguous
from qcompiler.passes.lowering.views import with_shape as reshaped
from qcompiler.plan.dims import Dim, Range, product
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import ArenaKind, View, initial_weight


@dataclass
class RtModule:
    """The declarations of an rt module: devices, arenas, buffers, kernels and entry points."""

    context: QCContext
    kernels: KernelTable = field(default_factory=KernelTable)
    arenas: dict[str, rt.ArenaOp] = field(default_factory=dict)
    buffers: dict[str, rt.BufferOp] = field(default_factory=dict)
    entries: list[rt.EntryOp] = field(default_factory=list)
    init_results: dict[str, View] = field(default_factory=dict)

    def ops(self) -> list[Operation]:
        devices = [rt.DeviceOp(device_name(d), *_kind_and_index(d)) for d in self.context.devices]
        return [*devices, *self.arenas.values(), *self.buffers.values(), *self.kernels.ops(), *self.entries]

    def arena(self, name: str, device: str, kind: ArenaKind, entry: str | None = None) -> str:
        if name not in self.arenas:
            gathered = kind == "constants" and len(self.context.devices) > 1
            self.arenas[name] = rt.ArenaOp(name, device_name(device), kind, 0, entry, gathered=gathered)
        return name

    def buffer(self, name: str, arena: str, nbytes: int, weight: str | None = None) -> str:
        if name not in self.buffers:
            self.buffers[name] = rt.BufferOp(name, arena, nbytes, None, weight)
        return name


def device_name(device: str) -> str:
    return device.replace(":", "")


def _kind_and_index(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


class EntryMemory:
    """The buffers of one function: arguments, results, constants, states and activations."""

    def __init__(self, program: RtModule, function: FuncOp) -> None:
        self.program = program
        self.entry = function.sym_name.data
        self.is_init = self.entry == INIT
        self.ranges: dict[str, Range] = ranges_of(function)
        self.default_device = program.context.devices[0]
        self._count = 0

    def device_of(self, op: object) -> str:
        """The device of an op, as set by assign-devices."""
        attribute = op.attributes.get("qc.device") if isinstance(op, Operation) else None
        return attribute.data if isinstance(attribute, StringAttr) else self.default_device

    def arena_of(self, view: View) -> str:
        return self.program.buffers[view.buffer].arena.root_reference.data

    def nbytes(self, shape: Sequence[Dim], dtype: str) -> int:
        """The number of bytes for the entry's largest sizes."""
        return product(shape).bounds(self.ranges)[1] * ITEMSIZE[dtype]

    def argument(self, index: int, value: SSAValue) -> View:
        shape, dtype = shape_of(value.type), tensor_dtype(value.type)
        arena = self.program.arena(f"input.{self.entry}.{index}", self.default_device, "input", self.entry)
        return contiguous(
            self.program.buffer(f"{self.entry}.in.{index}", arena, self.nbytes(shape, dtype)), dtype, shape
        )

    def result(self, index: int, key: str, value: SSAValue) -> View:
        """Memory for the returned value number `index`. For a result of @init, `key` is its name."""
        shape, dtype = shape_of(value.type), tensor_dtype(value.type)
        if self.is_init:
            device = self.device_of(value.owner)
            suffix = "" if device == self.default_device else f".{device_name(device)}"
            name, arena = key, self.program.arena(f"init{suffix}", device, "init")
        else:
            name = f"{self.entry}.out.{index}"
            arena = self.program.arena(f"output.{self.entry}.{index}", self.default_device, "output", self.entry)
        view = contiguous(self.program.buffer(name, arena, self.nbytes(shape, dtype)), dtype, shape)
        if self.is_init:
            self.program.init_results[name] = view
        return view

    def constant(self, op: qc.ConstOp) -> View:
        """A weight, a graph constant, or a result of @init."""
        if op.key in self.program.init_results:
            return self.program.init_results[op.key]
        tensor = self.program.context.weights[op.key]
        device = self.device_of(op)
        arena = self.program.arena(f"constants.{device_name(device)}", device, "constants")
        suffix = "" if device == self.default_device else f".{device_name(device)}"
        buffer = self.program.buffer(f"w.{op.key}{suffix}", arena, tensor.nbytes, weight=op.key)
        if tensor.format is None and tensor.layout == "canonical":
            return contiguous(buffer, tensor.dtype, tensor.shape)
        dtype = tensor.dtype if tensor.format is None else tensor_dtype(op.result.type)  # which its readers decode to
        return View(buffer=buffer, dtype=dtype, shape=tensor.shape, format=tensor.format, layout=tensor.layout)

    def state(self, key: str, value: SSAValue, device: str) -> View:
        """The memory of a state. Its initial value is a weight, or zeros."""
        shape, dtype = shape_of(value.type), tensor_dtype(value.type)
        arena = self.program.arena(f"state.{key}", device, "state")
        weights, initial = self.program.context.weights, initial_weight(arena)
        if initial in weights:
            constants = self.program.arena(f"constants.{device_name(device)}", device, "constants")
            self.program.buffer(f"w.{initial}", constants, weights[initial].nbytes, weight=initial)
        return contiguous(self.program.buffer(f"s.{key}", arena, self.nbytes(shape, dtype)), dtype, shape)

    def fresh(self, like: View, device: str, order: tuple[int, ...] | None = None) -> View:
        """A new activation buffer with the shape and type of `like`. `order` lists its dims from slowest to fastest."""
        name = f"activations.{self.entry}.{device_name(device)}"
        arena = self.program.arena(name, device, "activations", self.entry)
        buffer = self.program.buffer(f"{self.entry}.tmp.{self._count}", arena, self.nbytes(like.shape, like.dtype))
        self._count += 1
        if order is None:
            return contiguous(buffer, like.dtype, like.shape)
        stored = contiguous(buffer, like.dtype, [like.shape[i] for i in order])
        return reshaped(stored, like.shape, [stored.strides[order.index(i)] for i in range(len(order))])
