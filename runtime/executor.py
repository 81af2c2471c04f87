"""Two ways to run an entry point over the same arenas: a CPU program's compiled function, or the plan step by step.

`PlanExecutor` is the one executor for every device.  It resolves a plan once per size of arguments: kernels, symbols,
the cases of selects and every fixed address.  A call then only issues launches, copies, records and waits.
On the CPU both ways call the same kernels with the same addresses, so their results are equal bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import msgspec

from qcompiler.errors import PlanError
from qcompiler.kernels.cpu.entry import segments
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import (
    Copy,
    EntryPoint,
    Launch,
    Plan,
    Record,
    Select,
    Step,
    TorchCall,
    View,
    Wait,
    calls_torch,
    taken,
)
from qcompiler.plan.torch_regions import Ready, TensorMemory, runner
from qcompiler.plan.view_regions import begin_of, nbytes_of
from qcompiler.runtime.backends.base import Backend, Kernel, Stream
from qcompiler.runtime.binding import Binding
from qcompiler.runtime.memory import Block
from qcompiler.runtime.native import Library, kernel_error
from qcompiler.runtime.placement import SlotDevice
from qcompiler.runtime.streams import Queue, Queues
from qcompiler.runtime.support import entry_caller

PREPARED_LIMIT = 256
"""The number of argument sizes for which a session keeps an entry point resolved."""

ArenaArray = ctypes.Array[ctypes.c_void_p]


class Executor(Protocol):
    """Runs one entry point over arenas whose input and output addresses are set; raises errors that kernels report."""

    def run(self, context: Any, arenas: ArenaArray, binding: Binding) -> None: ...


class NativeExecutor:
    """Calls `qe_<number of the entry>`, in the floating-point state of the pool's threads."""

    def __init__(self, plan: Plan, entry: EntryPoint, library: Library) -> None:
        self._plan = plan
        self._function = library.entry(plan, entry)
        self._call = entry_caller()

    def run(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        if self._call(self._function, ctypes.addressof(context), ctypes.addressof(arenas), binding.address):
            raise kernel_error(context, self._plan)


@dataclass
class TorchTime:
    """Seconds of an entry point's calls on the host, and torch's part of them; 0 if torch has no part."""

    torch: float = 0.0
    calls: float = 0.0


class SegmentedExecutor:
    """An entry point with torch calls: a compiled function for each run of steps between them.

    The `PlanExecutor` runs the torch calls.
    """

    def __init__(self, plan: Plan, entry: EntryPoint, library: Library, steps: PlanExecutor) -> None:
        self._plan = plan
        self._steps = steps
        self.time = steps.time
        self._call = entry_caller()
        self._parts = [
            library.segment(plan, entry, number) if isinstance(part, range) else part
            for number, part in enumerate(segments(entry))
        ]

    def run(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        calls = iter(self._steps.torch_calls(binding))
        began, spent = perf_counter(), self._steps.time
        for part in self._parts:
            if part is None:
                spent.torch += _timed(next(calls), context, arenas)
            elif self._call(part, ctypes.addressof(context), ctypes.addressof(arenas), binding.address):
                raise kernel_error(context, self._plan)
        spent.calls += perf_counter() - began


def total_time(executors: Iterable[Executor]) -> TorchTime:
    """The total time of all entry points that have a part in torch."""
    times = [each.time for each in executors if isinstance(each, SegmentedExecutor | PlanExecutor)]
    return TorchTime(sum(each.torch for each in times), sum(each.calls for each in times))


def _timed(call: _TorchCall, context: Any, arenas: ArenaArray) -> float:
    began = perf_counter()
    call.issue(context, arenas)
    return perf_counter() - began


class EntryArenas:
    """One entry point's arenas for one session: a C array in the order of `Plan.arenas`, null where it uses none.

    `inputs` and `outputs` are the positions that each call sets: the verifier ensures that each argument and each
    result has an arena of its own.
    """

    def __init__(self, plan: Plan, entry: EntryPoint, bases: Mapping[str, int]) -> None:
        self.arenas = (ctypes.c_void_p * max(len(plan.arenas), 1))()
        position = {arena.name: index for index, arena in enumerate(plan.arenas)}
        for name, address in bases.items():
            self.arenas[position[name]] = address or None
        self.inputs = tuple(position[sig.arena] for sig in entry.inputs)
        self.outputs = tuple(position[sig.arena] for sig in entry.outputs)
        self._check_memory(plan, entry)

    def _check_memory(self, plan: Plan, entry: EntryPoint) -> None:
        """PlanError if a step uses an arena that has no memory here.

        The verifier already refuses such plans; this is a second check.  Native code would use the arena's null address
        as a base, and so any offset of a buffer as an absolute address.
        """
        given = () if entry is plan.init else (*self.inputs, *self.outputs)  # arenas of init are never set
        position = {arena.name: index for index, arena in enumerate(plan.arenas)}
        arena_of = {buffer.name: buffer.arena for buffer in plan.buffers}
        for name in dict.fromkeys(arena_of[buffer] for buffer in _buffers_of(entry.steps)):
            place = position[name]
            if place not in given and self.arenas[place] is None and plan.arenas[place].nbytes:
                raise PlanError(
                    f"entry point '{entry.name}' uses the {plan.arenas[place].kind} arena '{name}', which has no "
                    "memory when it runs"
                )

    def set(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Sets the arguments and results of a call."""
        arenas = self.arenas
        for position, address in zip(self.inputs, inputs, strict=True):
            arenas[position] = address
        for position, address in zip(self.outputs, outputs, strict=True):
            arenas[position] = address


# --- the plan, resolved for one binding ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Address:
    """An address: `base + arenas[position]`; with position < 0, `base` alone."""

    base: int
    position: int

    def at(self, arenas: ArenaArray) -> int:
        return self.base if self.position < 0 else self.base + (arenas[self.position] or 0)


@dataclass(slots=True)
class _Launch:
    """A launch with its operands' addresses; `moving` are the operands in arguments or results."""

    number: int
    backend: Backend
    stream: Stream
    kernel: Kernel
    operands: list[int]
    moving: list[tuple[int, _Address]]
    symbols: tuple[int, ...]

    def issue(self, context: Any, arenas: ArenaArray) -> None:
        self.backend.launch(self.stream, self.kernel, self.at(arenas), self.symbols, context)

    def at(self, arenas: ArenaArray) -> list[int]:
        """The operands' addresses in a call with these arenas."""
        operands = self.operands
        if self.moving:
            operands = operands.copy()
            for number, address in self.moving:
                operands[number] = address.at(arenas)
        return operands


@dataclass(slots=True)
class _Copy:
    number: int
    backend: Backend
    stream: Stream
    source: _Address
    target: _Address
    nbytes: int

    def issue(self, context: Any, arenas: ArenaArray) -> None:
        self.backend.copy(self.stream, self.target.at(arenas), self.source.at(arenas), self.nbytes)


@dataclass(slots=True)
class _Record:
    number: int
    queue: Queue
    event: Any

    def issue(self, context: Any, arenas: ArenaArray) -> None:
        self.queue.backend.record(self.event, self.queue.stream)


@dataclass(slots=True)
class _Wait:
    number: int
    queue: Queue
    event: Any

    def issue(self, context: Any, arenas: ArenaArray) -> None:
        self.queue.backend.wait(self.queue.stream, self.event)


@dataclass(slots=True)
class _TorchCall:
    """A region of torch operators. On the simulated GPU, whose memory torch cannot access, it runs on host copies;
    elsewhere on the operands in place."""

    number: int
    queue: Queue
    ready: Ready
    sizes: tuple[int, ...]
    inputs: list[tuple[_Address, TensorMemory]]
    outputs: list[tuple[_Address, TensorMemory]]

    def issue(self, context: Any, arenas: ArenaArray) -> None:
        inputs, outputs = (
            [msgspec.structs.replace(place, address=address.at(arenas)) for address, place in group]
            for group in (self.inputs, self.outputs)
        )
        backend = self.queue.backend
        if backend.kind == "cpu":
            self.ready.on_host(self.sizes, inputs, outputs)
        elif backend.kind == "cuda":
            self.ready.on_cuda(self.sizes, inputs, outputs, backend.device, self.queue.stream.handle)
        else:
            self._on_copies(inputs, outputs)

    def _on_copies(self, inputs: Sequence[TensorMemory], outputs: Sequence[TensorMemory]) -> None:
        backend, stream = self.queue.backend, self.queue.stream
        read, written = ([Block(place.nbytes) for place in group] for group in (inputs, outputs))
        for place, block in zip(inputs, read, strict=True):
            if place.nbytes:
                backend.download(stream, block.address, place.address, place.nbytes)
        backend.synchronize(stream)
        self.ready.on_host(self.sizes, _moved(inputs, read), _moved(outputs, written))
        for place, block in zip(outputs, written, strict=True):
            if place.nbytes:
                backend.upload(stream, place.address, block.address, place.nbytes)


def _moved(places: Sequence[TensorMemory], blocks: Sequence[Block]) -> list[TensorMemory]:
    return [msgspec.structs.replace(place, address=block.address) for place, block in zip(places, blocks, strict=True)]


@dataclass(slots=True)
class Addressed:
    """A launch with all its addresses; without a kernel, a copy of `values[0]` bytes from operand 1 to operand 0."""

    number: int
    kernel: Kernel | None
    operands: list[int]
    values: tuple[int, ...]


@dataclass(slots=True)
class TorchStep:
    """A torch call of one call with its arenas: `run` takes the context."""

    number: int
    run: Callable[[Any], None]


@dataclass(frozen=True)
class Submission:
    """A step that `issue` submits to a stream; `work` says that it is a launch, a copy or a torch call."""

    number: int
    backend: Backend
    stream: Stream
    work: bool
    issue: Callable[[Any, ArenaArray], None]


_Step = _Launch | _Copy | _Record | _Wait | _TorchCall


@dataclass
class Prepared:
    """An entry point at one size. `nodes` counts the nodes that a captured graph of it must have, by kind."""

    steps: list[_Step] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=lambda: {"kernel": 0, "copy": 0})


class PlanExecutor:
    """Runs the plan on the session's streams."""

    def __init__(
        self, plan: Plan, entry: EntryPoint, slots: Mapping[str, SlotDevice], queues: Queues, frame: EntryArenas
    ) -> None:
        self._entry = entry
        self._slots = slots
        self._queues = queues
        self._frame = frame
        self._arena_index = {arena.name: index for index, arena in enumerate(plan.arenas)}
        self._arenas = {arena.name: arena for arena in plan.arenas}
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._slot_of = {stream.name: stream.device for stream in plan.streams}
        self._moving = set(frame.inputs) | set(frame.outputs)
        self._prepared: dict[tuple[int, ...], Prepared] = {}
        self._calls: dict[tuple[int, ...], list[_TorchCall]] = {}
        self._regions: dict[int, Ready] = {}
        self._calls_torch = calls_torch(entry)
        self.time = TorchTime()
        self.queues = queues.of_entry(entry)
        self._label = _sim_label() if any(slot.backend.kind == "sim" for slot in slots.values()) else None

    def run(self, context: Any, arenas: ArenaArray, binding: Binding) -> None:
        """Issues every step. On the CPU the work is then done; elsewhere it is submitted."""
        steps = self.prepare(binding).steps
        if self._calls_torch:
            self._run_timed(steps, context, arenas)
            return
        if self._label is None:
            for step in steps:
                step.issue(context, arenas)
            return
        for step in steps:
            with self.labelled(step.number):
                step.issue(context, arenas)

    def labelled(self, number: int) -> AbstractContextManager[None]:
        """Names the step to the simulated GPU."""
        return nullcontext() if self._label is None else self._label(f"step {number} of {self._entry.name}")

    def submissions(self, binding: Binding) -> list[Submission]:
        """The steps one by one, for who does something between two of them."""
        found = []
        for step in self.prepare(binding).steps:
            queue = step.queue if isinstance(step, _Record | _Wait | _TorchCall) else step
            work = isinstance(step, _Launch | _Copy | _TorchCall)
            found.append(Submission(step.number, queue.backend, queue.stream, work, step.issue))
        return found

    def _run_timed(self, steps: Sequence[_Step], context: Any, arenas: ArenaArray) -> None:
        began = perf_counter()
        for step in steps:
            with self.labelled(step.number):
                if isinstance(step, _TorchCall):
                    self.time.torch += _timed(step, context, arenas)
                else:
                    step.issue(context, arenas)
        self.time.calls += perf_counter() - began

    def addressed(self, binding: Binding, arenas: ArenaArray) -> list[Addressed | TorchStep]:
        """The launches, copies and torch calls of one call with these arenas, in order."""
        found: list[Addressed | TorchStep] = []
        for step in self.prepare(binding).steps:
            match step:
                case _Launch():
                    found.append(Addressed(step.number, step.kernel, step.at(arenas), step.symbols))
                case _Copy():
                    places = [step.target.at(arenas), step.source.at(arenas)]
                    found.append(Addressed(step.number, None, places, (step.nbytes,)))
                case _TorchCall():
                    found.append(TorchStep(step.number, partial(step.issue, arenas=arenas)))
        return found

    def address(self, view: View, binding: Binding, arenas: ArenaArray) -> int:
        """The address of a view's first element in a call with these arenas."""
        return self._address(view, binding.symbols).at(arenas)

    def torch_calls(self, binding: Binding) -> list[_TorchCall]:
        """The torch calls of the entry point, in order, resolved for this binding's symbols."""
        key = tuple(binding.symbols.values())
        if key not in self._calls:
            if len(self._calls) >= PREPARED_LIMIT:
                self._calls.pop(next(iter(self._calls)))
            self._calls[key] = [
                self._torch_call(number, self._queues.named[step.stream], step, binding.symbols)
                for number, step in enumerate(self._entry.steps)
                if isinstance(step, TorchCall)
            ]
        return self._calls[key]

    def prepare(self, binding: Binding) -> Prepared:
        """The entry point resolved for this binding's symbols (kept for the next call)."""
        key = tuple(binding.symbols.values())
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= PREPARED_LIMIT:
                self._prepared.pop(next(iter(self._prepared)))
            prepared = self._prepared[key] = self._resolve(binding.symbols)
        return prepared

    def _resolve(self, symbols: dict[str, int]) -> Prepared:
        prepared = Prepared()
        for number, step in enumerate(self._entry.steps):
            queue = self._queues.named[step.stream]
            match step:
                case Launch():
                    self._add_launch(prepared, number, queue, step, step.kernel, symbols)
                case Select():
                    self._add_launch(prepared, number, queue, step, chosen_kernel(step, symbols), symbols)
                case Copy():
                    self._add_copy(prepared, number, queue, step, symbols)
                case Record():
                    prepared.steps.append(_Record(number, queue, self._queues.record_event(step.event, queue)))
                case Wait():
                    prepared.steps.append(_Wait(number, queue, self._queues.wait_event(step.event)))
                case TorchCall():
                    prepared.steps.append(self._torch_call(number, queue, step, symbols))
        return prepared

    def _add_launch(
        self,
        prepared: Prepared,
        number: int,
        queue: Queue,
        step: Launch | Select,
        name: str,
        symbols: dict[str, int],
    ) -> None:
        kernel = self._slots[self._slot_of[step.stream]].kernels[name]
        if not has_blocks(queue.backend, kernel.spec, symbols):
            return
        addresses = [self._address(view, symbols) for view in step.operands]
        moving = [(place, address) for place, address in enumerate(addresses) if address.position >= 0]
        prepared.steps.append(
            _Launch(
                number,
                queue.backend,
                queue.stream,
                kernel,
                [address.base for address in addresses],
                moving,
                tuple(symbols[each] for each in kernel.spec.symbols),
            )
        )
        prepared.nodes["kernel"] += 1

    def _add_copy(self, prepared: Prepared, number: int, queue: Queue, step: Copy, symbols: dict[str, int]) -> None:
        nbytes = nbytes_of(step.source).evaluate(symbols)
        if not nbytes:
            return
        source, target = self._address(step.source, symbols), self._address(step.target, symbols)
        prepared.steps.append(_Copy(number, queue.backend, queue.stream, source, target, nbytes))
        prepared.nodes["copy"] += 1

    def _torch_call(self, number: int, queue: Queue, step: TorchCall, symbols: dict[str, int]) -> _TorchCall:
        ready = self._regions.get(number)
        if ready is None:
            ready = self._regions[number] = runner().prepare(step.region)
        inputs, outputs = (
            [(self._address(view, symbols), _place(view, symbols, written)) for view in views]
            for views, written in ((step.inputs, False), (step.outputs, True))
        )
        sizes = tuple(_value(size, symbols) for size in step.sizes)
        return _TorchCall(number, queue, ready, sizes, inputs, outputs)

    def _address(self, view: View, symbols: dict[str, int]) -> _Address:
        buffer = self._buffers[view.buffer]
        position = self._arena_index[buffer.arena]
        start = begin_of(view).evaluate(symbols)
        if position in self._moving:
            return _Address(buffer.offset + start, position)
        base = self._frame.arenas[position]
        if base is None and self._arenas[buffer.arena].nbytes:
            raise PlanError(f"entry point '{self._entry.name}' uses the arena '{buffer.arena}' of another one")
        return _Address((base or 0) + buffer.offset + start, -1)


def _sim_label() -> Callable[[str], AbstractContextManager[None]]:
    """Tells the simulated GPU which step of the plan an operation belongs to, for its reports."""
    from qcompiler.runtime.sim.queue import step_label

    return step_label


def has_blocks(backend: Backend, spec: KernelSpec, symbols: Mapping[str, int]) -> bool:
    """Whether a launch has anything to do: a grid with a 0 is not launched. The CPU's kernels have no grid."""
    if backend.kind == "cpu":
        return True
    from qcompiler.kernels.cuda.emit import geometry

    return 0 not in geometry(spec, backend.isa).at({name: symbols[name] for name in spec.symbols})


def _place(view: View, symbols: dict[str, int], written: bool) -> TensorMemory:
    """A torch call's operand; the call sets its address."""
    return TensorMemory(
        address=0, dtype=view.dtype, shape=tuple(_value(d, symbols) for d in view.shape), written=written
    )


def chosen_kernel(step: Select, symbols: dict[str, int]) -> str:
    """The kernel of the first case that fits."""
    value = _value(step.on, symbols)
    case = taken(step.cases, value)
    if case is None:
        raise PlanError(f"no case of the select on {step.on} takes {value}")
    return case.kernel


def _value(extent: Dim, symbols: dict[str, int]) -> int:
    return extent if isinstance(extent, int) else dim(extent).evaluate(symbols)


def _buffers_of(steps: Sequence[Step]) -> Iterator[str]:
    """The buffers that steps read or write."""
    for step in steps:
        match step:
            case Launch() | Select() | TorchCall():
                yield from (view.buffer for view in step.operands)
            case Copy():
                yield from (step.source.buffer, step.target.buffer)


def launched(steps: Sequence[Step]) -> set[str]:
    """Names of the kernels that steps may launch."""
    names: set[str] = set()
    for step in steps:
        if isinstance(step, Launch):
            names.add(step.kernel)
        elif isinstance(step, Select):
            names |= {case.kernel for case in step.cases}
    return names
