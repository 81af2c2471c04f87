"""A driver that only notes what it is asked: enough of cuda.bindings.driver and cuda.core for the cuda backend."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

OK = 0


class Handle(int):
    """CUstream, CUevent, …: a number."""


class NodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10


class Mode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class Attributes:
    """Any attribute's name is its value."""

    def __getattr__(self, name: str) -> str:
        return name


class Results:
    """CUresult by name: "CUDA_ERROR_904" is 904. As in the bindings, there is nothing under other names."""

    def __getattr__(self, name: str) -> int:
        if not name.startswith("CUDA_ERROR_"):
            raise AttributeError(name)
        return int(name.removeprefix("CUDA_ERROR_"))


class CUDAError(Exception):
    """cuda.core's, known by its name."""


class FakeDriver:
    """`calls` are (name, arguments); `fails[name]` is the status that a function gives."""

    CUstream = CUevent = Handle
    CUstreamCaptureMode = Mode
    CUresult = Results()
    CUdevice_attribute = CUpointer_attribute = CUfunction_attribute = Attributes()
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = Attributes()
    PRIMARY = 0x1000

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails: dict[str, int] = {}
        self.stack: list[int] = []
        self.mode: Mode = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.modes_seen: dict[str, Mode] = {}
        self.parameters: list[list[int]] = []
        self.nodes = [NodeType.CU_GRAPH_NODE_TYPE_KERNEL] * 2 + [NodeType.CU_GRAPH_NODE_TYPE_EMPTY]
        self.capturing = 0
        self.stream_context = self.PRIMARY
        self.pinned = False
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuInit": (), "cuDeviceGetCount": (2,), "cuDeviceGet": (7,), "cuDevicePrimaryCtxRetain": (self.PRIMARY,),
            "cuMemAlloc": (0x7000,), "cuMemGetInfo": (123, 456), "cuKernelGetFunction": (32,),
            "cuGraphInstantiateWithParams": (42,),
        }  # fmt: skip

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            self.modes_seen[name] = self.mode
            if status := self.fails.get(name, OK):
                if name == "cuStreamEndCapture" and status != 908:
                    self.capturing = 0
                return (status, None)
            own = getattr(self, f"_{name}", None)
            return (OK, *(own(*arguments) if own else self.answers.get(name, ())))

        return call

    def _cuCtxGetCurrent(self) -> tuple[int]:
        return (self.stack[-1] if self.stack else 0,)

    def _cuCtxPushCurrent(self, context: int) -> tuple[()]:
        self.stack.append(int(context))
        return ()

    def _cuCtxPopCurrent(self) -> tuple[int]:
        return (self.stack.pop(),)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Mode) -> tuple[Mode]:
        before, self.mode = self.mode, mode
        return (before,)

    def _cuDeviceGetAttribute(self, name: str, device: int) -> tuple[int]:
        return ({"CAPABILITY_MAJOR": 9, "CAPABILITY_MINOR": 0}.get(name.rsplit("COMPUTE_", maxsplit=1)[-1], 0),)

    def _cuPointerGetAttribute(self, name: str, address: int) -> tuple[int]:
        return (2 if name.endswith("MEMORY_TYPE") else 1,)

    def _cuStreamGetCtx(self, stream: int) -> tuple[int]:
        return (self.stream_context,)

    def _cuStreamIsCapturing(self, stream: int) -> tuple[int]:
        return (self.capturing,)

    def _cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return (self.capturing, 1, 41, [], [], 0)

    def _cuStreamBeginCapture(self, stream: int, mode: Mode) -> tuple[()]:
        self.capturing = 1
        return ()

    def _cuStreamEndCapture(self, stream: int) -> tuple[int]:
        self.capturing = 0
        return (41,)

    def _cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, int]:
        return list(range(count)), len(self.nodes)

    def _cuGraphNodeGetType(self, node: int) -> tuple[NodeType]:
        return (self.nodes[node],)

    def _cuLaunchKernel(self, *arguments: Any) -> tuple[()]:
        pointers = (ctypes.c_void_p * 3).from_address(arguments[9])
        self.parameters.append([ctypes.c_int64.from_address(pointer).value for pointer in pointers])
        return ()

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def _cuLaunchKernelEx(self, how: Any, function: int, parameters: int, extra: int) -> tuple[()]:
        assert [each.value.programmaticStreamSerializationAllowed for each in how.attrs] == [1] * how.numAttrs == [1]
        where = (how.gridDimX, how.gridDimY, how.gridDimZ, how.blockDimX, how.blockDimY, how.blockDimZ)
        return self._cuLaunchKernel(function, *where, how.sharedMemBytes, how.hStream, parameters, extra)


class FakeCore:
    """cuda.core: devices that make streams and events, buffers, kernels, graphs."""

    class MemoryResource:
        pass

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.made = 0x2000
        self.builders: list[FakeBuilder] = []
        self.Stream = SimpleNamespace(from_handle=lambda handle: FakeStream(self, Handle(handle)))
        self.Buffer = SimpleNamespace(from_handle=FakeBuffer)
        self.ObjectCode = SimpleNamespace(from_cubin=lambda image: FakeCode(self, image))

    def StreamOptions(self, *, nonblocking: bool) -> bool:
        return nonblocking

    def Device(self, index: int) -> Any:
        return SimpleNamespace(
            set_current=self._current,
            create_stream=lambda options: FakeStream(self, self._make()),
            create_event=lambda: SimpleNamespace(handle=self._make()),
        )

    def _current(self) -> None:
        assert self.driver.stack[-1] == FakeDriver.PRIMARY, "cuda.core would change the caller's current context"

    def _make(self) -> Handle:
        self.made += 1
        return Handle(self.made)

    def call(self, name: str, *arguments: Any) -> Any:
        """As cuda.core calls: in the right context, and with an exception that has no code."""
        self._current()
        status, *values = getattr(self.driver, name)(*arguments)
        if status:
            raise CUDAError(f"CUDA_ERROR_{status}: what it means")
        return values[0] if values else None


class FakeBuffer:
    def __init__(self, handle: int, size: int, mr: Any) -> None:
        self.handle, self.size, self.resource = handle, size, mr

    def close(self) -> None:
        resource, self.resource = self.resource, None
        if resource is not None:
            resource.deallocate(self.handle, self.size, stream="the default stream")

    __del__ = close


class FakeStream:
    def __init__(self, core: FakeCore, handle: Handle) -> None:
        self.core, self.handle = core, handle

    def create_graph_builder(self) -> FakeBuilder:
        self.core.builders.append(FakeBuilder(self))
        return self.core.builders[-1]


class FakeBuilder:
    """As cuda.core 1.2.2's: ends no invalidated capture, and must not be closed or dropped after a failure."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream, self.core, self.state = stream, stream.core, "new"

    def begin_building(self, mode: str) -> None:
        self.core.call("cuStreamBeginCapture", self.stream.handle, Mode[f"CU_STREAM_CAPTURE_MODE_{mode.upper()}"])
        self.state = "capturing"

    def end_building(self) -> None:
        if self.core.driver.capturing != 1:
            raise RuntimeError("Build process encountered an error and has been invalidated.")
        self.core.call("cuStreamEndCapture", self.stream.handle)
        self.state = "ended"

    def complete(self) -> FakeGraph:
        assert self.state == "ended"
        return FakeGraph(self.core, self.core.call("cuGraphInstantiateWithParams", 41))

    def close(self) -> None:
        assert self.state == "ended", "the driver has destroyed the graph"
        self.state = "closed"
        self.core.call("cuGraphDestroy", 41)


class FakeGraph:
    def __init__(self, core: FakeCore, handle: int) -> None:
        self.core, self.handle = core, handle

    def launch(self, stream: FakeStream) -> None:
        self.core.call("cuGraphLaunch", self.handle, stream.handle)

    def close(self) -> None:
        self.core.call("cuGraphExecDestroy", self.handle)


class FakeCode:
    """A cubin of one kernel, `qk_0`."""

    def __init__(self, core: FakeCore, image: bytes) -> None:
        self.core = core
        core.driver.calls.append(("from_cubin", (image,)))

    def get_kernel(self, name: str) -> Any:
        if self.core.driver.fails.get("cuLibraryLoadData"):
            raise CUDAError("CUDA_ERROR_200: no cubin")
        if name != "qk_0":
            raise CUDAError("CUDA_ERROR_500: no such function")
        return SimpleNamespace(handle=31)
