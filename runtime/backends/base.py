"""The one interface between the runtime and a device.

A backend is one device.  It provides memory, streams, events and graphs; every call that does work names its stream.
The CPU runs work at once, the simulated GPU when the host waits, CUDA at some later time: a caller may rely only on
stream order, events and `synchronize`.

The capture rules are CUDA's (CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture").  A call that breaks
one raises `DeviceError` with CUDA's code and name; our own rules raise `CaptureRuleError`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.runtime.image import NativeLibrary

Kind = Literal["cpu", "sim", "cuda"]
StreamKind = Literal["nonblocking", "blocking"]
CaptureMode = Literal["thread_local", "global", "relaxed"]


class Memory(ABC):
    """A range of device memory. `address` is a multiple of 256 (0 for no bytes).

    The range is freed by `close`, or with the object, once all work that was submitted before has finished.
    """

    address: int
    nbytes: int

    @abstractmethod
    def close(self) -> None: ...


class Stream(ABC):
    """A queue of one device. `handle` is the driver's (a CUstream for cuda)."""

    device: str
    handle: int

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """DeviceError 906 for the legacy stream while a blocking stream captures (the capture stays valid)."""


class Event(ABC):
    """A point in a stream. It may be recorded again: a wait refers to the latest record before it."""

    device: str


class Kernel(ABC):
    """One compiled kernel of a plan on one device."""

    spec: KernelSpec


@dataclass(frozen=True)
class GraphShape:
    """The contents of a captured graph: nodes by kind ("kernel", "copy", "empty", …), with copies between devices."""

    nodes: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.nodes.values())


class Graph(ABC):
    """An instantiated graph. It holds addresses, not memory: the code that captured it keeps the memory alive."""

    shape: GraphShape

    @abstractmethod
    def launch(self, stream: Stream) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Backend(ABC):
    """One device: "cpu", "sim:1", "cuda:0"."""

    kind: Kind
    device: str
    isa: str
    """The target of the kernels: "x86-64-v4", "sm_90a"."""

    # --- memory ---

    @abstractmethod
    def allocate(self, nbytes: int, *, label: str = "") -> Memory:
        """Zeroed memory (`label` names it in reports). DeviceError 900 while the thread captures, OutOfMemoryError."""

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Encloses several calls of this backend by one thread, which cost less inside. No other code runs there."""
        return contextlib.nullcontext()

    @abstractmethod
    def upload(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Host to device. The host bytes may change as soon as the call returns; never part of a capture."""

    @abstractmethod
    def download(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Device to host; the bytes are valid after `synchronize(stream)`. Never part of a capture."""

    @abstractmethod
    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Device to device, also between devices of one kind; part of a capture if the stream captures."""

    @abstractmethod
    def zero(self, stream: Stream, target: int, nbytes: int) -> None: ...

    # --- streams and events ---

    @abstractmethod
    def stream(self, name: str = "", *, kind: StreamKind = "nonblocking") -> Stream: ...

    @abstractmethod
    def legacy_stream(self) -> Stream:
        """The device's default stream (CUDA's legacy stream 0). On the CPU, its one stream."""

    @abstractmethod
    def caller_stream(self, given: Any = None) -> Stream:
        """The stream that the caller uses.

        `given` (a `Stream`, an integer handle, an object with `__cuda_stream__`), else torch's current one if torch
        uses this device, else the current one of the backend, else the legacy one.
        """

    @abstractmethod
    def event(self, name: str = "") -> Event: ...

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None: ...

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """The event may belong to another device of the same kind."""

    @abstractmethod
    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits until the stream (or all of the device's) is done; raises what its kernels reported."""

    @abstractmethod
    def query(self, what: Stream | Event) -> bool:
        """Whether all its work is done."""

    @abstractmethod
    def timer(self, name: str = "") -> Event:
        """An event that `elapsed` takes. DeviceUnavailableError on the CPU, where the host's clock times."""

    @abstractmethod
    def elapsed(self, begin: Event, end: Event) -> float:
        """Microseconds between the records of two timers, which the host has waited for. On the simulated GPU those
        of the simulation."""

    # --- the caller's own activity ---

    def captures_here(self) -> bool:
        """Whether this thread is known to capture on some stream of the device (a GPU's driver does not tell)."""
        return False

    def device_of(self, address: int) -> str | None:
        """The device of an address, if the backend can tell."""
        return None

    # --- kernels ---

    @abstractmethod
    def build(self, plan: Plan) -> NativeLibrary:
        """The plan's kernels compiled for this device, or taken from the user's cache."""

    @abstractmethod
    def load(self, plan: Plan, native: NativeLibrary) -> dict[str, Kernel]:
        """All kernels of the plan, loaded eagerly (a module load inside a capture is forbidden)."""

    @abstractmethod
    def launch(
        self, stream: Stream, kernel: Kernel, operands: Sequence[int], symbols: Sequence[int], context: Any = None
    ) -> None:
        """Runs a kernel: operand addresses in the order of its spec, values of `spec.symbols`; `context` for the CPU.

        The executor leaves out launches whose grid is empty. On the CPU, errors of the kernel are raised here.
        """

    # --- graphs ---

    @abstractmethod
    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread_local") -> None: ...

    @abstractmethod
    def end_capture(self, stream: Stream) -> Graph:
        """Ends the capture and makes the graph. DeviceError 901…908 for a broken capture, which has ended, too."""
