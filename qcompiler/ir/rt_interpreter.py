"""Runs an rt module on NumPy byte arenas: defines the meaning of the schedule, for any devices and streams.

    outputs = run_rt(module, weights, [x])                        # one call, the init entry included
    interpreter = RtInterpreter(module, weights, unpack=unpack)   # many calls
    outputs = interpreter.run([x], entry="main", states={"kv": kv})

Steps run in list order, each kernel by the meaning of its region. Activation and output memory is filled with 0xFF
before every call, which is NaN in every float type, so a read of unwritten memory shows in the result. Before
plan-memory every buffer has its own memory. Afterwards buffers share bytes as planned, so a wrong offset shows as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from qcompiler.errors import DimError, InterpreterError
from qcompiler.ir.interpreter import Unpack, evaluate_op
from qcompiler.ir.rt import (
    BufferOp,
    CopyOp,
    EntryOp,
    KernelOp,
    LaunchOp,
    SelectOp,
    StepOp,
    TorchCallOp,
    YieldOp,
)
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.ir.types import QTensorType, shape_of
from qcompiler.plan.dims import dim
from qcompiler.plan.equations import solve
from qcompiler.plan.plan import TensorSig, TorchCall, View, taken
from qcompiler.plan.torch_regions import TensorMemory, runner
from qcompiler.plan.view_regions import is_packed
from qcompiler.plan.weights import NUMPY_DTYPES, WeightStore

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Symbols = Mapping[str, int]

POISON = 0xFF
STATE_PREFIX = "state."
"""The arena of the state `kv` is named `state.kv`."""


class RtInterpreter:
    """Runs the entries of an rt module, which must not change meanwhile. The init entry runs at the first call.

    `unpack` undoes kernel layouts (passes give it).
    """

    def __init__(
        self,
        module: ModuleOp,
        weights: WeightStore,
        *,
        unpack: Unpack | None = None,
    ) -> None:
        self._schedule = Schedule(module)
        self._weights = weights
        self._unpack = unpack
        self._memory = _Memory(self._schedule, weights)
        self._init_is_done = False

    def run(
        self, inputs: Sequence[Array], *, entry: str = "main", states: MutableMapping[str, Array] | None = None
    ) -> list[Array]:
        """The results as new arrays. `states` is read at entry and written at exit. InterpreterError if inputs do not
        fit."""
        if not self._init_is_done:
            for each in self._schedule.entries.values():
                if each.is_init:
                    self._run_steps(each, {})
            self._init_is_done = True
        op = self._schedule.entries.get(entry)
        if op is None or op.is_init:
            names = ", ".join(f"@{name}" for name in self._schedule.entries) or "none"
            raise InterpreterError(f"the module has no entry @{entry} (entries: {names})")
        symbols = _bind(op, inputs)
        self._memory.poison(("activations", "output"))
        for sig, array in zip(op.inputs, inputs, strict=True):
            self._memory.load(sig.record.arena, array)
        known = {} if states is None else states
        used = self._memory.load_states(known)
        self._run_steps(op, symbols)
        for key in used:
            known[key] = self._memory.read(STATE_PREFIX + key, known[key].dtype, known[key].shape)
        return [self._output(sig.record, symbols) for sig in op.outputs]

    def _output(self, sig: TensorSig, symbols: Symbols) -> Array:
        shape = tuple(dim(size).evaluate(symbols) for size in sig.shape)
        return self._memory.read(sig.arena, NUMPY_DTYPES[sig.dtype], shape)

    # --- steps ---

    def _run_steps(self, entry: EntryOp, symbols: Symbols) -> None:
        for number, step in enumerate(entry.steps):
            try:
                with np.errstate(all="ignore"):
                    self._run_step(step, symbols)
            except InterpreterError as error:
                raise InterpreterError(f"entry @{entry.sym}, step {number} ({step.name}): {error}") from error

    def _run_step(self, step: StepOp, symbols: Symbols) -> None:
        match step:
            case LaunchOp():
                self._launch(step.kernel_name, step.view_records, symbols)
            case SelectOp():
                value = dim(step.on.data).evaluate(symbols)
                case = taken([case.record for case in step.cases], value)
                if case is None:
                    raise InterpreterError(f"no case of the select fits {step.on.data} = {value}")
                self._launch(case.kernel, step.view_records, symbols)
            case CopyOp():
                source, target = (self._at(view, symbols) for view in step.view_records)
                _store(target, source, "copy")
            case TorchCallOp():
                self._torch_call(step.record, symbols)
            case _:
                pass  # record and wait: they allow the list order

    def _torch_call(self, step: TorchCall, symbols: Symbols) -> None:
        arrays = [self._at(view, symbols) for view in step.operands]
        places = [
            TensorMemory(
                address=array.__array_interface__["data"][0],
                dtype=view.dtype,
                shape=array.shape,
                written=number >= len(step.inputs),
            )
            for number, (view, array) in enumerate(zip(step.operands, arrays, strict=True))
        ]
        sizes = [dim(size).evaluate(symbols) for size in step.sizes]
        given = len(step.inputs)
        runner().prepare(step.region).on_host(sizes, places[:given], places[given:])

    def _launch(self, name: str, views: Sequence[View], symbols: Symbols) -> None:
        kernel = self._schedule.kernels.get(name)
        if kernel is None or kernel.body is None:
            raise InterpreterError(f"kernel @{name} {'is not declared' if kernel is None else 'has no region to run'}")
        operands = kernel.operand_records
        if len(views) != len(operands):
            raise InterpreterError(f"kernel @{name} takes {len(operands)} operands, not {len(views)}")
        arrays = [self._at(view, symbols) for view in views]
        results = self._evaluate(kernel, arrays, views, symbols)
        written = [array for array, operand in zip(arrays, operands, strict=True) if operand.access != "r"]
        for array, value in zip(written, results, strict=True):
            _store(array, value, name)

    def _evaluate(
        self, kernel: KernelOp, arrays: Sequence[Array], views: Sequence[View], symbols: Symbols
    ) -> list[Array]:
        """The values that the kernel's region yields, before anything is written."""
        assert kernel.body is not None
        values: dict[SSAValue, Array] = {}
        for argument, array, view in zip(kernel.body.block.args, arrays, views, strict=True):
            if isinstance(argument.type, QTensorType):
                values[argument] = array
                continue
            shape = tuple(dim(size).evaluate(symbols) for size in shape_of(argument.type))
            value = self._values(array, view, shape)
            if value.size != math.prod(shape):
                raise InterpreterError(f"kernel @{kernel.sym}: a view of shape {value.shape} as a tensor of {shape}")
            values[argument] = value.reshape(shape)
        for op in kernel.body.block.ops:
            operands = [values[value] for value in op.operands]
            if isinstance(op, YieldOp):
                return operands
            results = evaluate_op(op, operands, symbols, self._weights, unpack=self._unpack)
            values.update(zip(op.results, results, strict=True))
        raise InterpreterError(f"the region of kernel @{kernel.sym} does not end in rt.yield")

    def _values(self, array: Array, view: View, shape: tuple[int, ...]) -> Array:
        """A read-only view of the operand. A plain tensor in a kernel's layout is unpacked."""
        if is_packed(view):
            if self._unpack is None:
                raise InterpreterError(f"constants in layout '{view.layout}' need the `unpack` argument")
            canonical = self._unpack(None, str(view.layout), view.dtype, shape, array)
            return canonical.view(NUMPY_DTYPES[view.dtype]).reshape(shape)
        frozen = array.view()
        frozen.flags.writeable = False
        return frozen

    def _at(self, view: View, symbols: Symbols) -> Array:
        """The strided array of a view (or its bytes, if it is packed). InterpreterError if it exceeds its buffer."""
        memory = self._memory.of(view.buffer)
        if is_packed(view):
            return memory
        dtype = NUMPY_DTYPES[view.dtype]
        shape = tuple(dim(size).evaluate(symbols) for size in view.shape)
        strides = tuple(dim(stride).evaluate(symbols) * dtype.itemsize for stride in view.strides)
        offset = dim(view.offset).evaluate(symbols) * dtype.itemsize
        if 0 in shape:  # without elements, no view can exceed its buffer
            return np.empty(shape, dtype)
        try:
            return np.ndarray(shape, dtype, memory.data, offset, strides)
        except (ValueError, TypeError) as error:
            raise InterpreterError(
                f"the view of buffer '{view.buffer}' with shape {shape}, byte strides {strides} and byte offset "
                f"{offset} leaves its {memory.nbytes} bytes"
            ) from error


def run_rt(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Sequence[Array],
    entry: str = "main",
    states: MutableMapping[str, Array] | None = None,
    *,
    unpack: Unpack | None = None,
) -> list[Array]:
    """One call of one entry point, the init entry included; see `RtInterpreter.run`."""
    return RtInterpreter(module, weights, unpack=unpack).run(inputs, entry=entry, states=states)


def _store(target: Array, value: Array, kernel: str) -> None:
    if value.dtype != target.dtype or value.size != target.size:
        raise InterpreterError(
            f"'{kernel}' yields {value.dtype} {value.shape} for an operand of {target.dtype} {target.shape}"
        )
    if not target.flags.writeable:
        raise InterpreterError(f"'{kernel}' writes a constant")
    target[...] = value.reshape(target.shape)


def _bind(entry: EntryOp, inputs: Sequence[Array]) -> dict[str, int]:
    """Values of the entry's symbols from the shapes of its inputs."""
    sigs = [sig.record for sig in entry.inputs]
    if len(sigs) != len(inputs):
        raise InterpreterError(f"@{entry.sym} takes {len(sigs)} inputs, not {len(inputs)}")
    for sig, array in zip(sigs, inputs, strict=True):
        if array.dtype != NUMPY_DTYPES[sig.dtype] or array.ndim != len(sig.shape):
            raise InterpreterError(f"input '{sig.name}' is {array.dtype} {array.shape}, not {sig.dtype} {sig.shape}")
    try:
        symbols = solve([sig.shape for sig in sigs], [array.shape for array in inputs], [sig.name for sig in sigs])
    except DimError as error:
        raise InterpreterError(f"input {error}") from None
    for sig, array in zip(sigs, inputs, strict=True):
        if tuple(dim(size).evaluate(symbols) for size in sig.shape) != array.shape:
            raise InterpreterError(f"input '{sig.name}' has shape {array.shape}, not {sig.shape} (symbols: {symbols})")
    for name, (low, high) in entry.ranges.items():
        if name in symbols and not low <= symbols[name] <= high:
            raise InterpreterError(f"dimension '{name}' is {symbols[name]}, outside of [{low}, {high}]")
    return symbols


class _Memory:
    """The bytes of every buffer: slices of arenas if offsets are known, else separate memory."""

    def __init__(self, schedule: Schedule, weights: WeightStore) -> None:
        self._schedule = schedule
        self._arenas: dict[str, Bytes] = {}
        self._buffers: dict[str, Bytes] = {}
        self._of_arena: dict[str, list[str]] = {name: [] for name in schedule.arenas}
        for buffer in schedule.buffers.values():
            if buffer.arena_name not in schedule.arenas:
                raise InterpreterError(f"buffer '{buffer.sym}' lies in '{buffer.arena_name}', which is not declared")
            self._of_arena[buffer.arena_name].append(buffer.sym)
        for name, arena in schedule.arenas.items():
            ends = [
                buffer.offset.value.data + buffer.nbytes.value.data
                for buffer in (schedule.buffers[b] for b in self._of_arena[name])
                if buffer.offset is not None
            ]
            if arena.kind.data != "constants":
                self._arenas[name] = np.full(max([arena.nbytes.value.data, *ends]), POISON, np.uint8)
        for buffer in schedule.buffers.values():
            self._buffers[buffer.sym] = self._place(buffer, weights)

    def _place(self, buffer: BufferOp, weights: WeightStore) -> Bytes:
        nbytes = buffer.nbytes.value.data
        if buffer.weight is not None:  # the weight store's own, read-only bytes
            data = weights[buffer.weight.data].data
            if data.nbytes > nbytes:
                raise InterpreterError(f"buffer '{buffer.sym}' is smaller than the weight '{buffer.weight.data}'")
            frozen = data.view()
            frozen.flags.writeable = False
            return frozen
        arena = self._arenas.get(buffer.arena_name)
        if arena is None:
            raise InterpreterError(f"buffer '{buffer.sym}' of a constants arena names no weight")
        if buffer.offset is None:
            return np.full(nbytes, POISON, np.uint8)
        start = buffer.offset.value.data
        return arena[start : start + nbytes]

    def of(self, buffer: str) -> Bytes:
        """The bytes of a buffer."""
        if buffer not in self._buffers:
            raise InterpreterError(f"no buffer is named '{buffer}'")
        return self._buffers[buffer]

    def poison(self, kinds: tuple[str, ...]) -> None:
        """Fills all memory of these kinds of arena with 0xFF."""
        for name, arena in self._schedule.arenas.items():
            if arena.kind.data in kinds:
                for memory in (self._arenas[name], *(self._buffers[b] for b in self._of_arena[name])):
                    memory[...] = POISON

    def _whole(self, arena: str) -> Bytes:
        """An arena from its first byte, or its only buffer while that has no offset."""
        if arena not in self._of_arena:
            raise InterpreterError(f"no arena is named '{arena}'")
        unplaced = [b for b in self._of_arena[arena] if self._schedule.buffers[b].offset is None]
        if not unplaced:
            return self._arenas[arena]
        if len(self._of_arena[arena]) != 1:
            raise InterpreterError(f"arena '{arena}' has several buffers without offsets; run plan-memory first")
        return self._buffers[unplaced[0]]

    def load(self, arena: str, array: Array) -> None:
        """Writes an array to the start of an arena and poisons the rest."""
        memory = self._whole(arena)
        if array.nbytes > memory.nbytes:
            raise InterpreterError(f"{array.nbytes} bytes do not fit into arena '{arena}' of {memory.nbytes}")
        memory[...] = POISON
        memory[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, arena: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A copy of the array at the start of an arena."""
        count = math.prod(shape)
        memory = self._whole(arena)
        if count * dtype.itemsize > memory.nbytes:
            raise InterpreterError(f"arena '{arena}' has {memory.nbytes} bytes, {count * dtype.itemsize} are read")
        return memory[: count * dtype.itemsize].view(dtype).reshape(shape).copy()

    def load_states(self, states: Mapping[str, Array]) -> list[str]:
        """Writes every state arena and returns the states' names. InterpreterError for a state without a value."""
        names: list[str] = []
        for name, arena in self._schedule.arenas.items():
            if arena.kind.data != "state":
                continue
            key = name.removeprefix(STATE_PREFIX)
            if key not in states:
                raise InterpreterError(f"the state '{key}' has no value; pass it in `states`")
            self.load(name, states[key])
            names.append(key)
        return names
