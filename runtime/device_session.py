"""A session on a GPU, real or simulated: its own streams, ordered after the caller's earlier work and before later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError, RuntimeFailure, SimulationError
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.runtime import device_interop, interop, jax_arrays, on_request
from qcompiler.runtime.backends.base import CaptureMode, Memory
from qcompiler.runtime.binding import Binding, element_count
from qcompiler.runtime.device_array import DeviceArray, Pool
from qcompiler.runtime.device_interop import Argument, ResultMemory
from qcompiler.runtime.executor import EntryArenas, PlanExecutor, TorchTime, total_time
from qcompiler.runtime.graph import capture, refuse_torch_calls
from qcompiler.runtime.interop import Library
from qcompiler.runtime.interrupts import uninterrupted
from qcompiler.runtime.memory import kept_if_it_fails
from qcompiler.runtime.profile_cpu import check_rounds
from qcompiler.runtime.profile_device import time_calls
from qcompiler.runtime.session import Session
from qcompiler.runtime.step_results import Read, StepResult, copied, written_views
from qcompiler.runtime.streams import Callers, Queue

if TYPE_CHECKING:
    from qcompiler.runtime.graph import CapturedGraph
    from qcompiler.runtime.loaded import LoadedProgram
    from qcompiler.runtime.profile import Profile


Issue = Callable[[Binding, Sequence[int], Sequence[int]], None]
"""Submits the steps of a call, for the addresses of its arguments and results."""


def _reader(home: Queue) -> Read:
    """Reads the memory of a device to which nothing is being written."""

    def read(address: int, nbytes: int) -> npt.NDArray[Any]:
        found = np.empty(nbytes, np.uint8)
        home.backend.download(home.stream, found.ctypes.data, address, nbytes)
        home.backend.synchronize(home.stream)
        return found

    return read


@dataclass
class Call:
    """One call after all its checks and before any effect."""

    arguments: list[Argument]
    binding: Binding
    callers: Callers
    results: Any
    targets: list[ResultMemory]

    @property
    def reads_back(self) -> bool:
        """Whether results go to host memory, so that the call must wait for its own work."""
        return any(target.device is None and target.wanted for target in self.targets)


class DeviceSession(Session):
    """A session whose memory is on a device.

    Host arguments go through buffers of the session; device arguments and results are used in place.  A call returns
    when its work is submitted, or, if results go to the host, when it is done.
    """

    def __init__(self, program: LoadedProgram) -> None:
        super().__init__(program, stepwise=True)
        plan = program.plan
        self.frames = [EntryArenas(plan, entry, bases) for entry, bases in zip(plan.entries, self.bases, strict=True)]
        self.executors = [
            PlanExecutor(plan, entry, program.slots, self.queues, frame)
            for entry, frame in zip(plan.entries, self.frames, strict=True)
        ]
        self.by_device: dict[str, Queue] = {}
        for home in self.queues.homes.values():
            self.by_device.setdefault(home.backend.device, home)
        self._staging: dict[str, Memory] = {}
        self._pools = {
            slot: Pool(self.queues.homes[slot], allocator.allocate)
            for slot, allocator in self.memory.allocators.items()
        }
        # Recorded at the end of each call, never inside a capture, so others may wait for them at any time.
        self.done = {device: home.backend.event("done") for device, home in self.by_device.items()}
        self._arenas = {arena.name: arena for arena in plan.arenas}
        self._in_use: list[Any] = []

    def profile(self, *args: Any, rounds: int = 30, keep_states: bool = True, **kwargs: Any) -> Profile:
        check_rounds(rounds)
        ticket = self.ticket()
        with uninterrupted, self._lock:
            self.begin(ticket)
            callers, arguments = self.read(self.program.flatten_inputs(args, kwargs), None)
            if callers.capturing:
                raise CaptureRuleError("the caller records a capture, in which nothing can be timed; end it first")
            binding = self.bind(tuple(argument.shape for argument in arguments))
            with self.states_kept(keep_states):
                timings = time_calls(self, args, kwargs, binding, rounds)
        return on_request.device_profile(self.program, binding, timings, rounds)

    def capture(
        self,
        *args: Any,
        mode: CaptureMode = "thread_local",
        stream: Any = None,
        keep_states: bool = True,
        **kwargs: Any,
    ) -> CapturedGraph:
        """A graph of one call with arguments of these shapes, to be replayed with other arguments.

        The call runs once before it is recorded, in the order of the caller's `stream`; states are restored from a
        copy afterwards.  With `keep_states=False` there is no copy, and the states are as after a call: for large
        states that may be written twice, such as the row of a cache that the first replay writes again.  `mode` is
        CUDA's capture mode.
        CaptureRuleError if the program has nothing to do, or if the recorded graph differs from the plan.
        """
        ticket = self.ticket()
        with uninterrupted, self._lock:
            self.begin(ticket)
            return capture(self, args, kwargs, mode, stream, keep_states)

    # --- a call ---

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **kwargs: Any) -> Any:
        """As `Session.__call__`. An interrupt is raised while the call waits for the device, or at its end."""
        with uninterrupted:
            return super().__call__(*args, out=out, stream=stream, **kwargs)

    def torch_time(self) -> TorchTime:
        return total_time(self.executors)

    def step_results(
        self, see: Callable[[StepResult], None], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Binding, Any]:
        ticket = self.ticket()
        with uninterrupted, self._lock:
            self.begin(ticket)
            bindings: list[Binding] = []

            def issue(binding: Binding, inputs: Sequence[int], outputs: Sequence[int]) -> None:
                bindings.append(binding)
                self._issue_seen(see, binding, inputs, outputs)

            results = self._call(tuple(args), dict(kwargs), None, None, issue)
            return bindings[0], results

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, stream: Any) -> Any:
        return self._call(args, kwargs, out, stream, self.issue)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, stream: Any, issue: Issue) -> Any:
        callers, arguments = self.read(self.program.flatten_inputs(args, kwargs), stream)
        binding = self.bind(tuple(argument.shape for argument in arguments))
        call = self.judge(callers, arguments, binding, out)
        entry = self.program.plan.entries[binding.entry]
        inputs = [
            argument.address if argument.device is not None else self._staged(sig.arena)
            for argument, sig in zip(arguments, entry.inputs, strict=True)
        ]
        outputs = [
            target.address if target.device is not None else self._staged(sig.arena)
            for target, sig in zip(call.targets, entry.outputs, strict=True)
        ]
        with self.settled(call):
            self.enter(call)
            for number, argument in enumerate(arguments):
                if argument.device is None:
                    self.upload(call, number, inputs[number])
            issue(binding, inputs, outputs)
            for number, target in enumerate(call.targets):
                if target.device is None:
                    self.download(call, number, outputs[number])
            self.leave(call)
        return self.returned(call) if out is None else out

    def returned(self, call: Call) -> Any:
        """The results of a call without `out=`, in the structure that the model returned."""
        results = call.results
        if self._library(call.arguments) == "jax":
            results = jax_arrays.handed_over(results)
        return self.program.unflatten_outputs(results)

    @staticmethod
    def _library(arguments: Sequence[Argument]) -> Library:
        """Whose arrays results are: that of the arguments on the device, if there are any."""
        there = [argument for argument in arguments if argument.device is not None]
        return interop.library_of(argument.library for argument in there or arguments)

    def read(self, values: Sequence[Any], stream: Any) -> tuple[Callers, list[Argument]]:
        """The caller's streams and the memory of a call's arguments. Has no effect on either."""
        callers = Callers(self.queues, stream if stream is not None else self.program.stream)
        arguments = [
            device_interop.read(value, name, dtype, self.by_device, capturing=callers.capturing)
            for value, (name, dtype) in zip(values, self.wanted, strict=True)
        ]
        return callers, arguments

    def judge(self, callers: Callers, arguments: list[Argument], binding: Binding, out: Any) -> Call:
        """All other checks of a call, before it affects a stream; then the memory of its results."""
        entry = self.program.plan.entries[binding.entry]
        for argument, sig in zip(arguments, entry.inputs, strict=True):
            self._check_device(f"argument '{sig.name}'", argument.device, sig.arena)
        if callers.capturing:
            refuse_torch_calls(entry)
            self._check_capturable(arguments, out)
        if out is None:
            results, targets = self._fresh(binding, arguments, callers)
        else:
            results, targets = out, self._targets(self.program.flatten_outputs(out), binding, arguments)
            if callers.capturing and any(target.device is None for target in targets):
                raise CaptureRuleError("a host array cannot be filled by a captured call; pass arrays on the device")
        return Call(arguments, binding, callers, results, targets)

    def _check_device(self, what: str, device: str | None, arena: str) -> None:
        own = self.queues.homes[self.memory.slot_of[arena]].backend.device
        if device not in (None, own):
            raise DeviceUnavailableError(
                f"{what} is on {device}, but the program takes it on {own}; copy it there, or load the program on "
                f"{device}"
            )

    @staticmethod
    def _check_capturable(arguments: Sequence[Argument], out: Any) -> None:
        """Refuses what a caller's capture forbids: bytes that only the first replay would see, and allocations."""
        if any(argument.device is None for argument in arguments):
            raise CaptureRuleError(
                "the caller records a capture, and a host argument would be copied at capture only; pass arrays on the "
                "device (`run.array(x)`)"
            )
        if out is None:
            raise CaptureRuleError(
                "the caller records a capture, in which results cannot be allocated; pass `out=` with arrays on the "
                "device"
            )

    @contextlib.contextmanager
    def settled(self, call: Call) -> Iterator[None]:
        """Encloses the work of a call. If the call fails midway, it waits for its submitted work, so that later work is
        not affected and no memory is freed while the device uses it."""
        try:
            yield
        except BaseException as error:
            if not call.callers.capturing:  # else nothing runs: the capture holds the first part of the call
                try:
                    with kept_if_it_fails(call):
                        self.queues.synchronize()
                except RuntimeFailure as second:
                    if isinstance(error, SimulationError) and isinstance(second, SimulationError):
                        raise error from None  # a finding, which stays with its device
                    error.add_note(f"Waiting for the part of the call that was under way failed, too: {second}")
            raise

    def enter(self, call: Call) -> None:
        """The session's streams wait for the caller, and for arguments and `out=` that other streams make ready."""
        call.callers.enter(self.queues)
        if call.callers.capturing:
            self.program.keep(self)  # the caller's graph holds addresses of this session
            return
        for argument in call.arguments:
            if argument.stream is not None and argument.device is not None:
                home = self.by_device[argument.device]
                Queue(home.backend, argument.stream).release([home])
        waited = set(self.done.values())
        ready = [(argument.device, argument.ready) for argument in call.arguments]
        ready += [(target.device, target.array.ready) for target in call.targets if target.array is not None]
        for device, event in ready:
            if device is not None and event is not None and event not in waited:
                waited.add(event)
                self.by_device[device].backend.wait(self.by_device[device].stream, event)

    def issue(self, binding: Binding, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Submits the entry point's steps between fork and join of the homes."""
        executor, frame = self.executors[binding.entry], self.frames[binding.entry]
        frame.set(inputs, outputs)
        self.queues.fork(executor.queues)
        executor.run(None, frame.arenas, binding)
        self.queues.join(executor.queues)

    def _issue_seen(
        self, see: Callable[[StepResult], None], binding: Binding, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """As `issue`; after each step waits for it, and shows what it wrote."""
        executor, frame = self.executors[binding.entry], self.frames[binding.entry]
        plan = self.program.plan
        arena_of = {buffer.name: buffer.arena for buffer in plan.buffers}
        frame.set(inputs, outputs)
        self.queues.fork(executor.queues)
        for each in executor.submissions(binding):
            with executor.labelled(each.number):
                each.issue(None, frame.arenas)
            for view in written_views(plan, plan.entries[binding.entry].steps[each.number]):
                self.queues.synchronize()
                home = self.home_of(arena_of[view.buffer])
                address = executor.address(view, binding, frame.arenas)
                see(StepResult(each.number, view.buffer, copied(view, address, binding.symbols, _reader(home))))
        self.queues.join(executor.queues)

    def leave(self, call: Call) -> None:
        """The caller's streams wait for the session; host results are complete when this returns."""
        call.callers.leave(self.queues)
        if not call.callers.capturing:
            for device, home in self.by_device.items():
                home.backend.record(self.done[device], home.stream)
        self._mark_arrays(call)
        # Device memory of this call stays until the next one: its work may still be running.
        self._in_use = [*(argument.owner for argument in call.arguments), call.results]
        if call.reads_back:
            for home in self.queues.homes.values():
                home.backend.synchronize(home.stream)
            self._in_use = []

    def _mark_arrays(self, call: Call) -> None:
        """The results are ready after this call, and other pools reuse its arrays' memory only after it."""
        written = [target.array for target in call.targets if target.array is not None]
        for array in written:
            array.stream = self.by_device[array.device].stream
            array.ready = None if call.callers.capturing else self.done[array.device]
        if call.callers.capturing:
            return
        for array in [*written, *(each.owner for each in call.arguments if isinstance(each.owner, DeviceArray))]:
            if array.lease is not None and array.lease.pool not in self._pools.values():
                array.lease.use(self.done[array.device])

    # --- bytes ---

    def home_of(self, arena: str) -> Queue:
        return self.queues.homes[self.memory.slot_of[arena]]

    def upload(self, call: Call, number: int, target: int) -> None:
        """Argument `number` from the host to device memory."""
        home = self.home_of(self.program.plan.entries[call.binding.entry].inputs[number].arena)
        nbytes = call.binding.input_nbytes[number]
        if nbytes:
            home.backend.upload(home.stream, target, call.arguments[number].address, nbytes)

    def download(self, call: Call, number: int, source: int) -> None:
        """Result `number` from device memory to its host array, if the caller wants it."""
        home = self.home_of(self.program.plan.entries[call.binding.entry].outputs[number].arena)
        nbytes = call.binding.output_nbytes[number]
        if nbytes and call.targets[number].wanted:
            home.backend.download(home.stream, call.targets[number].address, source, nbytes)

    def _staged(self, arena: str) -> int:
        """The session's own buffer for an argument or a result of an entry point, at its maximum size."""
        if arena not in self._staging:
            self._staging[arena] = self.memory.allocate(
                self.memory.slot_of[arena], self._arenas[arena].nbytes, f"staging of {arena}"
            )
        return self._staging[arena].address

    # --- results ---

    def _fresh(
        self, binding: Binding, arguments: Sequence[Argument], callers: Callers
    ) -> tuple[list[Any], list[ResultMemory]]:
        """New arrays on the side of the arguments: on the host if all are there, else on the device."""
        library = self._library(arguments)
        if all(argument.device is None for argument in arguments):
            arrays, addresses = interop.new(library, binding.outputs, self.result_dtypes, self.result_names)
            return arrays, [ResultMemory(address, None) for address in addresses]
        if library == "jax":
            for name, dtype in zip(self.result_names, self.result_dtypes, strict=True):
                jax_arrays.check_width(f"result '{name}'", dtype)
        results: list[Any] = []
        targets: list[ResultMemory] = []
        entry = self.program.plan.entries[binding.entry]
        for shape, dtype, sig in zip(binding.outputs, self.result_dtypes, entry.outputs, strict=True):
            home = self.home_of(sig.arena)
            if library == "torch":
                tensor = device_interop.new_torch(shape, dtype, home.backend.device, callers.given)
                results.append(tensor)
                targets.append(ResultMemory(tensor.data_ptr(), home.backend.device))
            else:
                array = self.new_array(self.memory.slot_of[sig.arena], shape, dtype, callers)
                results.append(array)
                targets.append(ResultMemory(array.address, array.device))
        return results, targets

    def new_array(self, slot: str, shape: tuple[int, ...], dtype: str, callers: Callers) -> DeviceArray:
        """An array in memory of the session's pool, with undefined contents."""
        home = self.queues.homes[slot]
        caller = callers.queues[list(self.queues.homes).index(slot)]
        lease = self._pools[slot].take(element_count(shape, {}) * ITEMSIZE[dtype], caller.stream)
        ready = self.done[home.backend.device]
        return DeviceArray(home.backend, lease.memory.address, shape, dtype, home.stream, lease, ready)

    def _targets(self, results: Sequence[Any], binding: Binding, arguments: Sequence[Argument]) -> list[ResultMemory]:
        targets = [
            device_interop.target(result, name, shape, dtype)
            for result, name, shape, dtype in zip(
                results, self.result_names, binding.outputs, self.result_dtypes, strict=True
            )
        ]
        entry = self.program.plan.entries[binding.entry]
        for target, sig in zip(targets, entry.outputs, strict=True):
            self._check_device(f"out '{sig.name}'", target.device, sig.arena)
        self.check_apart(binding, [target.address for target in targets], [argument.address for argument in arguments])
        return targets
