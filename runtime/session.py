"""A session: one caller's private memory (activations, states, scratch) beside a program's shared constants."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qcompiler.errors import ArgumentError, SessionBusyError
from qcompiler.plan.plan import EntryPoint, Plan
from qcompiler.runtime import interop
from qcompiler.runtime.binding import Binding, Shape
from qcompiler.runtime.executor import Executor, kernel_error, make_executor
from qcompiler.runtime.interop import Source
from qcompiler.runtime.memory import Block, align_up
from qcompiler.runtime.support import Context, parallel_address

if TYPE_CHECKING:
    from qcompiler.runtime.loaded import LoadedProgram

BINDING_LIMIT = 256
"""Sizes of arguments remembered per session."""

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Frame:
    """One entry point's arenas for one session: a C array in the order of `Plan.arenas`, null where it uses none.

    `inputs` and `outputs` are the positions to be set at each call: the verifier sees to it that each argument and each
    result has an arena of its own.
    """

    def __init__(self, plan: Plan, entry: EntryPoint, bases: dict[str, int], executor: Executor) -> None:
        self.executor = executor
        self.arenas = (ctypes.c_void_p * max(len(plan.arenas), 1))()
        position = {arena.name: index for index, arena in enumerate(plan.arenas)}
        for name, address in bases.items():
            self.arenas[position[name]] = address or None
        self.inputs = tuple(position[sig.arena] for sig in entry.inputs)
        self.outputs = tuple(position[sig.arena] for sig in entry.outputs)


class Session:
    """Runs a program. Calls on one session come one after another; a second concurrent one raises SessionBusyError.

    States start as the model's buffers were and live as long as the session; `reset()` puts them back.
    """

    def __init__(self, program: LoadedProgram, *, stepwise: bool = False) -> None:
        self.program = program
        self.stepwise = stepwise
        plan = program.plan
        self._lock = threading.Lock()
        self._context = make_context(program.num_threads, program.scratch_stride)
        self._states = {arena.name: Block(arena.nbytes) for arena in plan.arenas if arena.kind == "state"}
        self._begin_states()
        shared = program.shared_bases | {name: block.address for name, block in self._states.items()}
        self._activations, placed = place_activations(plan, plan.entries)
        self._frames = [
            Frame(
                plan, entry, shared | placed[entry.name], make_executor(plan, entry, program.library, stepwise=stepwise)
            )
            for entry in plan.entries
        ]
        self._bindings: dict[tuple[Shape, ...], Binding] = {}
        binder = program.binder
        self._wanted = tuple(zip(binder.names, binder.dtypes, strict=True))
        self._result_dtypes = binder.output_dtypes
        self._result_names = binder.output_names
        self._apart: tuple[Binding | None, list[int], list[int]] = (None, [], [])
        _sessions.add(self)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """The program's results, in the structure the model returned them.

        Arguments are NumPy arrays, torch CPU tensors or DLPack objects; with a torch tensor among them results are
        torch tensors, else NumPy arrays.  Results are fresh and belong to the caller; with `out=` (an array, or a tree
        of arrays in the results' structure) they are written there, nothing is allocated, and `out` is returned.
        """
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError(
                "this session is running a call in another thread; give each thread its own: `s = program.session()`"
            )
        try:
            return self._run(args, kwargs, out)
        finally:
            self._lock.release()

    def reset(self) -> None:
        """Puts all states back to what they began as."""
        with self._lock:
            for block in self._states.values():
                block.zero()
            self._begin_states()

    def _begin_states(self) -> None:
        """Fills the states that do not begin as zeros."""
        for name, block in self._states.items():
            if name in self.program.initial_states:
                initial = self.program.initial_states[name]
                block.bytes[: initial.nbytes] = initial

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self._states)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        program = self.program
        values = program.flatten_inputs(args, kwargs)
        sources = [interop.read(value, name, dtype) for value, (name, dtype) in zip(values, self._wanted, strict=True)]
        shapes = tuple([source.shape for source in sources])
        binding = self._bindings.get(shapes) or self._bind(shapes)
        frame = self._frames[binding.entry]
        arenas = frame.arenas
        for position, source in zip(frame.inputs, sources, strict=True):
            arenas[position] = source.address
        if out is None:
            results, addresses = self._fresh(binding, any([source.is_torch for source in sources]))  # noqa: C419
        else:
            results = program.flatten_outputs(out)
            addresses = self._targets(results, binding, sources)
        for position, address in zip(frame.outputs, addresses, strict=True):
            arenas[position] = address
        context = self._context
        context.error_code = 0
        context.error_kernel = -1
        if frame.executor.run(context, arenas, binding):
            raise kernel_error(context, program.plan)
        return program.unflatten_outputs(results) if out is None else out

    def _bind(self, shapes: tuple[Shape, ...]) -> Binding:
        binding = self.program.binder.bind(shapes)
        if len(self._bindings) >= BINDING_LIMIT:
            self._bindings.pop(next(iter(self._bindings)))
        self._bindings[shapes] = binding
        return binding

    def _fresh(self, binding: Binding, use_torch: bool) -> tuple[list[Any], list[int]]:
        new = interop.new_torch if use_torch else interop.new_numpy
        made = [new(shape, dtype) for shape, dtype in zip(binding.outputs, self._result_dtypes, strict=True)]
        return [result for result, _ in made], [address for _, address in made]

    def _targets(self, results: Sequence[Any], binding: Binding, sources: Sequence[Source]) -> list[int]:
        addresses = [
            interop.target(result, name, shape, dtype)
            for result, name, shape, dtype in zip(
                results, self._result_names, binding.outputs, self._result_dtypes, strict=True
            )
        ]
        places = (binding, addresses, [source.address for source in sources])
        if places != self._apart:  # the same arrays as in the last call are apart as they were then
            self._check_apart(binding, addresses, places[2])
            self._apart = places
        return addresses

    def _check_apart(self, binding: Binding, outs: Sequence[int], arguments: Sequence[int]) -> None:
        """ArgumentError if a result would be written over an argument or over another result."""
        taken = [
            (start, start + nbytes, f"argument '{name}'")
            for start, nbytes, (name, _) in zip(arguments, binding.input_nbytes, self._wanted, strict=True)
        ]
        for start, nbytes, name in zip(outs, binding.output_nbytes, self._result_names, strict=True):
            end = start + nbytes
            for low, high, other in taken:
                if start < high and low < end:
                    raise ArgumentError(f"out '{name}' shares memory with {other}")
            taken.append((start, end, f"out '{name}'"))

    def __repr__(self) -> str:
        return f"<Session of {self.program!r}{' (stepwise)' if self.stepwise else ''}>"


def make_context(num_threads: int, scratch_stride: int) -> Context:
    """A `qc_ctx` with scratch of its own (kept alive by the context)."""
    scratch = Block(num_threads * scratch_stride)
    context = Context(
        parallel=parallel_address(),
        scratch=scratch.address,
        scratch_stride=scratch_stride,
        num_threads=num_threads,
        error_kernel=-1,
    )
    context.scratch_block = scratch
    return context


def place_activations(plan: Plan, entries: Sequence[EntryPoint]) -> tuple[Block, dict[str, dict[str, int]]]:
    """One block for the activation arenas of all entry points: only one of them runs at a time, so they share it.

    Returns the block and, by entry point, its arenas' addresses.
    """
    offsets: dict[str, dict[str, int]] = {}
    total = 0
    for entry in entries:
        end = 0
        offsets[entry.name] = {}
        for arena in plan.arenas:
            if arena.kind == "activations" and arena.entry in (entry.name, None):
                offsets[entry.name][arena.name] = end
                end += align_up(arena.nbytes, 4096)
        total = max(total, end)
    block = Block(total)
    return block, {
        entry: {name: block.address + offset for name, offset in arenas.items()} for entry, arenas in offsets.items()
    }


def _release_after_fork() -> None:
    """In a child no other thread is left that could still be inside a session."""
    for session in list(_sessions):
        session._lock = threading.Lock()


os.register_at_fork(after_in_child=_release_after_fork)
