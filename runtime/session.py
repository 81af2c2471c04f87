"""A session: one caller's private memory (activations, states, scratch) beside a program's shared constants."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from qcompiler.errors import ArgumentError, CaptureRuleError, DeviceUnavailableError, RuntimeFailure, SessionBusyError
from qcompiler.plan.plan import EntryPoint, calls_torch
from qcompiler.runtime import interop, jax_arrays, on_request
from qcompiler.runtime.backends.cpu import NO_CAPTURE
from qcompiler.runtime.bf16_units import bf16_units
from qcompiler.runtime.binding import Binding, Shape
from qcompiler.runtime.dlpack import HostTensor
from qcompiler.runtime.executor import (
    EntryArenas,
    Executor,
    NativeExecutor,
    PlanExecutor,
    SegmentedExecutor,
    TorchTime,
    total_time,
)
from qcompiler.runtime.forking import free_after_fork
from qcompiler.runtime.int8_units import int8_units
from qcompiler.runtime.interop import Source
from qcompiler.runtime.memory import Block, address_of, kept_if_it_fails
from qcompiler.runtime.placement import SessionMemory
from qcompiler.runtime.profile_cpu import Timings, Walk, check_rounds, time_steps
from qcompiler.runtime.step_results import StepResult, copied, written_views
from qcompiler.runtime.streams import Callers, Queues
from qcompiler.runtime.support import Context, parallel_address

if TYPE_CHECKING:
    from qcompiler.runtime.graph import CapturedGraph
    from qcompiler.runtime.loaded import LoadedProgram
    from qcompiler.runtime.profile import Profile

BINDING_LIMIT = 256
"""The number of argument sizes remembered per session."""


_BUSY = "this session is running a call in another thread; give each thread its own: `s = program.session()`"


class Session(ABC):
    """Runs a program. Calls on one session come one after another; a second concurrent one raises SessionBusyError.

    States start with the values of the model's buffers and live as long as the session; `reset()` restores them.
    """

    def __init__(self, program: LoadedProgram, *, stepwise: bool = False) -> None:
        self.program = program
        self.stepwise = stepwise
        self._lock = threading.Lock()
        self._calls = 0
        self.memory = SessionMemory(program.plan, program.plan.entries, program.slots)
        self.queues = Queues(program.plan, program.slots)
        self._begin_states(fresh=True)
        self.bases = [program.shared_bases | self.memory.bases(entry) for entry in program.plan.entries]
        self._bindings: dict[tuple[Shape, ...], Binding] = {}
        binder = program.binder
        self.wanted = tuple(zip(binder.names, binder.dtypes, strict=True))
        self.result_dtypes = binder.output_dtypes
        self.result_names = binder.output_names
        free_after_fork(self)

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **kwargs: Any) -> Any:
        """The program's results, in the structure that the model returned.

        Arguments are NumPy arrays, torch tensors, arrays of JAX, DLPack objects or arrays on the program's device.
        Results are on the same side as arguments and belong to the caller: arrays of the arguments' library on the
        host, else `DeviceArray`s, torch tensors or arrays of JAX on the device, ready in the order of the caller's
        stream.  With `out=` (an array, or a tree of
        arrays in the results' structure) results are written there, nothing is allocated, and `out` is returned.  None
        in the place of one of several results leaves that result out: on a GPU it is not copied.

        `stream` is the caller's stream on a GPU, if it is neither torch's current one nor the default one.
        """
        ticket = self.ticket()
        with self._lock:
            self.begin(ticket)
            return self._run(args, kwargs, out, stream)

    def ticket(self) -> int:
        """For use as ``with session._lock: session.begin(ticket)``. SessionBusyError if a call is running.

        A lock that is tried and then released in a `finally` stays taken if Ctrl-C falls between the two; `with` takes
        and releases a lock in C, without such a gap.  But `with` waits.  So a call that found the lock free but then
        waited for another call must detect this: its ticket is no longer the next.
        """
        ticket = self._calls
        if self._lock.locked():
            raise SessionBusyError(_BUSY)
        return ticket

    def begin(self, ticket: int) -> None:
        """Must come first inside the lock. SessionBusyError if another call began since the ticket was taken."""
        if self._calls != ticket:
            raise SessionBusyError(_BUSY)
        self._calls += 1

    def reset(self) -> None:
        """Resets all states to their initial values. CaptureRuleError while the caller records a capture."""
        with self._lock:
            self._require_no_capture("reset")
            self._begin_states(fresh=False)

    def states(self) -> dict[str, Any]:
        """A copy of the states' bytes on the host, by arena. CaptureRuleError while the caller records a capture."""
        with self._lock:
            self._require_no_capture("read")
            return self._copied_states()

    def _copied_states(self) -> dict[str, Any]:
        found = {name: Block(memory.nbytes) for name, memory in self.memory.states.items()}
        with kept_if_it_fails(found):
            for name, block in found.items():
                home = self.queues.homes[self.memory.slot_of[name]]
                home.backend.download(home.stream, block.address, self.memory.states[name].address, block.nbytes)
            self.queues.synchronize()
        return {name: block.bytes for name, block in found.items()}

    def set_states(self, values: dict[str, Any]) -> None:
        """Overwrites states by arena with the bytes of another session's `states()`: all of them, or none on an error.

        ArgumentError for an unknown state or a wrong size; CaptureRuleError while the caller records a capture.
        """
        for name, data in values.items():
            wanted = self.memory.states[name].nbytes if name in self.memory.states else None
            if (data.dtype, data.nbytes, data.flags.c_contiguous) != (np.uint8, wanted, True):
                has = ", ".join(f"{each} ({memory.nbytes})" for each, memory in self.memory.states.items())
                raise ArgumentError(
                    f"the state '{name}' of {data.nbytes} bytes is not a state of this program; its states (bytes) are "
                    f"{has or 'none'}, each a contiguous array of uint8"
                )
        with self._lock:
            self._require_no_capture("written")
            self._write_states(values)

    def _write_states(self, values: dict[str, Any]) -> None:
        for name, data in values.items():
            home = self.queues.homes[self.memory.slot_of[name]]
            home.backend.upload(home.stream, self.memory.states[name].address, address_of(data), data.nbytes)
        self._settle()

    @contextlib.contextmanager
    def states_kept(self, keep: bool) -> Iterator[None]:
        """If `keep`, restores the states afterwards from a copy, also after an error. For use inside the lock."""
        kept = self._copied_states() if keep else {}
        try:
            yield
        except BaseException as error:
            try:
                self._write_states(kept)
            except RuntimeFailure as second:
                error.add_note(f"Restoring the states failed, too: {second}")
            raise
        self._write_states(kept)

    def _require_no_capture(self, deed: str) -> None:
        if self.program.kind != "cpu" and Callers(self.queues, self.program.stream).capturing:
            raise CaptureRuleError(f"the caller records a capture, in which states are not {deed}; end it first")

    def _begin_states(self, *, fresh: bool) -> None:
        for name, memory in self.memory.states.items():
            home = self.queues.homes[self.memory.slot_of[name]]
            if not (fresh and home.backend.kind == "cpu"):  # fresh pages are zeros already
                home.backend.zero(home.stream, memory.address, memory.nbytes)
            initial = self.program.initial_states.get(name)
            if initial is not None and initial.nbytes:
                home.backend.upload(home.stream, memory.address, address_of(initial), initial.nbytes)
        self._settle()

    def _settle(self) -> None:
        """Waits until the states are written: a caller's graph, too, may use them, and never waits for our streams."""
        if self.memory.states:
            self.queues.synchronize()

    @abstractmethod
    def torch_time(self) -> TorchTime:
        """Seconds of this session's calls that have a part in torch, and of that part. On a GPU: of submitting them."""

    @abstractmethod
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, stream: Any) -> Any: ...

    @abstractmethod
    def profile(self, *args: Any, rounds: int = 30, keep_states: bool = True, **kwargs: Any) -> Profile:
        """Times each step of a call with these arguments, and what no step accounts for; see `LoadedProgram.profile`.

        ArgumentError without rounds.
        """

    @abstractmethod
    def capture(self, *args: Any, **kwargs: Any) -> CapturedGraph:
        """A graph of one call with arguments of these shapes; see `DeviceSession.capture`."""

    @abstractmethod
    def step_results(
        self, see: Callable[[StepResult], None], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Binding, Any]:
        """Runs one call step by step. `see` gets a copy of what each step wrote, before the next one runs.

        Returns the binding of the call and its results. The states change as by a call.
        """

    def bind(self, shapes: tuple[Shape, ...]) -> Binding:
        """The entry point and symbols for arguments of these shapes (remembered for the next call)."""
        binding = self._bindings.get(shapes)
        if binding is None:
            binding = self.program.binder.bind(shapes)
            if len(self._bindings) >= BINDING_LIMIT:
                self._bindings.pop(next(iter(self._bindings)))
            self._bindings[shapes] = binding
        return binding

    def check_apart(self, binding: Binding, outs: Sequence[int], arguments: Sequence[int]) -> None:
        """ArgumentError if a result would be written over an argument or over another result."""
        taken = [
            (start, start + nbytes, f"argument '{name}'")
            for start, nbytes, (name, _) in zip(arguments, binding.input_nbytes, self.wanted, strict=True)
        ]
        for start, nbytes, name in zip(outs, binding.output_nbytes, self.result_names, strict=True):
            if not start:
                continue  # a result that the caller does not want
            end = start + nbytes
            for low, high, other in taken:
                if start < high and low < end:
                    raise ArgumentError(f"out '{name}' shares memory with {other}")
            taken.append((start, end, f"out '{name}'"))

    def __repr__(self) -> str:
        return f"<Session of {self.program!r}{' (stepwise)' if self.stepwise else ''}>"


class HostSession(Session):
    """A session on the CPU: arguments and results are used in place, and a call is done when it returns.

    By default a call is one function of the compiled program; `stepwise` runs the plan from Python.
    """

    def __init__(self, program: LoadedProgram, *, stepwise: bool = False) -> None:
        super().__init__(program, stepwise=stepwise)
        self._context = make_context(program.num_threads, program.scratch_stride, program.isa)
        plan = program.plan
        self._frames = [EntryArenas(plan, entry, bases) for entry, bases in zip(plan.entries, self.bases, strict=True)]
        self._executors: list[Executor] = [
            self._executor(entry, frame) for entry, frame in zip(plan.entries, self._frames, strict=True)
        ]
        self._apart: tuple[Binding | None, list[int], list[int]] = (None, [], [])

    def _executor(self, entry: EntryPoint, frame: EntryArenas) -> Executor:
        program, library = self.program, None if self.stepwise else self.program.library
        if library is not None and not calls_torch(entry):
            return NativeExecutor(program.plan, entry, library)
        steps = PlanExecutor(program.plan, entry, program.slots, self.queues, frame)
        return steps if library is None else SegmentedExecutor(program.plan, entry, library, steps)

    def torch_time(self) -> TorchTime:
        return total_time(self._executors)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, stream: Any) -> Any:
        if stream is not None:
            raise DeviceUnavailableError("stream= belongs to a GPU; on cpu a call is done when it returns")
        binding, results, _sources = self._bind(args, kwargs, out)
        self._execute(binding)
        if out is not None:
            return out
        if results and isinstance(results[0], HostTensor):
            results = jax_arrays.handed_over(results)
        return self.program.unflatten_outputs(results)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[Binding, Sequence[Any], Sequence[Source]]:
        """Sets the addresses of the call's arguments and results, which must live until it is done."""
        program = self.program
        values = program.flatten_inputs(args, kwargs)
        sources = [interop.read(value, name, dtype) for value, (name, dtype) in zip(values, self.wanted, strict=True)]
        shapes = tuple([source.shape for source in sources])
        binding = self._bindings.get(shapes) or self.bind(shapes)
        frame = self._frames[binding.entry]
        arenas = frame.arenas
        for position, source in zip(frame.inputs, sources, strict=True):
            arenas[position] = source.address
        if out is None:
            library = interop.library_of([source.library for source in sources])
            results, addresses = interop.new(library, binding.outputs, self.result_dtypes, self.result_names)
        else:
            results = self._in_place_of_none(program.flatten_outputs(out), binding)
            addresses = self._targets(results, binding, sources)
        for position, address in zip(frame.outputs, addresses, strict=True):
            arenas[position] = address
        return binding, results, sources

    def _execute(self, binding: Binding) -> None:
        context = self._context
        context.error_code = 0
        context.error_kernel = -1
        self._executors[binding.entry].run(context, self._frames[binding.entry].arenas, binding)

    def profile(self, *args: Any, rounds: int = 30, keep_states: bool = True, **kwargs: Any) -> Profile:
        check_rounds(rounds)
        ticket = self.ticket()
        with self._lock:
            self.begin(ticket)
            with self.states_kept(keep_states):
                binding, timings = self._timed(args, kwargs, rounds)
        return on_request.host_profile(self.program, binding, timings, rounds)

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: int) -> tuple[Binding, Timings]:
        binding, results, sources = self._bind(args, kwargs, None)
        frame = self._frames[binding.entry]
        inputs, outputs = ([frame.arenas[place] or 0 for place in each] for each in (frame.inputs, frame.outputs))

        def call() -> float:
            began = perf_counter()
            self._run(args, kwargs, None, None)
            return perf_counter() - began

        def entry() -> float:
            frame.set(inputs, outputs)  # the call has set those of its own results
            began = perf_counter()
            self._execute(binding)
            return perf_counter() - began

        found = time_steps(self.walk(binding), rounds, call=call, entry=entry)
        del results, sources  # the memory of arguments and results, held until here
        return binding, found

    def walk(self, binding: Binding) -> Walk:
        """The steps of the call that was bound last, one by one, on the threads and in the memory of every call."""
        plan, frame = self.program.plan, self._frames[binding.entry]
        steps = PlanExecutor(plan, plan.entries[binding.entry], self.program.slots, self.queues, frame)
        return Walk(plan, steps.addressed(binding, frame.arenas), self._context)

    def capture(self, *args: Any, **kwargs: Any) -> CapturedGraph:
        """DeviceUnavailableError: the CPU has no graphs."""
        raise DeviceUnavailableError(NO_CAPTURE)

    def step_results(
        self, see: Callable[[StepResult], None], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Binding, Any]:
        ticket = self.ticket()
        with self._lock:
            self.begin(ticket)
            binding, results, sources = self._bind(tuple(args), dict(kwargs), None)
            plan, frame = self.program.plan, self._frames[binding.entry]
            entry = plan.entries[binding.entry]
            steps = PlanExecutor(plan, entry, self.program.slots, self.queues, frame)
            for each in steps.submissions(binding):
                each.issue(self._context, frame.arenas)
                for view in written_views(plan, entry.steps[each.number]):
                    values = copied(view, steps.address(view, binding, frame.arenas), binding.symbols)
                    see(StepResult(each.number, view.buffer, values))
            del sources  # the memory of arguments, held until here
            return binding, self.program.unflatten_outputs(results)

    def _in_place_of_none(self, results: Sequence[Any], binding: Binding) -> list[Any]:
        """The arrays of `out=`, and memory for the results that the caller does not want."""
        return [
            interop.new_numpy(shape, dtype)[0] if result is None else result
            for result, shape, dtype in zip(results, binding.outputs, self.result_dtypes, strict=True)
        ]

    def _targets(self, results: Sequence[Any], binding: Binding, sources: Sequence[Source]) -> list[int]:
        addresses = [
            interop.target(result, name, shape, dtype)
            for result, name, shape, dtype in zip(
                results, self.result_names, binding.outputs, self.result_dtypes, strict=True
            )
        ]
        places = (binding, addresses, [source.address for source in sources])
        if places != self._apart:  # unless the arrays are the same as in the last call
            self.check_apart(binding, addresses, places[2])
            self._apart = places
        return addresses


def make_context(num_threads: int, scratch_stride: int, isa: str = "generic") -> Context:
    """A `qc_ctx` for kernels of an instruction set, with its own scratch memory, which it keeps alive."""
    scratch = Block(num_threads * scratch_stride)
    context = Context(
        parallel=parallel_address(),
        scratch=scratch.address,
        scratch_stride=scratch_stride,
        num_threads=num_threads,
        error_kernel=-1,
        int8_units=int8_units(isa),
        bf16_units=bf16_units(isa),
    )
    context.scratch_block = scratch
    return context
