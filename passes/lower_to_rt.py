"""lower-to-rt: turns functions on tensors into entry points that launch kernels on buffers (destination passing).

    before  %h = qc.linear %x, %w : tensor<?x1536xf32, #qc.dims<["s", 1536]>>
            %y = qc.layer_norm %h, %g, %b
            func.return %y
    after   rt.buffer @main.tmp.0 {arena = @activations.main.cpu}
            rt.launch @linear_0 [x: @main.in.0, w: @w.fc, out: @main.tmp.0]
            rt.launch @layer_norm_0 [x: @main.tmp.0, …, out: @main.out.0]

A value's *place* is a strided view of a buffer (lowering/placer.py), so view ops cost nothing. A returned result is
computed in the caller's memory. A declared state is updated in place (lowering/states.py). If its old value is read
later, or its new value cannot be computed in place, the state is copied; the report counts the copies and names the op
that causes each (lowering/state_writes.py). Equal kernels are shared. assign-streams and plan-memory add streams and
offsets later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.dialects.tensor import ConcatOp, InsertSliceOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir import qc, rt
from qcompiler.ir.context import qc_context
from qcompiler.ir.module import INIT, arg_names, body_of, path_of, result_keys, return_op
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.checks.numerics import Reordered
from qcompiler.passes.lowering.drafts import copy_draft
from qcompiler.passes.lowering.kinds import draft
from qcompiler.passes.lowering.placer import Placer, root_of
from qcompiler.passes.lowering.rt_module import EntryMemory, RtModule
from qcompiler.passes.lowering.state_writes import StateWrites
from qcompiler.passes.lowering.steps import Steps
from qcompiler.passes.lowering.views import contiguous, is_contiguous
from qcompiler.passes.lowering.views import with_shape as reshaped
from qcompiler.passes.views.im2col import feeds_linear
from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.plan import Symbol, TensorSig, View

NOTHING_TO_DO = ("tensor.empty", "arith.constant", "func.return")


@dataclass(frozen=True)
class LowerToRtPass(ModulePass):
    """Replaces every function of the module by an `rt.entry` with its buffers and kernels."""

    name = "lower-to-rt"
    numerics = Reordered(1e-5)  # a matrix of rows instead of a batch: BLAS may sum in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        program = RtModule(context)
        functions = [f for f in op.body.block.ops if isinstance(f, FuncOp)]
        for function in sorted(functions, key=lambda f: f.sym_name.data != INIT):
            program.entries.append(EntryLowering(program, function).run())
            op.body.block.detach_op(function)
            function.erase(safe_erase=False)
        op.body.block.add_ops(program.ops())


class EntryLowering:
    """Lowers one function: walks its ops in order, keeping every value's place. Implements `drafts.ValueMemory`."""

    def __init__(self, program: RtModule, function: FuncOp) -> None:
        self.function = function
        self.memory = EntryMemory(program, function)
        self.steps = Steps(self.memory)
        self.placer = Placer(self.memory.constant, self._state, self.contiguous_copy)
        self.states = StateWrites(body_of(function), self.placer, self.steps, self.result)
        self.destinations: dict[SSAValue, View] = {}

    def run(self) -> rt.EntryOp:
        inputs = [self._input(i, name) for i, name in enumerate(arg_names(self.function))]
        self.destinations |= self.states.destinations()
        self.states.returned = returned = self._results()
        updates = []
        for op in body_of(self.function).ops:
            if isinstance(op, qc.StateUpdateOp):
                updates.append(op)
            else:
                self._lower(op)
        for value, out in returned:
            self.steps.copy(self.placer.view(value), out, return_op(self.function))
        self.states.update(updates)
        symbols = [Symbol(name=name, min=low, max=high) for name, (low, high) in self.memory.ranges.items()]
        is_init = self.memory.is_init
        sigs = [] if is_init else [self._signature(f"out{i}", out) for i, (_, out) in enumerate(returned)]
        return rt.EntryOp(self.memory.entry, symbols, inputs, sigs, self.steps.ops, is_init=is_init)

    # --- arguments and results ---

    def _input(self, index: int, name: str) -> TensorSig:
        argument = body_of(self.function).args[index]
        view = self.memory.argument(index, argument)
        self.placer.define(argument, view)
        return self._signature(name, view)

    def _results(self) -> list[tuple[SSAValue, View]]:
        """Each returned value and its memory. A value that one op computes is computed directly in that memory."""
        found: list[tuple[SSAValue, View]] = []
        keys = result_keys(self.function)
        for index, value in enumerate(return_op(self.function).operands):
            view = self.memory.result(index, keys[index] if self.memory.is_init else "", value)
            found.append((value, view))
            root = root_of(value)
            if root is not None and root not in self.destinations:
                self.destinations[root] = view
        return found

    def _signature(self, name: str, view: View) -> TensorSig:
        return TensorSig(name=name, arena=self.memory.arena_of(view), dtype=view.dtype, shape=view.shape)

    # --- places (drafts.ValueMemory) ---

    def view(self, value: SSAValue) -> View:
        return self.placer.view(value)

    def contiguous_copy(self, view: View, op: Operation) -> View:
        return self.steps.contiguous_copy(view, op)

    def updated(self, op: Operation, base: SSAValue) -> View:
        return self.states.updated(op, base)

    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View:
        """Memory for a result: the caller's if the value is returned, else a new activation buffer."""
        order = self.placer.layout_hint(value)
        destination = self.destinations.get(value)
        if destination is not None and order is None:
            view = reshaped(destination, shape, contiguous_strides(tuple(shape)))
        else:
            like = contiguous("", tensor_dtype(value.type), shape)
            view = self.memory.fresh(like, self.memory.device_of(value.owner), order)
        self.placer.define(value, view)
        return view

    def _state(self, op: qc.StateOp) -> View:
        return self.memory.state(op.key, op.result, self.memory.device_of(op))

    # --- ops ---

    def _lower(self, op: Operation) -> None:
        if op.name in NOTHING_TO_DO or isinstance(op, qc.DimOp) or self.placer.place(op):
            return
        if isinstance(op, qc.WindowsOp) and feeds_linear(op):  # the linear reads the image itself
            nowhere = contiguous("", tensor_dtype(op.result.type), shape_of(op.result.type))
            self.placer.define(op.result, nowhere)
        elif isinstance(op, qc.CopyOp):
            source = self.placer.view(op.input)
            if not is_contiguous(source):  # made contiguous on its own device, since only a byte copy may cross
                source = self.steps.contiguous_copy(source, op, op.source.data)
            self.steps.copy_across(source, self.result(op.result, shape_of(op.result.type)))
        elif isinstance(op, InsertSliceOp) and op in self.states.in_place.absorbed:
            self.states.absorb(op)
        elif isinstance(op, InsertSliceOp):
            source, target = self.placer.inserted(op, self.updated(op, op.dest))
            self.steps.launch(copy_draft(source, target, path_of(op)))
        elif isinstance(op, ConcatOp):
            result = self.result(op.result, shape_of(op.result.type))
            for source, target in self.placer.assemble(op, result):
                self.steps.launch(copy_draft(source, target, path_of(op)))
        elif isinstance(op, qc.TorchCallOp):
            self._torch_call(op)
        elif op.name != "linalg.fill" or self.placer.fill_is_read(op):
            self.steps.launch(draft(op, self), op)

    def _torch_call(self, op: qc.TorchCallOp) -> None:
        """Lowers a torch call. torch reads and writes whole tensors in row-major order. A result never shares a buffer
        with an input, since the plan forbids that for every step."""
        inputs = [self.placer.view(value) for value in op.inputs]
        inputs = [view if is_contiguous(view) else self.steps.contiguous_copy(view, op) for view in inputs]
        results = [self.result(value, shape_of(value.type)) for value in op.outputs]
        read = {view.buffer for view in inputs}
        outputs = [
            self.memory.fresh(view, self.memory.device_of(op)) if view.buffer in read else view for view in results
        ]
        self.steps.ops.append(rt.TorchCallOp(op.record, op.size_dims, inputs, outputs, serves=path_of(op)))
        for output, result in zip(outputs, results, strict=True):
            self.steps.copy(output, result, op)
