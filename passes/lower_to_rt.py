"""lower-to-rt: functions on tensors become entry points of launches on buffers (destination passing).

    before  %h = qc.linear %x, %w : tensor<?x1536xf32, #qc.dims<["s", 1536]>>
            %y = qc.layer_norm %h, %g, %b
            func.return %y
    after   rt.buffer @main.tmp.0 {arena = @activations.main.cpu}
            rt.launch @linear_0 [x: @main.in.0, w: @w.fc, out: @main.tmp.0]
            rt.launch @layer_norm_0 [x: @main.tmp.0, …, out: @main.out.0]

View ops cost nothing: a value's *place* is a strided view of a buffer.  A result that is returned is computed in the
caller's memory.  A declared state is updated in place (lowering/states.py); where its old value is read afterwards, or
its new one cannot be computed there, the copy is counted and the report names the op that is the reason.  Equal kernels
are shared.  Streams and offsets come later (assign-streams, plan-memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.dialects.tensor import ConcatOp, InsertSliceOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir import qc, rt
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import INIT, arg_names, body_of, path_of, ranges_of, result_keys, return_op
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.lowering import states
from qcompiler.passes.lowering.drafts import Draft, copy_draft, draft, with_m_class
from qcompiler.passes.lowering.kernels import KernelTable
from qcompiler.passes.lowering.places import Placer, root_of
from qcompiler.passes.lowering.views import contiguous, is_contiguous
from qcompiler.passes.lowering.views import with_shape as reshaped
from qcompiler.passes.select_kernels import cases_of
from qcompiler.passes.support.numerics import Reordered
from qcompiler.passes.support.windows import feeds_linear
from qcompiler.plan.dims import Dim, Range, contiguous_strides, product
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import ArenaKind, SelectCase, Symbol, TensorSig, View, initial_weight

NOTHING_TO_DO = ("tensor.empty", "arith.constant", "func.return")


@dataclass(frozen=True)
class LowerToRtPass(ModulePass):
    """Replaces every function of the module by an `rt.entry` with its buffers and kernels."""

    name = "lower-to-rt"
    numerics = Reordered(1e-5)  # a matrix of rows instead of a batch: BLAS may sum in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        program = Program(context)
        functions = [f for f in op.body.block.ops if isinstance(f, FuncOp)]
        for function in sorted(functions, key=lambda f: f.sym_name.data != INIT):
            program.lower(function)
            op.body.block.detach_op(function)
            function.erase(safe_erase=False)
        op.body.block.add_ops(program.ops())


@dataclass
class Program:
    """What the entry points share: devices, arenas, buffers of constants and states, kernels."""

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
            self.arenas[name] = rt.ArenaOp(name, device_name(device), kind, 0, entry)
        return name

    def buffer(self, name: str, arena: str, nbytes: int, weight: str | None = None) -> str:
        if name not in self.buffers:
            self.buffers[name] = rt.BufferOp(name, arena, nbytes, None, weight)
        return name

    def lower(self, function: FuncOp) -> None:
        self.entries.append(EntryLowering(self, function).run())


def device_name(device: str) -> str:
    return device.replace(":", "")


def _kind_and_index(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


class EntryLowering:
    """Lowers one function: walks its ops in order, keeping the place of every value. Implements `drafts.Places`."""

    def __init__(self, program: Program, function: FuncOp) -> None:
        self.program = program
        self.function = function
        self.entry = function.sym_name.data
        self.is_init = self.entry == INIT
        self.ranges: dict[str, Range] = ranges_of(function)
        self.default_device = program.context.devices[0]
        self.steps: list[rt.StepOp] = []
        self.count = 0
        self.placer = Placer(self.constant, self.state, self.contiguous_copy)
        self.destinations: dict[SSAValue, View] = {}
        self.outputs: list[View] = []
        self._overwritten: dict[SSAValue, View] = {}  # what later readers find elsewhere, by where it was
        self.in_place = states.in_place(body_of(function), lambda op: _device(op, self.default_device))

    def run(self) -> rt.EntryOp:
        inputs = [self._input(i, name) for i, name in enumerate(arg_names(self.function))]
        for value, update in self.in_place.results.items():
            self.destinations[value] = self._state(update.key, update.value, _device(update, self.default_device))
        self.outputs = outputs = self._outputs()
        updates = []
        for op in body_of(self.function).ops:
            if isinstance(op, qc.StateUpdateOp):
                updates.append(op)
            else:
                self._lower(op)
        for value, out in zip(return_op(self.function).operands, outputs, strict=True):
            self._copy_into(self.placer.view(value), out, return_op(self.function))
        self._update_states(updates)
        symbols = [Symbol(name=name, min=low, max=high) for name, (low, high) in self.ranges.items()]
        sigs = [] if self.is_init else [self._signature(i, out) for i, out in enumerate(outputs)]
        return rt.EntryOp(self.entry, symbols, inputs, sigs, self.steps, is_init=self.is_init)

    # --- arguments and results ---

    def _input(self, index: int, name: str) -> TensorSig:
        argument = body_of(self.function).args[index]
        shape, dtype = shape_of(argument.type), tensor_dtype(argument.type)
        arena = self.program.arena(f"input.{self.entry}.{index}", self.default_device, "input", self.entry)
        buffer = self.program.buffer(f"{self.entry}.in.{index}", arena, self.nbytes(shape, dtype))
        self.placer.define(argument, contiguous(buffer, dtype, shape))
        return TensorSig(name=name, arena=arena, dtype=dtype, shape=shape)

    def _outputs(self) -> list[View]:
        """The memory of each result; a result computed by one op is computed right there."""
        views: list[View] = []
        keys = result_keys(self.function)
        for index, value in enumerate(return_op(self.function).operands):
            shape, dtype = shape_of(value.type), tensor_dtype(value.type)
            if self.is_init:
                name, arena = keys[index], self.program.arena("init", self.default_device, "init")
            else:
                name = f"{self.entry}.out.{index}"
                arena = self.program.arena(f"output.{self.entry}.{index}", self.default_device, "output", self.entry)
            buffer = self.program.buffer(name, arena, self.nbytes(shape, dtype))
            view = contiguous(buffer, dtype, shape)
            views.append(view)
            if self.is_init:
                self.program.init_results[name] = view
            root = root_of(value)
            if root is not None and root not in self.destinations:
                self.destinations[root] = view
        return views

    def _signature(self, index: int, view: View) -> TensorSig:
        return TensorSig(name=f"out{index}", arena=f"output.{self.entry}.{index}", dtype=view.dtype, shape=view.shape)

    # --- places (drafts.Places) ---

    def view(self, value: SSAValue) -> View:
        return self.placer.view(value)

    def constant(self, op: qc.ConstOp) -> View:
        """A weight, a graph constant, or a result of @init."""
        if op.key in self.program.init_results:
            return self.program.init_results[op.key]
        tensor = self.program.context.weights[op.key]
        device = _device(op, self.default_device)
        arena = self.program.arena(f"constants.{device_name(device)}", device, "constants")
        suffix = "" if device == self.default_device else f".{device_name(device)}"
        buffer = self.program.buffer(f"w.{op.key}{suffix}", arena, tensor.nbytes, weight=op.key)
        if tensor.format is None and tensor.layout == "canonical":
            return contiguous(buffer, tensor.dtype, tensor.shape)
        return View(buffer=buffer, dtype=tensor.dtype, shape=tensor.shape, format=tensor.format, layout=tensor.layout)

    def state(self, op: qc.StateOp) -> View:
        return self._state(op.key, op.result, _device(op, self.default_device))

    def _state(self, key: str, value: SSAValue, device: str) -> View:
        """The memory of a state; what it begins as is a weight, unless it begins as zeros."""
        shape, dtype = shape_of(value.type), tensor_dtype(value.type)
        arena = self.program.arena(f"state.{key}", device, "state")
        weights, initial = self.program.context.weights, initial_weight(arena)
        if initial in weights:
            constants = self.program.arena(f"constants.{device_name(device)}", device, "constants")
            self.program.buffer(f"w.{initial}", constants, weights[initial].nbytes, weight=initial)
        return contiguous(self.program.buffer(f"s.{key}", arena, self.nbytes(shape, dtype)), dtype, shape)

    def contiguous_copy(self, view: View, op: Operation) -> View:
        """The same values row-major in a fresh buffer."""
        target = self._fresh(view, _device(op, self.default_device))
        self._launch(copy_draft(view, target, path_of(op)))
        return target

    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View:
        """Room for a result: the caller's memory where it is returned, else a fresh activation buffer."""
        order = self.placer.layout_hint(value)
        destination = self.destinations.get(value)
        if destination is not None and order is None:
            view = reshaped(destination, shape, contiguous_strides(tuple(shape)))
        else:
            like = contiguous("", tensor_dtype(value.type), shape)
            view = self._fresh(like, _device(value.owner, self.default_device), order)
        self.placer.define(value, view)
        return view

    def updated(self, op: Operation, base: SSAValue) -> View:
        """Where an op writes a part of its result, all of which is `base` before: in place, or into a copy."""
        result = op.results[0]
        if op not in self.in_place.chains:
            source, view = self.placer.view(base), self.result(result, shape_of(result.type))
            self._launch(copy_draft(source, view, path_of(op)))
            if self._arena_of(source).startswith("state."):
                self._count_copy(
                    source, f"{op.name} at '{path_of(op)}' updates a copy, which the state does not become"
                )
            return view
        view = self.placer.view(base)
        for value in dict.fromkeys((self.in_place.chains[op], states.origin_of(base))):
            reader = states.later_reader(value, op, self.in_place.absorbed)
            if reader is None or self.placer.view(value).buffer != view.buffer:
                continue
            self._overwritten[value] = old = self.placer.view(value)
            kept = self._kept(value, op)
            self.placer.move(value, kept)
            if not self._arena_of(kept).startswith("output."):
                why = f"{reader.name} at '{path_of(reader)}' reads its value of before '{path_of(op)}' afterwards"
                self._count_copy(old, why)
        others = list(op.operands)
        others.remove(base)  # once: cache.index_copy(0, at, cache) also reads what it writes
        for operand in others:
            if self._lies_in(operand, view.buffer):
                self._count_copy(self.placer.view(operand), f"'{path_of(op)}' reads and writes it at once")
                self.placer.move(operand, self.contiguous_copy(self.placer.view(operand), op))
        self.placer.define(result, view)
        return view

    def _lies_in(self, value: SSAValue, buffer: str) -> bool:
        return isinstance(value.type, TensorType) and self.placer.view(value).buffer == buffer

    def _kept(self, value: SSAValue, op: Operation) -> View:
        """A copy of a value that an op is about to overwrite: in the caller's memory if it is returned, else fresh."""
        view = self.placer.view(value)
        for returned, out in zip(return_op(self.function).operands, self.outputs, strict=True):
            if states.origin_of(returned) is value and is_contiguous(view):
                target = reshaped(out, view.shape, view.strides)
                self._copy_into(view, target, op)
                return target
        return self.contiguous_copy(view, op)

    def _arena_of(self, view: View) -> str:
        return self.program.buffers[view.buffer].arena.root_reference.data

    def _count_copy(self, view: View, why: str) -> None:
        """Reports a copy of, or to, a state's memory."""
        nbytes, key = self.nbytes(view.shape, view.dtype), self._arena_of(view).removeprefix("state.")
        self.program.context.report.add("lower-to-rt", key, f"state copied: {nbytes} bytes for each run", why)

    # --- ops ---

    def _lower(self, op: Operation) -> None:
        if op.name in NOTHING_TO_DO or isinstance(op, qc.DimOp) or self.placer.place(op):
            return
        if isinstance(op, qc.WindowsOp) and feeds_linear(op):  # the linear reads the image itself
            nowhere = contiguous("", tensor_dtype(op.result.type), shape_of(op.result.type))
            self.placer.define(op.result, nowhere)
        elif isinstance(op, qc.CopyOp):
            source = self.placer.view(op.input)
            if not is_contiguous(source):
                source = self.contiguous_copy(source, op)
            target = self._fresh(source, op.target.data)
            self.steps.append(rt.CopyOp(source, target))
            self.placer.define(op.result, target)
        elif op in self.in_place.absorbed:
            assert isinstance(op, InsertSliceOp)
            whole = states.origin_of(op.dest)
            place = self._overwritten.get(whole) or self.placer.view(whole)
            self.placer.define(
                op.result, reshaped(place, shape_of(op.result.type), contiguous_strides(shape_of(op.result.type)))
            )
        elif isinstance(op, InsertSliceOp):
            source, target = self.placer.inserted(op, self.updated(op, op.dest))
            self._launch(copy_draft(source, target, path_of(op)))
        elif isinstance(op, ConcatOp):
            result = self.result(op.result, shape_of(op.result.type))
            for source, target in self.placer.assemble(op, result):
                self._launch(copy_draft(source, target, path_of(op)))
        elif op.name != "linalg.fill" or self.placer.fill_is_read(op):
            self._launch(draft(op, self), op)

    def _update_states(self, ops: Sequence[qc.StateUpdateOp]) -> None:
        """Behind all that reads the old values. Nothing for a value that already lies in its state; else one counted
        copy, and two where the value lies in the memory of a state that such a copy overwrites (states that change
        places, or one that is turned around).
        """
        pending: list[tuple[View, View, qc.StateUpdateOp]] = []
        for op in ops:
            target = self._state(op.key, op.value, _device(op, self.default_device))
            source = self.placer.view(op.value)
            if source.buffer != target.buffer or source.offset != 0 or not is_contiguous(source):
                pending.append((source, target, op))
        overwritten = {target.buffer for _, target, _ in pending}
        copies = []
        for source, target, op in pending:
            self._count_copy(target, self._why_elsewhere(source))
            if source.buffer in overwritten:
                self._count_copy(target, "what it becomes lies in a state that is overwritten")
                copies.append((self.contiguous_copy(source, op), target, op))
            else:
                copies.append((source, target, op))
        for source, target, op in copies:
            self._copy_into(source, target, op)

    def _why_elsewhere(self, source: View) -> str:
        kind, _, name = self._arena_of(source).partition(".")
        if kind == "state":
            return f"it becomes what '{name}' is"
        if kind == "activations":
            return "its old value is read where, or after, the new one is computed"
        return f"it becomes {'an input' if kind == 'input' else 'a constant'}"

    def _copy_into(self, source: View, target: View, op: Operation) -> None:
        if source.buffer == target.buffer and source.offset == target.offset and is_contiguous(source):
            return
        if is_contiguous(source):
            self.steps.append(rt.CopyOp(reshaped(source, target.shape, target.strides), target))
        else:
            self._launch(copy_draft(source, target, path_of(op)))

    # --- buffers and launches ---

    def nbytes(self, shape: Sequence[Dim], dtype: str) -> int:
        """Bytes at the entry's maximum."""
        return product(shape).bounds(self.ranges)[1] * ITEMSIZE[dtype]

    def _fresh(self, like: View, device: str, order: tuple[int, ...] | None = None) -> View:
        """A new activation buffer for a tensor like `like`; `order` lists its dims from slowest to fastest."""
        name = f"activations.{self.entry}.{device_name(device)}"
        arena = self.program.arena(name, device, "activations", self.entry)
        buffer = self.program.buffer(f"{self.entry}.tmp.{self.count}", arena, self.nbytes(like.shape, like.dtype))
        self.count += 1
        if order is None:
            return contiguous(buffer, like.dtype, like.shape)
        stored = contiguous(buffer, like.dtype, [like.shape[i] for i in order])
        return reshaped(stored, like.shape, [stored.strides[order.index(i)] for i in range(len(order))])

    def _launch(self, each: Draft, op: Operation | None = None) -> None:
        if not isinstance(op, qc.LinearOp):
            self.steps.append(rt.LaunchOp(self.program.kernels.name(each), each.views))
            return
        cases = cases_of(op)
        names = [self.program.kernels.name(with_m_class(each, m_class)) for _, m_class in cases]
        if len(cases) == 1:
            self.steps.append(rt.LaunchOp(names[0], each.views))
            return
        records = [SelectCase(max=limit, kernel=name) for (limit, _), name in zip(cases, names, strict=True)]
        self.steps.append(rt.SelectOp(each.operands[-1].shape[0], records, each.views))


def _device(op: object, default: str) -> str:
    """Where an op runs, as assign-devices wrote it."""
    attribute = op.attributes.get("qc.device") if isinstance(op, Operation) else None
    return attribute.data if isinstance(attribute, StringAttr) else default
