"""Memory of the cuda backend: a memory resource for cuda.core, and the runtime's wrapper of its buffers.

cuda.core's own device resources allocate from stream-ordered pools, and an allocation from a pool during a capture
becomes a node of the graph.  This resource calls `cuMemAlloc` and `cuMemFree`.
"""

from __future__ import annotations

from typing import Any

from qcompiler.runtime.backends import base
from qcompiler.runtime.backends.cuda_driver import OUT_OF_MEMORY, Api


class PlainMemory:
    """The resource's calls, without its base class: cuda.core is imported when the first device is opened.

    cuda.core passes streams for resources that free in stream order; `cuMemFree` waits for all work instead.
    """

    is_device_accessible = True
    is_host_accessible = False
    is_managed = False

    def __init__(self, found: Api, context: Any, index: int) -> None:
        self._api = found
        self._context = context
        self._index = index

    @property
    def device_id(self) -> int:
        return self._index

    def allocate(self, size: int, stream: Any = None, *, label: str = "") -> Any:
        """A cuda.core Buffer of `size` > 0 bytes, uninitialised. DeviceError 900 in a capture, OutOfMemoryError."""
        del stream
        driver, check = self._api.driver, self._api.check
        what = f"allocating {size} bytes on cuda:{self._index}" + (f" for {label}" if label else "")
        with self._api.current(self._context), self._api.translated(what):
            result = driver.cuMemAlloc(size)
            if int(result[0]) == OUT_OF_MEMORY:
                free, total = check(driver.cuMemGetInfo(), "asking for the free memory")
                what += f" ({free} of {total} bytes are free)"
            address = int(check(result, what))
            return self._api.core.Buffer.from_handle(address, size, mr=self)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Frees from any thread that drops the buffer, even one that captures at that moment."""
        del size, stream
        with self._api.current(self._context), self._api.relaxed():
            self._api.check(self._api.driver.cuMemFree(int(ptr)), "freeing memory")


def memory_resource(found: Api, context: Any, index: int) -> PlainMemory:
    """A cuda.core MemoryResource of `cuda:index`'s primary context."""
    kind = type("PlainMemoryResource", (PlainMemory, found.core.MemoryResource), {})
    made: PlainMemory = kind(found, context, index)
    return made


class CudaMemory(base.Memory):
    """A buffer (None for no bytes). Freed by `close` or with the object; at the process' end by the driver."""

    def __init__(self, buffer: Any, nbytes: int) -> None:
        self.address = int(buffer.handle) if buffer is not None else 0
        self.nbytes = nbytes
        self.buffer = buffer

    def close(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.close()
