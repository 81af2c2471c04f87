"""The one interface between the runtime and a device.

A backend is one device.  Memory, streams, events and graphs come from it; every call that does work names its stream.
The CPU executes at once, the simulated GPU when somebody waits, CUDA whenever it likes: a caller may rely on stream
order, events and `synchronize`, and on nothing else.

The capture rules are CUDA's (CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture").  A backend that
breaks one raises `DeviceError` with CUDA's code and name; rules of our own are `CaptureRuleError`.
"""

from __future__ import annotations

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

    The range is freed by `close`, or with the object, once all work that was submitted before is done with it.
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
    """A point in a stream. It may be recorded again: a wait means the latest record before it."""

    device: str


class Kernel(ABC):
    """One compiled kernel of a plan on one device."""

    spec: KernelSpec


@dataclass(frozen=True)
class GraphShape:
    """What a captured graph holds: nodes by kind ("kernel", "copy", "empty", …), copies between devices included."""

    nodes: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.nodes.values())


class Graph(ABC):
    """An instantiated graph. It holds addresses, not memory: whoever captured it keeps the memory alive."""

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
    """What kernels are compiled for: "x86-64-v4", "sm_90a"."""

    # --- memory ---

    @abstractmethod
    def allocate(self, nbytes: int, *, label: str = "") -> Memory:
        """Zeroed memory (`label` names it in reports). DeviceError 900 while the thread captures, OutOfMemoryError."""

    @abstractmethod
    def upload(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Host to device. The host bytes may change as soon as the call returns; never part of a capture."""

    @abstractmethod
    def download(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Device to host; the bytes are there after `synchronize(stream)`. Never part of a capture."""

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
        """The stream the caller works on.

        `given` (a `Stream`, an integer handle, an object with `__cuda_stream__`), else torch's current one if torch is
        in use on this device, else the current one of the backend, else the legacy one.
        """

    @abstractmethod
    def event(self, name: str = "") -> Event: ...

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None: ...

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """The event may be another device's of the same kind."""

    @abstractmethod
    def synchronize(self, stream: Stream | None = None) -> None:
        """Until the stream (or all of the device's) is done; raises what its kernels reported."""

    @abstractmethod
    def query(self, what: Stream | Event) -> bool:
        """Whether all work of it is done."""

    # --- what a caller does beside us ---

    def captures_here(self) -> bool:
        """Whether this thread is known to capture on some stream of the device (a GPU's driver does not tell)."""
        return False

    def device_of(self, address: int) -> str | None:
        """The device that an address lies on, where the backend can tell."""
        return None

    # --- kernels ---

    @abstractmethod
    def build(self, plan: Plan) -> NativeLibrary:
        """The plan's kernels compiled for this device, from the user's cache if they were before."""

    @abstractmethod
    def load(self, plan: Plan, native: NativeLibrary) -> dict[str, Kernel]:
        """All kernels of the plan, loaded eagerly (a module load inside a capture is forbidden)."""

    @abstractmethod
    def launch(
        self, stream: Stream, kernel: Kernel, operands: Sequence[int], symbols: Sequence[int], context: Any = None
    ) -> None:
        """Runs a kernel: operand addresses in the order of its spec, values of `spec.symbols`. `context` is the CPU's.

        The executor leaves out launches whose grid is empty. The CPU raises here what the kernel reports.
        """

    # --- graphs ---

    @abstractmethod
    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread_local") -> None: ...

    @abstractmethod
    def end_capture(self, stream: Stream) -> Graph:
        """Ends the capture and makes the graph. DeviceError 901…908 for a broken one; it has ended all the same."""
