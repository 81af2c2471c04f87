"""The part of the verifier that checks the steps of one entry point. verify.py describes the whole, docs/schedule.md
the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from qcompiler.errors import DimError, PlanError, ScheduleError
from qcompiler.plan.dims import Range, dim, product
from qcompiler.plan.hazards import AccessChecker, BufferState, Clocks, at_shapes
from qcompiler.plan.kernel import ITEMSIZE, Access, KernelSpec, Operand
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    EntryPoint,
    Launch,
    Record,
    Select,
    Step,
    TensorSig,
    TorchCall,
    View,
    Wait,
)
from qcompiler.plan.sizes import LARGEST_SIZE, check_extent, check_size
from qcompiler.plan.torch_regions import check_region
from qcompiler.plan.verify_views import EntryViews, same_dims, same_storage, storage
from qcompiler.plan.view_regions import (
    Region,
    disjoint,
    is_contiguous,
    is_packed,
    moved,
    nbytes_of,
    region_of,
)

InitWritten = dict[str, list[Region]]
_READ_ONLY = {"constants": "write-constant", "input": "write-input", "init": "write-init"}


class EntryVerifier:
    """Verifies one entry. `run` returns the regions that the entry wrote in init arenas, by buffer."""

    def __init__(
        self,
        program: PlanIndex,
        entry: EntryPoint,
        *,
        is_init: bool,
        init_written: InitWritten,
        truths: dict[str, bool],
        is_captured: bool = False,
    ) -> None:
        self.program = program
        self.entry = entry
        self.is_init = is_init
        self.is_captured = is_captured
        self.init_written = init_written
        self.ranges: dict[str, Range] = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
        self.views = EntryViews(program, entry, self.ranges, is_init, truths)
        used = dict.fromkeys(step.stream for step in entry.steps if step.stream in program.streams)
        self.clocks = Clocks(tuple(used))
        self.memory = AccessChecker(self.clocks, self.ranges)
        self.states: dict[str, BufferState] = {}

    def run(self) -> InitWritten:
        """ScheduleError at the first broken rule, with the entry, the step and the way out."""
        try:
            self._check_signature()
        except ScheduleError as error:
            raise ScheduleError(f"entry '{self.entry.name}': {error}", rule=error.rule) from None
        for number, step in enumerate(self.entry.steps):
            try:
                self._check_step(number, step)
            except ScheduleError as error:
                raise ScheduleError(f"{self._where(number, step)}: {error}", rule=error.rule) from None
            except DimError as error:
                raise ScheduleError(f"{self._where(number, step)}: {error}", rule="bad-dimension") from error
        try:
            self._check_outputs()
            if self.is_captured:
                self._check_capture_is_not_empty()
        except ScheduleError as error:
            raise ScheduleError(f"entry '{self.entry.name}': {error}", rule=error.rule) from None
        return {
            name: list(state.written.values())
            for name, state in self.states.items()
            if self.program.arenas[self.program.buffers[name].arena].kind == "init"
        }

    def _where(self, number: int, step: Step) -> str:
        match step:
            case Launch(kernel=kernel):
                what = f"launch of '{kernel}'"
            case Select(cases=cases):
                what = "select of " + ", ".join(f"'{case.kernel}'" for case in cases)
            case Copy():
                what = "copy"
            case Record(event=event):
                what = f"record of '{event}'"
            case Wait(event=event):
                what = f"wait for '{event}'"
            case TorchCall():
                what = "torch call"
        return f"entry '{self.entry.name}', step {number} ({what} on stream '{step.stream}')"

    # --- signature and outputs ---

    def _check_signature(self) -> None:
        taken: dict[str, str] = {}
        for kind, sigs in (("input", self.entry.inputs), ("output", self.entry.outputs)):
            for sig in sigs:
                self._check_sig(kind, sig)
                other = taken.setdefault(sig.arena, sig.name)
                if other != sig.name or sum(s.arena == sig.arena for s in sigs) > 1:
                    raise ScheduleError(
                        f"{kind} '{sig.name}' shares the arena '{sig.arena}' with '{other}'; give each its own",
                        rule="signature-arena",
                    )

    def _check_sig(self, kind: str, sig: TensorSig) -> None:
        arena = self.program.arenas.get(sig.arena)
        if arena is None:
            raise ScheduleError(
                f"{kind} '{sig.name}' lies in arena '{sig.arena}', which the plan does not declare",
                rule="unknown-arena",
            )
        if arena.kind != kind or arena.entry != self.entry.name:
            raise ScheduleError(
                f"{kind} '{sig.name}' lies in arena '{arena.name}', which is of kind '{arena.kind}' and belongs to "
                f"entry '{arena.entry}'; it needs an {kind} arena of this entry",
                rule="signature-arena",
            )
        self.views.check_symbols(sig.shape, f"{kind} '{sig.name}'")
        try:
            for extent in sig.shape:
                check_extent(extent, self.ranges)
            check_size((product(sig.shape) * ITEMSIZE[sig.dtype]).to_dim(), self.ranges)
        except DimError as error:
            raise ScheduleError(f"{kind} '{sig.name}': {error}", rule="bad-dimension") from error
        nbytes = product(sig.shape).tight_bounds(self.ranges)[1] * ITEMSIZE[sig.dtype]
        if nbytes > arena.nbytes:
            raise ScheduleError(
                f"{kind} '{sig.name}' takes up to {nbytes} bytes, its arena '{arena.name}' has {arena.nbytes}",
                rule="arena-size",
            )

    def _check_outputs(self) -> None:
        """ScheduleError unless every byte of every output is written. The executor joins all streams at the end, so the
        order of the writes needs no check."""
        for sig in self.entry.outputs:
            size = product(sig.shape) * ITEMSIZE[sig.dtype]
            written = [
                moved(region, state.start) if state.start else region
                for state in self.states.values()
                if self.program.buffers[state.name].arena == sig.arena
                for region in state.written.values()
            ]
            wanted = region_of("ui8", (size.to_dim(),), (1,), 0, self.ranges)
            hole = self.memory.coverage.hole(wanted, written)
            if hole is not None:
                raise ScheduleError(
                    f"output '{sig.name}' has {size.evaluate(hole)} bytes{at_shapes(hole)}, not all of which any step "
                    "writes",
                    rule="output-unwritten",
                )
            if not self.memory.coverage.proven(wanted, written):
                raise ScheduleError(
                    f"output '{sig.name}' has {size} bytes, and that the steps write all of them is not proven for all "
                    "sizes: what they leave is whatever the caller's memory held",
                    rule="output-unwritten",
                )

    def _check_capture_is_not_empty(self) -> None:
        """ScheduleError for an entry without work. CUDA accepts an empty graph, but a replay of it would do nothing."""
        if not any(isinstance(step, Launch | Select | Copy | TorchCall) for step in self.entry.steps):
            raise ScheduleError("it is captured but has nothing to do on a device", rule="capture-empty")

    # --- steps ---

    def _check_step(self, number: int, step: Step) -> None:
        stream = self._stream(step)
        self.clocks.tick(stream)
        match step:
            case Launch():
                spec = self._kernel(step.kernel)
                self._match_operands(spec, step.operands)
                accesses: list[Access] = [operand.access for operand in spec.operands]
                self._check_aliases(step.operands, accesses, spec)
                self._touch_all(number, step.stream, step.operands, accesses)
            case Select():
                accesses = self._check_select(step)
                self._touch_all(number, step.stream, step.operands, accesses)
            case Copy():
                self._check_copy(number, step, stream)
            case Record():
                self._known_event(step.event)
                self.clocks.record(step.event, stream, number)
            case Wait():
                self._known_event(step.event)
                self.clocks.wait(step.event, stream, number)
            case TorchCall():
                self._check_torch_call(number, step)

    def _stream(self, step: Step) -> int:
        if not step.stream:
            raise ScheduleError("it names no stream; run assign-streams", rule="no-stream")
        if step.stream not in self.program.streams:
            raise ScheduleError(f"the plan declares no stream '{step.stream}'", rule="unknown-stream")
        if self.is_captured and not isinstance(step, Record | Wait):
            device = self.program.devices[self.program.streams[step.stream].device]
            if device.kind == "cpu":
                raise ScheduleError(
                    "it runs on the CPU, which a captured graph would leave out at replay; move it to the device or "
                    "do not capture this entry",
                    rule="capture-host-work",
                )
        return self.clocks.index[step.stream]

    def _known_event(self, event: str) -> None:
        if event not in self.program.events:
            raise ScheduleError(f"the plan declares no event '{event}'", rule="unknown-event")

    def _kernel(self, name: str) -> KernelSpec:
        spec = self.program.kernels.get(name)
        if spec is None:
            raise ScheduleError(f"the plan has no kernel '{name}'", rule="unknown-kernel")
        unbound = [symbol for symbol in spec.symbols if symbol not in self.ranges]
        if unbound:
            raise ScheduleError(
                f"kernel '{name}' takes the symbol '{unbound[0]}', which this entry does not have",
                rule="unbound-symbol",
            )
        return spec

    def _check_select(self, step: Select) -> list[Access]:
        if not step.cases:
            raise ScheduleError("it has no cases", rule="select-gap")
        last: int | None = None
        for number, case in enumerate(step.cases):
            spec = self._kernel(case.kernel)
            self._match_operands(spec, step.operands)
            self._check_aliases(step.operands, [o.access for o in spec.operands], spec)
            if number and (last is None or (case.max is not None and case.max <= last)):
                raise ScheduleError(
                    f"the case of '{case.kernel}' can never be taken; order the cases by rising maximum",
                    rule="select-unreachable",
                )
            last = case.max
        self.views.check_symbols((step.on,), "its expression")
        check_size(step.on, self.ranges)
        if any(case.max is not None and abs(case.max) > LARGEST_SIZE for case in step.cases):
            raise ScheduleError(f"a case of it ends above {LARGEST_SIZE} (2**53)", rule="select-unreachable")
        if last is not None:
            low, high = dim(step.on).tight_bounds(self.ranges)
            if high > last:
                raise ScheduleError(
                    f"'{step.on}' reaches from {low} to {high}, but the last case ends at {last}; end with a case that "
                    "has no maximum",
                    rule="select-gap",
                )
        specs = [self.program.kernels[case.kernel] for case in step.cases]
        merged: list[Access] = []
        for operands in zip(*(spec.operands for spec in specs), strict=True):
            kinds = {operand.access for operand in operands}
            merged.append(kinds.pop() if len(kinds) == 1 else "rw")
        return merged

    def _check_copy(self, number: int, step: Copy, stream: int) -> None:
        source, target = step.source, step.target
        places = {self.views.arena_of(view).device for view in (source, target)}
        if self.program.streams[step.stream].device not in places:
            raise ScheduleError(
                f"its stream belongs to device '{self.program.streams[step.stream].device}', it copies between "
                f"{' and '.join(sorted(places))}; use a stream of one of these",
                rule="wrong-device",
            )
        if not same_storage(source, target) or not same_dims(source.shape, target.shape):
            raise ScheduleError(
                f"it copies {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}; a copy moves "
                "bytes between tensors of one type and shape",
                rule="copy-mismatch",
            )
        for view in (source, target):
            if not is_packed(view) and (len(view.shape) != len(view.strides) or not is_contiguous(view)):
                raise ScheduleError(
                    f"the view of buffer '{view.buffer}' is not contiguous; make it so with a kernel first",
                    rule="copy-not-contiguous",
                )
        regions = [self.views.region(source), self.views.region(target)]
        check_size(nbytes_of(source).to_dim(), self.ranges)
        if source.buffer == target.buffer and not disjoint(regions[0], regions[1], self.ranges):
            raise ScheduleError(
                f"source and target overlap in buffer '{source.buffer}'; copy to another buffer", rule="operand-alias"
            )
        self._touch(number, stream, source, regions[0], "r")
        self._touch(number, stream, target, regions[1], "w")

    def _check_torch_call(self, number: int, step: TorchCall) -> None:
        if self.is_init:
            raise ScheduleError("torch runs in calls only, and this is the init entry", rule="torch-at-init")
        if self.is_captured:
            raise ScheduleError(
                "torch operators are called from the host, which a captured graph would leave out at replay; do not "
                "capture this entry",
                rule="capture-host-work",
            )
        try:
            check_region(step.region, len(step.inputs), len(step.outputs), len(step.sizes))
        except PlanError as error:
            raise ScheduleError(str(error), rule="torch-region") from error
        self.views.check_symbols(step.sizes, "a size of the region")
        for size in step.sizes:
            check_size(size, self.ranges)
        for view in step.operands:
            if is_packed(view) or len(view.shape) != len(view.strides) or not is_contiguous(view):
                raise ScheduleError(
                    f"the view of buffer '{view.buffer}' is not contiguous; make it so with a kernel first",
                    rule="torch-operand",
                )
        reads: list[Access] = ["r" for _ in step.inputs]
        writes: list[Access] = ["w" for _ in step.outputs]
        accesses = [*reads, *writes]
        self._check_aliases(step.operands, accesses, None)
        self._touch_all(number, step.stream, step.operands, accesses)

    # --- operands ---

    def _match_operands(self, spec: KernelSpec, views: Sequence[View]) -> None:
        if len(views) != len(spec.operands):
            names = ", ".join(operand.name for operand in spec.operands)
            raise ScheduleError(
                f"it passes {len(views)} views, kernel '{spec.name}' takes {len(spec.operands)} operands ({names})",
                rule="operand-count",
            )
        for operand, view in zip(spec.operands, views, strict=True):
            if view.dtype != operand.dtype:
                self._refuse_operand("operand-dtype", operand, view, f"{view.dtype}, not {operand.dtype}")
            if not same_dims(view.shape, operand.shape):
                self._refuse_operand("operand-shape", operand, view, f"shape {view.shape}, not {operand.shape}")
            if not same_dims(view.strides, operand.strides):
                self._refuse_operand("operand-strides", operand, view, f"strides {view.strides}, not {operand.strides}")
            if not same_storage(view, operand):
                what = f"{storage(view)}, not {storage(operand)}"
                self._refuse_operand("operand-storage", operand, view, what)

    @staticmethod
    def _refuse_operand(rule: str, operand: Operand, view: View, what: str) -> NoReturn:
        raise ScheduleError(f"operand '{operand.name}' (buffer '{view.buffer}') has {what}", rule=rule)

    def _check_aliases(self, views: Sequence[View], accesses: Sequence[Access], spec: KernelSpec | None) -> None:
        """ScheduleError if a written operand overlaps another operand. A loop may read an element where it writes
        it."""
        for i, view in enumerate(views):
            if accesses[i] == "r":
                continue
            for j, other in enumerate(views):
                if j == i or other.buffer != view.buffer or (accesses[j] != "r" and j > i):
                    continue
                if disjoint(self.views.region(view), self.views.region(other), self.ranges):
                    continue
                if accesses[j] == "r" and view == other and spec is not None and _is_elementwise(spec, i, j):
                    continue
                names = [spec.operands[k].name for k in (j, i)] if spec is not None else [str(j), str(i)]
                raise ScheduleError(
                    f"the operands '{names[0]}' and '{names[1]}' overlap in buffer '{view.buffer}' and one is written",
                    rule="operand-alias",
                )

    def _touch_all(self, number: int, stream: str, views: Sequence[View], accesses: Sequence[Access]) -> None:
        """Checks the reads of all operands, then their writes."""
        device, index = self.program.streams[stream].device, self.clocks.index[stream]
        for view, access in zip(views, accesses, strict=True):
            arena = self.views.arena_of(view)
            if arena.device != device:
                raise ScheduleError(
                    f"it runs on device '{device}', but buffer '{view.buffer}' lies on device '{arena.device}'; only "
                    "a copy crosses devices",
                    rule="wrong-device",
                )
            if access != "w":
                self._touch(number, index, view, self.views.region(view), "r")
        for view, access in zip(views, accesses, strict=True):
            if access != "r":
                self._touch(number, index, view, self.views.region(view), "w")

    def _touch(self, number: int, stream: int, view: View, region: Region, access: Access) -> None:
        buffer = self.program.buffers[view.buffer]
        arena = self.program.arenas[buffer.arena]
        state = self.states.get(buffer.name)
        if state is None:
            state = self.states[buffer.name] = self._new_state(buffer, arena)
        if access == "r":
            if arena.kind == "init" and not self.is_init:
                self._check_init_read(buffer, region)
            self.memory.read(state, region, stream, number)
            return
        if arena.kind in _READ_ONLY and not (arena.kind == "init" and self.is_init):
            raise ScheduleError(
                f"it writes buffer '{buffer.name}' of the {arena.kind} arena '{arena.name}', which is read-only here",
                rule=_READ_ONLY[arena.kind],
            )
        self.memory.write(state, arena.name, region, stream, number)

    def _new_state(self, buffer: Buffer, arena: Arena) -> BufferState:
        loaded = arena.kind in ("constants", "input", "state") or (arena.kind == "init" and not self.is_init)
        return BufferState(buffer.name, buffer.offset, buffer.nbytes, arena.kind == "activations", loaded)

    def _check_init_read(self, buffer: Buffer, region: Region) -> None:
        if self.memory.coverage.hole(region, self.init_written.get(buffer.name, [])) is not None:
            raise ScheduleError(
                f"it reads bytes [{region.min}, {region.max}) of the init buffer '{buffer.name}', not all of which "
                "the init entry writes",
                rule="init-unwritten",
            )


def _is_elementwise(spec: KernelSpec, written: int, read: int) -> bool:
    """Whether a loop reads each element of operand `read` in the iteration that writes the same element of `written`. A
    body without accesses is that of a skeleton spec."""
    body = spec.body
    if not isinstance(body, LoopKernel):
        return False
    if not body.accesses:
        return True
    if len(body.accesses) != len(spec.operands):  # which its contract will refuse
        return False
    return "reduction" not in body.iterators and body.accesses[written] == body.accesses[read]
