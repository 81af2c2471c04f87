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


class FakeDriver:
    """`calls` are (name, arguments); `fails[name]` is the status that a function gives."""

    CUstream = CUevent = Handle
    CUstreamCaptureMode = Mode
    CUdevice_attribute = CUpointer_attribute = CUfunction_attribute = Attributes()
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
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
            "cuMemAlloc": (0x7000,), "cuMemGetInfo": (123, 456), "cuModuleLoadData": (31,),
            "cuModuleGetFunction": (32,), "cuStreamEndCapture": (41,), "cuGraphInstantiate": (42,),
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

    def _cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, int]:
        return list(range(count)), len(self.nodes)

    def _cuGraphNodeGetType(self, node: int) -> tuple[NodeType]:
        return (self.nodes[node],)

    def _cuLaunchKernel(self, *arguments: Any) -> tuple[()]:
        pointers = (ctypes.c_void_p * 3).from_address(arguments[9])
        self.parameters.append([ctypes.c_int64.from_address(pointer).value for pointer in pointers])
        return ()


class FakeCore:
    """cuda.core: devices that make streams and events."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.made = 0x2000

    def StreamOptions(self, *, nonblocking: bool) -> bool:
        return nonblocking

    def Device(self, index: int) -> Any:
        return SimpleNamespace(set_current=self._current, create_stream=self._make, create_event=self._make)

    def _current(self) -> None:
        assert self.driver.stack[-1] == FakeDriver.PRIMARY, "cuda.core would change the caller's current context"

    def _make(self, options: Any = None) -> Any:
        self.made += 1
        return SimpleNamespace(handle=Handle(self.made), options=options)
