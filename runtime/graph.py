"""Captured graphs: one call of a session, recorded once and replayed with other inputs.

prepare   static buffers for inputs and outputs, every kernel loaded, one eager run (states are restored after it)
freeze    from here on an allocation is an error
record    the plan's steps on the session's streams, between begin_capture and end_capture
seal      the graph must hold exactly the kernels and copies of the plan's steps, else it is refused
replay    inputs into the static buffers, one launch, copies of the outputs
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    CaptureRuleError,
    RuntimeFailure,
)
from qcompiler.plan.dims import dim
from qcompiler.plan.plan import EntryPoint, TensorSig, TorchCall
from qcompiler.plan.torch_regions import operators
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.backends.base import CaptureMode, Graph, Memory
from qcompiler.runtime.binding import Binding, Shape
from qcompiler.runtime.device_array import DeviceArray
from qcompiler.runtime.executor import Prepared
from qcompiler.runtime.forking import free_after_fork
from qcompiler.runtime.interrupts import uninterrupted
from qcompiler.runtime.streams import order

if TYPE_CHECKING:
    from qcompiler.runtime.device_interop import Argument
    from qcompiler.runtime.device_session import Call, DeviceSession


SMALL = 4096
"""Bytes of an input that is uploaded with others: more take longer to copy on the host than to upload alone."""

ALIGNMENT = 16
"""Bytes: of the widest load of a kernel."""


class _Recording:
    """One capture at a time in the process: a second concurrent capture could become part of the first unnoticed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting = False
        free_after_fork(self)
        os.register_at_fork(after_in_child=self._wake_collector)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The garbage collector is off meanwhile, so that no finaliser frees device memory."""
        with self._lock:
            self._resting = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                self._wake_collector()

    def _wake_collector(self) -> None:
        if self._resting:
            gc.enable()
        self._resting = False


_recording = _Recording()


def capture(
    session: DeviceSession,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: CaptureMode,
    stream: Any,
    keep_states: bool,
) -> CapturedGraph:
    """A graph of one call of `session`; the caller of this function holds the session."""
    callers, arguments = session.read(session.program.flatten_inputs(args, kwargs), stream)
    if callers.capturing:
        raise CaptureRuleError(
            "capture() inside a capture of the caller's; call the program itself with `out=` to become part of it"
        )
    binding = session.bind(tuple(argument.shape for argument in arguments))
    refuse_torch_calls(session.program.plan.entries[binding.entry])
    prepared = session.executors[binding.entry].prepare(binding)
    if not any(prepared.nodes.values()):
        raise CaptureRuleError(
            f"entry point '{session.program.plan.entries[binding.entry].name}' has nothing to do on the device for "
            "arguments of these shapes, so its graph would be empty (a rule of ours: the work must have gone elsewhere)"
        )
    buffers = StaticBuffers(session, binding)
    with _states_kept(session) if keep_states else contextlib.nullcontext():
        _warm_up(session, session.judge(callers, arguments, binding, buffers.out_tree()), buffers)
    session.queues.synchronize()
    with _recording.alone(), _frozen(session):
        graph = _record(session, binding, buffers, mode)
    _seal(session, binding, prepared, graph)
    return CapturedGraph(session, graph, binding, buffers)


def refuse_torch_calls(entry: EntryPoint) -> None:
    """CaptureRuleError for an entry point with a part that runs in torch."""
    names = dict.fromkeys(
        name for step in entry.steps if isinstance(step, TorchCall) for name in operators(step.region)
    )
    if names:
        raise CaptureRuleError(
            f"entry point '{entry.name}' runs {', '.join(names)} in torch (fallback=\"torch\"), from the host: a "
            "captured graph would leave that out at replay. Call the program instead"
        )


@dataclass(frozen=True)
class Part:
    """The part of a graph's memory that holds one input."""

    memory: Memory
    address: int
    nbytes: int


class SmallInputs:
    """The small inputs of a graph on the first device, in one piece of memory: one copy brings the host's arguments.

    A copy costs the host as much as the launch of a graph.  `places` has where each input begins, by its number.
    """

    def __init__(self, session: DeviceSession, binding: Binding) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        total, slot = 0, next(iter(session.program.slots))
        entry = session.program.plan.entries[binding.entry]
        for number, (sig, nbytes) in enumerate(zip(entry.inputs, binding.input_nbytes, strict=True)):
            if 0 < nbytes <= SMALL and session.memory.slot_of[sig.arena] == slot:
                self.places[number] = (total, nbytes)
                total += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._home = session.queues.first
        self._memory = session.memory.allocate(slot, total, "graph inputs") if self.places else None
        self._bytes = (ctypes.c_uint8 * total)()
        self._first = ctypes.addressof(self._bytes)

    def at(self, number: int) -> Part:
        """The memory of an input."""
        begin, nbytes = self.places[number]
        assert self._memory is not None
        return Part(self._memory, self._memory.address + begin, nbytes)

    def fill(self, call: Call) -> bool:
        """Uploads the arguments, if all of them lie on the host."""
        if not self.places or any(call.arguments[number].device is not None for number in self.places):
            return False
        self.upload({number: call.arguments[number].address for number in self.places})
        return True

    def upload(self, addresses: Mapping[int, int]) -> None:
        """Uploads the bytes at these addresses, by the inputs' numbers."""
        assert self._memory is not None
        for number, (begin, nbytes) in self.places.items():
            ctypes.memmove(self._first + begin, addresses[number], nbytes)
        self._home.backend.upload(self._home.stream, self._memory.address, self._first, len(self._bytes))


class StaticBuffers:
    """A graph's own memory for inputs and outputs, at the sizes it was captured for."""

    def __init__(self, session: DeviceSession, binding: Binding) -> None:
        entry = session.program.plan.entries[binding.entry]
        self._session = session
        self._binding = binding
        self._together = SmallInputs(session, binding)
        self.inputs = [
            self._memory(sig, nbytes, "input") if number not in self._together.places else self._together.at(number)
            for number, (sig, nbytes) in enumerate(zip(entry.inputs, binding.input_nbytes, strict=True))
        ]
        self.outputs = [
            self._memory(sig, nbytes, "output")
            for sig, nbytes in zip(entry.outputs, binding.output_nbytes, strict=True)
        ]
        self.output_slots = [session.memory.slot_of[sig.arena] for sig in entry.outputs]

    def _memory(self, sig: TensorSig, nbytes: int, what: str) -> Memory:
        slot = self._session.memory.slot_of[sig.arena]
        return self._session.memory.allocate(slot, nbytes, f"graph {what} {sig.name}")

    def arrays(self, check: Any = None) -> list[DeviceArray]:
        """The outputs as arrays; `check` is called before each reading."""
        session, binding = self._session, self._binding
        homes, done = session.queues.homes, session.done
        return [
            DeviceArray(
                homes[slot].backend, memory.address, shape, dtype, homes[slot].stream, memory,
                done[homes[slot].backend.device], check,
            )
            for memory, slot, shape, dtype in zip(
                self.outputs, self.output_slots, binding.outputs, session.result_dtypes, strict=True
            )
        ]  # fmt: skip

    def out_tree(self) -> Any:
        return self._session.program.unflatten_outputs(self.arrays())

    def fill(self, call: Call) -> None:
        """The call's arguments into the static inputs, on the homes."""
        together = self._together.fill(call)
        for number, (argument, memory) in enumerate(zip(call.arguments, self.inputs, strict=True)):
            if together and number in self._together.places:
                continue
            nbytes = self._binding.input_nbytes[number]
            if argument.device is None:
                self._session.upload(call, number, memory.address)
            elif nbytes:
                entry = self._session.program.plan.entries[self._binding.entry]
                home = self._session.home_of(entry.inputs[number].arena)
                home.backend.copy(home.stream, memory.address, argument.address, nbytes)

    def fill_from(self, addresses: Sequence[int]) -> None:
        """Arguments on the host, at these addresses, into the static inputs."""
        if self._together.places:
            self._together.upload(dict(enumerate(addresses)))
        entry = self._session.program.plan.entries[self._binding.entry]
        for number, (address, memory) in enumerate(zip(addresses, self.inputs, strict=True)):
            if number not in self._together.places and memory.nbytes:
                home = self._session.home_of(entry.inputs[number].arena)
                home.backend.upload(home.stream, memory.address, address, memory.nbytes)

    def read_out(self, call: Call) -> None:
        """The static outputs into the call's results, on the homes."""
        for number, (target, memory) in enumerate(zip(call.targets, self.outputs, strict=True)):
            nbytes = self._binding.output_nbytes[number]
            if target.device is None:
                self._session.download(call, number, memory.address)
            elif nbytes:
                home = self._session.queues.homes[self.output_slots[number]]
                home.backend.copy(home.stream, target.address, memory.address, nbytes)

    def addresses(self) -> tuple[list[int], list[int]]:
        return [memory.address for memory in self.inputs], [memory.address for memory in self.outputs]


# --- the phases ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _states_kept(session: DeviceSession) -> Iterator[None]:
    """Restores the states afterwards."""
    copies: list[tuple[Any, Memory, Memory]] = []
    for name, memory in session.memory.states.items():
        slot = session.memory.slot_of[name]
        if memory.nbytes:
            kept = session.memory.allocate(slot, memory.nbytes, f"copy of state {name}")
            copies.append((session.queues.homes[slot], memory, kept))
    for home, memory, kept in copies:
        home.backend.copy(home.stream, kept.address, memory.address, memory.nbytes)
    try:
        yield
    finally:
        for home, memory, kept in copies:
            home.backend.copy(home.stream, memory.address, kept.address, memory.nbytes)


def _warm_up(session: DeviceSession, call: Call, buffers: StaticBuffers) -> None:
    with session.settled(call):
        session.enter(call)
        buffers.fill(call)
        session.issue(call.binding, *buffers.addresses())
        session.leave(call)


@contextlib.contextmanager
def _frozen(session: DeviceSession) -> Iterator[None]:
    """Forbids allocations by the session."""
    session.memory.freeze.frozen = True
    try:
        yield
    finally:
        session.memory.freeze.frozen = False


def _record(session: DeviceSession, binding: Binding, buffers: StaticBuffers, mode: CaptureMode) -> Graph:
    first = session.queues.first
    homes = session.queues.homes.values()
    try:
        first.backend.begin_capture(first.stream, mode)
        order([first], homes)
        session.issue(binding, *buffers.addresses())
        order(homes, [first])
        return first.backend.end_capture(first.stream)
    except BaseException:
        if first.stream.is_capturing:
            # The capture must end in any case; the error that a half capture makes no graph adds nothing.
            with contextlib.suppress(RuntimeFailure):
                first.backend.end_capture(first.stream).close()
        raise


def _seal(session: DeviceSession, binding: Binding, prepared: Prepared, graph: Graph) -> None:
    """CaptureRuleError unless the graph holds exactly the nodes of the plan's steps."""
    wanted = {kind: count for kind, count in prepared.nodes.items() if count}
    found = {kind: count for kind, count in graph.shape.nodes.items() if count and kind != "empty"}
    if found == wanted:
        return
    graph.close()
    entry = session.program.plan.entries[binding.entry]
    raise CaptureRuleError(
        f"the graph captured of entry point '{entry.name}' holds {_counted(found)}, its steps are {_counted(wanted)}: "
        "work escaped the capture, or came into it from elsewhere"
    )


def _counted(nodes: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} nodes" for kind, count in sorted(nodes.items())) or "nothing"


# --- the graph -------------------------------------------------------------------------------------------------------


class CapturedGraph:
    """One call of a session as a device graph, for arguments of the shapes it was captured with.

    It keeps its session and its own buffers alive.  States continue from replay to replay, and between replays and
    calls of the same session, as with calls alone.
    """

    def __init__(self, session: DeviceSession, graph: Graph, binding: Binding, buffers: StaticBuffers) -> None:
        self.session = session
        self.binding = binding
        self._graph = graph
        self._buffers = buffers
        self._generation = 0
        entry = session.program.plan.entries[binding.entry]
        self.entry = entry.name
        self._wanted = {sig.name: (_shape(sig, binding), np.dtype(NUMPY_DTYPES[sig.dtype])) for sig in entry.inputs}
        self.shapes: dict[str, Shape] = {name: shape for name, (shape, _) in self._wanted.items()}
        self._made = [(_shape(sig, binding), np.dtype(NUMPY_DTYPES[sig.dtype])) for sig in entry.outputs]

    def replay(self, *args: Any, stream: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """The results for new arguments of the captured shapes: copies, on the side where a call would put them.

        `stream` and `out` as for a call.  ArgumentShapeError names the captured shapes.
        """
        session = self.session
        ticket = session.ticket()
        with uninterrupted, session._lock:
            session.begin(ticket)
            return self._replay(args, kwargs, stream, out)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Any, out: Any) -> Any:
        session = self.session
        callers, arguments = session.read(session.program.flatten_inputs(args, kwargs), stream)
        self._check_shapes(arguments)
        if callers.capturing:
            raise CaptureRuleError(
                "replay() inside a capture of the caller's; call the session itself with `out=` to become part of it"
            )
        call = session.judge(callers, arguments, self.binding, out)
        own = {memory.address for memory in self._buffers.outputs if memory.nbytes}
        if any(target.address in own for target in call.targets):
            raise ArgumentError("out= is one of the graph's own outputs; leave it out and read `g.outputs` afterwards")
        first, homes = session.queues.first, session.queues.homes.values()
        with session.settled(call), first.backend.current():
            session.enter(call)
            self._buffers.fill(call)
            order(homes, [first])
            self._generation += 1
            self._graph.launch(first.stream)
            order([first], homes)
            self._buffers.read_out(call)
            session.leave(call)
        return session.returned(call) if out is None else out

    def replay_on_host(self, arguments: Mapping[str, Any], results: Mapping[int, Any]) -> None:
        """`replay` for NumPy arrays alone: every argument by name, and the outputs that are wanted, by their number.

        It takes the host less time, since nothing is ordered with the caller's streams: arguments are read before it
        returns, and results are complete.  Device work of the caller that reads `outputs` must have ended.
        ArgumentStructureError for other names and numbers, ArgumentShapeError and ArgumentDtypeError for arrays that
        the graph was not captured for.
        """
        session, buffers = self.session, self._buffers
        self._check_names(arguments, results)
        ticket = session.ticket()
        with uninterrupted, session._lock:
            session.begin(ticket)
            first, homes = session.queues.first, session.queues.homes.values()
            if first.backend.captures_here() or any(home.stream.is_capturing for home in homes):
                raise CaptureRuleError("replay_on_host() inside a capture of the caller's, which holds no host arrays")
            given, made = dict(arguments), dict(results)  # a mapping may make an array whenever it is asked
            sources = [_address(f"argument '{name}'", given[name], *kept) for name, kept in self._wanted.items()]
            targets = {
                number: _address(f"output {number}", array, *self._made[number], written=True)
                for number, array in made.items()
            }
            try:
                with first.backend.current():
                    buffers.fill_from(sources)
                    order(homes, [first])
                    self._generation += 1
                    self._graph.launch(first.stream)
                    order([first], homes)
                    for number, address in targets.items():
                        home, memory = session.queues.homes[buffers.output_slots[number]], buffers.outputs[number]
                        home.backend.download(home.stream, address, memory.address, memory.nbytes)
                    for home in homes:
                        home.backend.synchronize(home.stream)
            except BaseException:
                with contextlib.suppress(RuntimeFailure):
                    session.queues.synchronize()
                raise

    def _check_names(self, arguments: Mapping[str, Any], results: Mapping[int, Any]) -> None:
        if arguments.keys() != self._wanted.keys():
            raise ArgumentStructureError(f"the graph takes {', '.join(self._wanted)}, not {', '.join(arguments)}")
        if wrong := results.keys() - set(range(len(self._made))):
            raise ArgumentStructureError(f"the graph has {len(self._made)} outputs, from 0 on, and none {min(wrong)}")

    def _check_shapes(self, arguments: Sequence[Argument]) -> None:
        for argument, (name, shape) in zip(arguments, self.shapes.items(), strict=True):
            if tuple(argument.shape) != shape:
                captured = ", ".join(f"{each} {extents}" for each, extents in self.shapes.items())
                raise ArgumentShapeError(
                    f"argument '{name}' has shape {tuple(argument.shape)}, but this graph was captured with "
                    f"{captured}; capture another graph for other shapes"
                )

    @property
    def outputs(self) -> Any:
        """The static output buffers, in the results' structure. The next replay overwrites them; after it, reading an
        array that this returned is an error."""
        generation = self._generation

        def check() -> None:
            if self._generation != generation:
                raise CaptureRuleError(
                    f"this output is of replay {generation}, and replay {self._generation} has overwritten it; read "
                    "`g.outputs` again, or keep what `g.replay()` returned"
                )

        return self.session.program.unflatten_outputs(self._buffers.arrays(check))

    @property
    def nodes(self) -> dict[str, int]:
        """Nodes of the graph by kind."""
        return dict(self._graph.shape.nodes)

    def close(self) -> None:
        """Frees the graph; its buffers are freed with their last reference."""
        self._graph.close()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        return f"<CapturedGraph of {self.entry} for {shapes} on {self.session.program.device}>"


def _shape(sig: TensorSig, binding: Binding) -> Shape:
    return tuple(dim(extent).evaluate(binding.symbols) for extent in sig.shape)


def _address(what: str, array: Any, shape: Shape, dtype: np.dtype[Any], *, written: bool = False) -> int:
    """The address of a NumPy array of this shape and type."""
    if not isinstance(array, np.ndarray):
        raise ArgumentDtypeError(f"{what} is a {type(array).__name__}, not a NumPy array")
    if array.shape != shape:
        raise ArgumentShapeError(f"{what} has shape {array.shape}, but this graph was captured with {shape}")
    if array.dtype != dtype:
        raise ArgumentDtypeError(f"{what} is an array of {array.dtype}, and the graph was captured with {dtype}")
    if not (array.flags.c_contiguous and array.flags.aligned and (array.flags.writeable or not written)):
        raise ArgumentDtypeError(
            f"{what} must be contiguous, row by row, and aligned{', and writable' if written else ''}; copy it"
        )
    return int(array.__array_interface__["data"][0])
