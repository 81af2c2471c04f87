"""Writes the memory of states, in place where states.py allows it. The report lists every copy, with the reason.

    %s = qc.state @cache                             rt.launch @index_update [x: @s.cache, at: …, rows: …]
    %1 = qc.index_update %s, %at, %rows        →     (nothing: the new value lies in the state's memory)
    qc.state_update @cache, %1

A value that is read after it is overwritten is copied before that: into the caller's memory if it is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.tensor import InsertSliceOp
from xdsl.ir import Block, Operation, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering import states
from qcompiler.passes.lowering.drafts import copy_draft
from qcompiler.passes.lowering.placer import Placer
from qcompiler.passes.lowering.steps import Steps
from qcompiler.passes.lowering.views import is_contiguous
from qcompiler.passes.lowering.views import with_shape as reshaped
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.plan import View

Room = Callable[[SSAValue, Sequence[Dim]], View]


class StateWrites:
    """The states of one function. `returned` maps its results to the caller's memory for them."""

    def __init__(self, block: Block, placer: Placer, steps: Steps, room: Room) -> None:
        self.placer, self.steps, self.memory, self.room = placer, steps, steps.memory, room
        self.in_place = states.in_place(block, self.memory.device_of)
        self.returned: list[tuple[SSAValue, View]] = []
        self._overwritten: dict[SSAValue, View] = {}  # the old place of a value that was copied for later readers

    def destinations(self) -> dict[SSAValue, View]:
        """The op results that are computed in a state's memory, each with that memory."""
        return {
            value: self.memory.state(update.key, update.value, self.memory.device_of(update))
            for value, update in self.in_place.results.items()
        }

    def updated(self, op: Operation, base: SSAValue) -> View:
        """The memory of the result of an op that updates a part of `base`: the memory of `base`, or that of a copy."""
        result = op.results[0]
        if op not in self.in_place.chains:
            source, view = self.placer.view(base), self.room(result, shape_of(result.type))
            self.steps.launch(copy_draft(source, view, path_of(op)))
            if self.memory.arena_of(source).startswith("state."):
                self._count_copy(
                    source, f"{op.name} at '{path_of(op)}' updates a copy, which the state does not become"
                )
            return view
        view = self.placer.view(base)
        for value in dict.fromkeys((self.in_place.chains[op], unreshaped(base))):
            reader = states.later_reader(value, op, self.in_place.absorbed)
            if reader is None or self.placer.view(value).buffer != view.buffer:
                continue
            self._overwritten[value] = old = self.placer.view(value)
            kept = self._kept(value, op)
            self.placer.move(value, kept)
            if not self.memory.arena_of(kept).startswith("output."):
                why = f"{reader.name} at '{path_of(reader)}' reads its value of before '{path_of(op)}' afterwards"
                self._count_copy(old, why)
        others = list(op.operands)
        others.remove(base)  # once: cache.index_copy(0, at, cache) also reads what it writes
        for operand in others:
            if self._lies_in(operand, view.buffer):
                self._count_copy(self.placer.view(operand), f"'{path_of(op)}' reads and writes it at once")
                self.placer.move(operand, self.steps.contiguous_copy(self.placer.view(operand), op))
        self.placer.define(result, view)
        return view

    def absorb(self, op: InsertSliceOp) -> None:
        """Places the result of an insert_slice whose source was written in place: it has the memory of the whole."""
        whole = unreshaped(op.dest)
        place = self._overwritten.get(whole) or self.placer.view(whole)
        shape = shape_of(op.result.type)
        self.placer.define(op.result, reshaped(place, shape, contiguous_strides(shape)))

    def update(self, ops: Sequence[qc.StateUpdateOp]) -> None:
        """Copies the new values into their states, after all readers of the old values. Each copy is reported.

        A value that is already in its state's memory needs no copy. A value needs two copies if it lies in the memory
        of a state that another copy overwrites, for example if two states swap their values or a state is reversed.
        """
        pending: list[tuple[View, View, qc.StateUpdateOp]] = []
        for op in ops:
            target = self.memory.state(op.key, op.value, self.memory.device_of(op))
            source = self.placer.view(op.value)
            if source.buffer != target.buffer or source.offset != 0 or not is_contiguous(source):
                pending.append((source, target, op))
        overwritten = {target.buffer for _, target, _ in pending}
        copies = []
        for source, target, op in pending:
            self._count_copy(target, self._why_elsewhere(source))
            if source.buffer in overwritten:
                self._count_copy(target, "what it becomes lies in a state that is overwritten")
                copies.append((self.steps.contiguous_copy(source, op), target, op))
            else:
                copies.append((source, target, op))
        for source, target, op in copies:
            self.steps.copy(source, target, op)

    def _lies_in(self, value: SSAValue, buffer: str) -> bool:
        return isinstance(value.type, TensorType) and self.placer.view(value).buffer == buffer

    def _kept(self, value: SSAValue, op: Operation) -> View:
        """A copy of a value that an op is about to overwrite: in the caller's memory if the value is returned."""
        view = self.placer.view(value)
        for returned, out in self.returned:
            if unreshaped(returned) is value and is_contiguous(view):
                target = reshaped(out, view.shape, view.strides)
                self.steps.copy(view, target, op)
                return target
        return self.steps.contiguous_copy(view, op)

    def _count_copy(self, view: View, why: str) -> None:
        """Reports a copy from or to a state's memory."""
        nbytes = self.memory.nbytes(view.shape, view.dtype)
        key = self.memory.arena_of(view).removeprefix("state.")
        report = self.memory.program.context.report
        report.add("lower-to-rt", key, f"state copied: {nbytes} bytes for each run", why)

    def _why_elsewhere(self, source: View) -> str:
        kind, _, name = self.memory.arena_of(source).partition(".")
        if kind == "state":
            return f"it becomes what '{name}' is"
        if kind == "activations":
            return "its old value is read where, or after, the new one is computed"
        return f"it becomes {'an input' if kind == 'input' else 'a constant'}"
