"""Two ways to run an entry point over the same arenas: its compiled function, or the plan step by step from Python.

Both call the same kernels with the same addresses, so their results are equal to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from qcompiler.errors import IndexOutOfRangeError, PlanError, RuntimeFailure
from qcompiler.kernels.cpu.entry import function_name
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import Copy, EntryPoint, Launch, LibraryCall, Plan, Record, Select, Step, View, Wait
from qcompiler.runtime.binding import Binding, element_count
from qcompiler.runtime.native import Library, kernel_symbol
from qcompiler.runtime.support import Context

QC_INDEX_OUT_OF_RANGE = 1

ArenaArray = ctypes.Array[ctypes.c_void_p]


class Executor(Protocol):
    """Runs one entry point; returns the context's error code."""

    def run(self, context: Context, arenas: ArenaArray, binding: Binding) -> int: ...


class NativeExecutor:
    """One call of `qe_<entry>`."""

    def __init__(self, entry: EntryPoint, library: Library) -> None:
        self._function = library.entry(function_name(entry))

    def run(self, context: Context, arenas: ArenaArray, binding: Binding) -> int:
        code: int = self._function(ctypes.addressof(context), ctypes.addressof(arenas), binding.address)
        return code


class StepwiseExecutor:
    """Walks the plan: one call per launch, `memmove` per copy; records and waits hold trivially on one thread."""

    def __init__(self, plan: Plan, entry: EntryPoint, library: Library) -> None:
        self._entry = entry
        self._arena_index = {arena.name: index for index, arena in enumerate(plan.arenas)}
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._specs = {spec.name: spec for spec in plan.kernels}
        self._numbers = {spec.name: number for number, spec in enumerate(plan.kernels)}
        self._kernels = {name: library.kernel(kernel_symbol(name)) for name in sorted(_launched(entry.steps))}

    def run(self, context: Context, arenas: ArenaArray, binding: Binding) -> int:
        for step in self._entry.steps:
            match step:
                case Launch():
                    self._launch(step.kernel, step.operands, context, arenas, binding)
                case Select():
                    self._launch(chosen_kernel(step, binding.symbols), step.operands, context, arenas, binding)
                case Copy():
                    self._copy(step, arenas, binding.symbols)
                case Record() | Wait():
                    pass
                case LibraryCall():
                    raise PlanError(
                        f"entry point '{self._entry.name}' calls '{step.function}', which cpu does not have"
                    )
            if context.error_code:
                break
        return int(context.error_code)

    def _launch(
        self, kernel: str, operands: Sequence[View], context: Context, arenas: ArenaArray, binding: Binding
    ) -> None:
        spec = self._specs[kernel]
        addresses = (ctypes.c_void_p * len(operands))(
            *(self._address(view, arenas, binding.symbols) for view in operands)
        )
        symbols = (ctypes.c_int64 * max(len(spec.symbols), 1))(*(binding.symbols[name] for name in spec.symbols))
        self._kernels[kernel](ctypes.addressof(context), ctypes.addressof(addresses), ctypes.addressof(symbols))
        if context.error_code and context.error_kernel < 0:
            context.error_kernel = self._numbers[kernel]

    def _copy(self, step: Copy, arenas: ArenaArray, symbols: dict[str, int]) -> None:
        if step.source.format is None:
            nbytes = element_count(step.source.shape, symbols) * ITEMSIZE[step.source.dtype]
        else:
            nbytes = self._buffers[step.source.buffer].nbytes
        ctypes.memmove(self._address(step.target, arenas, symbols), self._address(step.source, arenas, symbols), nbytes)

    def _address(self, view: View, arenas: ArenaArray, symbols: dict[str, int]) -> int:
        buffer = self._buffers[view.buffer]
        base = arenas[self._arena_index[buffer.arena]]
        if base is None:
            raise PlanError(f"entry point '{self._entry.name}' uses the arena '{buffer.arena}' of another one")
        # A packed operand begins where its buffer does.
        start = _value(view.offset, symbols) * ITEMSIZE[view.dtype] if view.format is None else 0
        return int(base) + buffer.offset + start


def chosen_kernel(step: Select, symbols: dict[str, int]) -> str:
    """The kernel of the first case that fits."""
    value = _value(step.on, symbols)
    for case in step.cases:
        if case.max is None or value <= case.max:
            return case.kernel
    raise PlanError(f"no case of the select on {step.on} takes {value}")


def _value(extent: Dim, symbols: dict[str, int]) -> int:
    return extent if isinstance(extent, int) else dim(extent).evaluate(symbols)


def _launched(steps: Sequence[Step]) -> set[str]:
    names: set[str] = set()
    for step in steps:
        if isinstance(step, Launch):
            names.add(step.kernel)
        elif isinstance(step, Select):
            names |= {case.kernel for case in step.cases}
    return names


def kernel_error(context: Context, plan: Plan) -> RuntimeFailure:
    """What a kernel reported, in words."""
    number = context.error_kernel
    where = "a kernel"
    if 0 <= number < len(plan.kernels):
        spec = plan.kernels[number]
        where = f"kernel '{spec.name}'" + (f" ({spec.serves})" if spec.serves else "")
    if context.error_code == QC_INDEX_OUT_OF_RANGE:
        return IndexOutOfRangeError(
            f"{where} met the index {context.error_value}, which is outside 0…{context.error_limit - 1}; "
            "check the ids or positions that were passed in"
        )
    return RuntimeFailure(f"{where} failed with code {context.error_code}")


def make_executor(plan: Plan, entry: EntryPoint, library: Library, *, stepwise: bool) -> Any:
    return StepwiseExecutor(plan, entry, library) if stepwise else NativeExecutor(entry, library)
