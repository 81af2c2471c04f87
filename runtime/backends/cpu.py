"""The CPU as a backend: memory is the process's own, and work is done when the call that names it returns.

In effect there is one queue: streams and events exist so that the executor is the same on every device, and order holds
trivially.  Capture is not possible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from qcompiler.errors import DeviceUnavailableError, RuntimeFailure
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends.base import (
    Backend,
    CaptureMode,
    Event,
    Graph,
    Kernel,
    Memory,
    Stream,
    StreamKind,
)
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.memory import Block
from qcompiler.runtime.native import Library, build_native, kernel_error
from qcompiler.runtime.support import kernel_caller, support

NO_CAPTURE = "capture needs cuda or sim; this program runs on cpu, where a call is one function already"
NO_TIMERS = "cpu has no timed events; the host's clock times its steps (runtime/profile_cpu.py)"


class CpuMemory(Memory):
    """Private zeroed pages, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.block: Block | None = Block(nbytes)
        self.address = self.block.address

    def close(self) -> None:
        self.block = None


class CpuStream(Stream):
    """The one queue of the CPU, under a name."""

    device = "cpu"
    handle = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_capturing(self) -> bool:
        return False


class CpuEvent(Event):
    """A point that has passed as soon as it is recorded."""

    device = "cpu"


class CpuKernel(Kernel):
    """`qk_<number>` of the plan's library: `number` is its place among the plan's kernels."""

    def __init__(self, spec: KernelSpec, number: int, plan: Plan, address: int) -> None:
        self.spec = spec
        self.number = number
        self.plan = plan
        self.address = address
        self.call = kernel_caller()


class CpuBackend(Backend):
    """The CPU with kernels for one instruction set."""

    kind = "cpu"
    device = "cpu"

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._stream = CpuStream("cpu")

    # --- memory ---

    def allocate(self, nbytes: int, *, label: str = "") -> Memory:
        return CpuMemory(nbytes)

    def upload(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def download(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def zero(self, stream: Stream, target: int, nbytes: int) -> None:
        ctypes.memset(target, 0, nbytes)

    # --- streams and events ---

    def stream(self, name: str = "", *, kind: StreamKind = "nonblocking") -> Stream:
        return CpuStream(name)

    def legacy_stream(self) -> Stream:
        return self._stream

    def caller_stream(self, given: Any = None) -> Stream:
        """DeviceUnavailableError for any stream but one of the CPU's own."""
        if given is not None and not isinstance(given, CpuStream):
            raise DeviceUnavailableError("stream= belongs to a GPU; on cpu a call is done when it returns")
        return self._stream

    def event(self, name: str = "") -> Event:
        return CpuEvent()

    def record(self, event: Event, stream: Stream) -> None:
        """Nothing to remember: all work before it is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing to wait for: all work before it is done."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def query(self, what: Stream | Event) -> bool:
        return True

    def timer(self, name: str = "") -> Event:
        raise DeviceUnavailableError(NO_TIMERS)

    def elapsed(self, begin: Event, end: Event) -> float:
        raise DeviceUnavailableError(NO_TIMERS)

    # --- kernels ---

    def build(self, plan: Plan) -> NativeLibrary:
        return build_native(plan, self.isa)

    def load(self, plan: Plan, native: NativeLibrary) -> dict[str, Kernel]:
        support(native.pool)  # on a machine without a compiler the pool comes with the build
        library = Library(native)
        return {
            spec.name: CpuKernel(spec, number, plan, library.kernel(number, spec))
            for number, spec in enumerate(plan.kernels)
        }

    def launch(
        self, stream: Stream, kernel: Kernel, operands: Sequence[int], symbols: Sequence[int], context: Any = None
    ) -> None:
        """Calls the kernel with `context` (a `qc_ctx`). Raises what it reports there: IndexOutOfRangeError, …"""
        if not isinstance(kernel, CpuKernel) or context is None:
            raise RuntimeFailure("the CPU launches kernels of its own, with a context")
        addresses = (ctypes.c_void_p * max(len(operands), 1))(*operands)
        values = (ctypes.c_int64 * max(len(symbols), 1))(*symbols)
        kernel.call(kernel.address, ctypes.addressof(context), ctypes.addressof(addresses), ctypes.addressof(values))
        if context.error_code:
            if context.error_kernel < 0:
                context.error_kernel = kernel.number
            raise kernel_error(context, kernel.plan)

    # --- graphs ---

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread_local") -> None:
        raise DeviceUnavailableError(NO_CAPTURE)

    def end_capture(self, stream: Stream) -> Graph:
        raise DeviceUnavailableError(NO_CAPTURE)
