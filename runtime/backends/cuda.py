"""The backend of NVIDIA GPUs: `cuda:N` through cuda.core and the driver.

Devices, streams, events, buffers (of our own memory resource), kernels and graphs are cuda.core's.  On their handles,
the driver is called for the rest: launches, which fill one block of parameters per kernel (`cuda.core.launch` makes new
ones each time); copies and clearing by address; records, waits and queries, whose statuses are needed as codes; the
limit on shared memory, since `Kernel.attributes` only reads.

The backend works in the device's primary context.  It makes that context current around each call and then restores
the previous one, so a caller's current device neither matters nor changes.  Kernels are loaded with their plan, since a
first lazy load inside a capture breaks it.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from qcompiler.errors import (
    ArgumentError,
    CaptureRuleError,
    CompileFailedError,
    DeviceError,
    DeviceUnavailableError,
    TargetMismatchError,
)
from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.runtime import nvrtc
from qcompiler.runtime.backends import base, cuda_graphs
from qcompiler.runtime.backends.cuda_driver import (
    NOT_FOUND,
    NOT_READY,
    RUNTIME_NAMES,
    Api,
    Held,
    api,
    arch_for,
    capability,
    device_arch,
    device_count,
    runs_on,
)
from qcompiler.runtime.backends.cuda_memory import CudaMemory, memory_resource
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.image import NativeLibrary

__all__ = [
    "CudaBackend",
    "CudaEvent",
    "CudaGraph",
    "CudaMemory",
    "CudaStream",
    "LoadedCudaKernel",
    "device_arch",
    "device_count",
]

LEGACY = 1
"""CU_STREAM_LEGACY: the default stream under a name that no environment variable can change."""

SHARED_WITHOUT_ASKING = 48 << 10
"""Bytes of dynamic shared memory that a kernel may use before its limit is raised (CUDA C++ Programming Guide)."""

OVERLAP_SINCE = 90
"""The first architecture whose kernels may start before those before them have ended (CUDA C++ Programming Guide,
"Programmatic Dependent Launch")."""

GRIDS_KEPT = 256
"""The number of grids that a kernel caches: evaluating dimension expressions costs more than a launch."""


class CudaStream(base.Stream):
    """A stream of one device. `owner` keeps it alive: a cuda.core Stream for ours (`core`), else the foreign object."""

    def __init__(self, backend: CudaBackend, handle: int, owner: Any, name: str = "", *, core: Any = None) -> None:
        self.device = backend.device
        self.handle = handle
        self.name = name
        self.owner = owner
        self.driver_handle = backend.api.driver.CUstream(handle)
        self._backend = backend
        self._core = core

    @property
    def core(self) -> Any:
        """The stream as a cuda.core object."""
        if self._core is None:
            self._core = self._backend.api.core.Stream.from_handle(self.handle)
        return self._core

    @property
    def is_capturing(self) -> bool:
        return self._backend.is_capturing(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CudaEvent(base.Event):
    """An event: cuda.core's without timing, or a timer of the driver's."""

    def __init__(self, found: Api, device: str, owner: Any, name: str = "") -> None:
        self.device = device
        self.name = name
        self.owner = owner
        self.handle = int(owner.handle)
        self.driver_handle = found.driver.CUevent(self.handle)


class DriverEvent:
    """An event of the driver's with timing, destroyed with this object."""

    def __init__(self, found: Api, context: Any) -> None:
        with found.current(context):
            self.handle = found.check(found.driver.cuEventCreate(0), "creating an event")
        self._finalizer: Any = weakref.finalize(self, _destroy_event, found, context, self.handle)
        self._finalizer.atexit = False


def _destroy_event(found: Api, context: Any, handle: Any) -> None:
    with found.current(context):
        found.check(found.driver.cuEventDestroy(handle), "destroying an event")


class LoadedCudaKernel(base.Kernel):
    """A loaded kernel: its function, its geometry, and one block of parameters that each launch fills.

    Parameters are eight bytes each (pointers, then int64 symbols).  The driver copies them during the launch, so one
    block serves all launches, one at a time (`lock`).  `overlapping` is the launch configuration of a kernel that may
    start before the kernels before it have ended; None for one that may not.
    """

    def __init__(self, spec: KernelSpec, function: Any, geometry: Geometry, overlapping: Any = None) -> None:
        self.spec = spec
        self.function = function
        self.geometry = geometry
        self.overlapping = overlapping
        self.lock = threading.Lock()
        count = len(spec.operands) + len(spec.symbols)
        self.values = (ctypes.c_int64 * count)()
        start = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * count)(*(start + 8 * i for i in range(count)))
        self.parameters = ctypes.addressof(self._pointers)
        self._grids: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def grid(self, symbols: Sequence[int]) -> tuple[int, int, int]:
        """The grid for values of the spec's symbols."""
        key = tuple(symbols)
        if (known := self._grids.get(key)) is not None:
            return known
        if len(self._grids) >= GRIDS_KEPT:
            self._grids.clear()
        grid = self._grids[key] = self.geometry.at(dict(zip(self.spec.symbols, key, strict=True)))
        return grid


class CudaGraph(base.Graph):
    """An instantiated graph: a cuda.core Graph."""

    def __init__(self, backend: CudaBackend, graph: Any, shape: base.GraphShape) -> None:
        self.shape = shape
        self._backend = backend
        self._graph = graph
        self._finalizer: Any = weakref.finalize(self, cuda_graphs.closing(backend.api, backend.context, graph))
        self._finalizer.atexit = False

    def launch(self, stream: base.Stream) -> None:
        if not self._finalizer.alive:
            raise DeviceError("launching a graph that was closed", 400, RUNTIME_NAMES[400])
        self._backend.launch_graph(self._graph, stream)

    def close(self) -> None:
        self._finalizer()


class CudaBackend(base.Backend):
    """One GPU. `isa` is the architecture that its kernels are compiled for (the device's own by default)."""

    kind = "cuda"

    def __init__(self, index: int, isa: str | None = None, *, found: Api | None = None) -> None:
        self.api = found or api()
        self._driver = self.api.driver
        self.index = index
        self.device = f"cuda:{index}"
        check = self.api.check
        check(self._driver.cuInit(0), "starting the CUDA driver")
        self._check_there()
        capable = capability(self.api, index)
        self.isa = isa or arch_for(capable, self.device)
        if not runs_on(self.isa, capable):
            raise TargetMismatchError(
                f"kernels for {self.isa} do not run on {self.device} (compute capability {capable[0]}.{capable[1]}); "
                f'compile for it with targets=["{arch_for(capable, self.device)}"]'
            )
        self._number = check(self._driver.cuDeviceGet(index), f"opening {self.device}")
        self.context = check(self._driver.cuDevicePrimaryCtxRetain(self._number), f"opening {self.device}")
        self._context_address = int(self.context)
        self._resource = memory_resource(self.api, self.context, index)
        self._reads_host_pages = self._attribute("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
        self._upkeep = self.stream("upkeep")
        self._legacy = CudaStream(self, LEGACY, None, "legacy")

    def _check_there(self) -> None:
        there = int(self.api.check(self._driver.cuDeviceGetCount(), "counting devices"))
        if not 0 <= self.index < there:
            raise DeviceUnavailableError(f"there is no {self.device} on this machine; it has {there} GPUs")

    def _attribute(self, name: str) -> bool:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return bool(self.api.check(self._driver.cuDeviceGetAttribute(attribute, self._number), "reading an attribute"))

    def current(self) -> Held:
        return Held(self.api, self.context)

    # --- memory ---

    def allocate(self, nbytes: int, *, label: str = "") -> CudaMemory:
        if nbytes == 0:
            return CudaMemory(None, 0)
        memory = CudaMemory(self._resource.allocate(nbytes, label=label), nbytes)
        with self.api.current(self.context):
            self._zero(self._upkeep, memory.address, nbytes)
            done = self._driver.cuStreamSynchronize(self._upkeep.driver_handle)
            self.api.check(done, f"clearing memory of {self.device}")
        return memory

    def upload(self, stream: base.Stream, target: int, source: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        on = self._own(stream)
        self._refuse_capturing(on, "an upload from host memory")
        with self.api.current(self.context):
            self.api.check(
                self._driver.cuMemcpyHtoDAsync(target, source, nbytes, on.driver_handle),
                f"uploading {nbytes} bytes to {self.device}",
            )
            if self._reads_host_pages or self._pinned(source):
                # The driver stages pageable memory before it returns, and reads any other when the copy runs.
                self.api.check(self._driver.cuStreamSynchronize(on.driver_handle), "waiting for an upload")

    def download(self, stream: base.Stream, target: int, source: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        on = self._own(stream)
        self._refuse_capturing(on, "a download to host memory")
        with self.api.current(self.context):
            self.api.check(
                self._driver.cuMemcpyDtoHAsync(target, source, nbytes, on.driver_handle),
                f"downloading {nbytes} bytes from {self.device}",
            )

    def copy(self, stream: base.Stream, target: int, source: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        with self.api.current(self.context):  # unified addresses: the driver knows the device of each
            self.api.check(
                self._driver.cuMemcpyAsync(target, source, nbytes, self._own(stream).driver_handle),
                f"copying {nbytes} bytes on {self.device}",
            )

    def zero(self, stream: base.Stream, target: int, nbytes: int) -> None:
        if nbytes:
            with self.api.current(self.context):
                self._zero(self._own(stream), target, nbytes)

    def _zero(self, stream: CudaStream, target: int, nbytes: int) -> None:
        done = self._driver.cuMemsetD8Async(target, 0, nbytes, stream.driver_handle)
        self.api.check(done, f"clearing {nbytes} bytes on {self.device}")

    def _pinned(self, address: int) -> bool:
        """Whether host memory is known to the driver (page-locked or registered)."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return not int(self._driver.cuPointerGetAttribute(attribute, address)[0])

    def _refuse_capturing(self, stream: CudaStream, what: str) -> None:
        if stream.is_capturing:
            raise CaptureRuleError(f"{what} inside a capture: the graph would read host memory at every replay")

    # --- streams and events ---

    def stream(self, name: str = "", *, kind: base.StreamKind = "nonblocking") -> CudaStream:
        with self.api.current(self.context), self.api.translated(f"creating a stream of {self.device}"):
            options = self.api.core.StreamOptions(nonblocking=kind == "nonblocking")
            owner = self._core_device().create_stream(options=options)
        return CudaStream(self, int(owner.handle), owner, name, core=owner)

    def legacy_stream(self) -> CudaStream:
        return self._legacy

    def caller_stream(self, given: Any = None) -> CudaStream:
        if given is not None:
            return self._foreign(given)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            current = torch.cuda.current_stream(self.index)
            return self._wrap(int(current.cuda_stream), current)
        return self._legacy

    def _foreign(self, given: Any) -> CudaStream:
        if isinstance(given, CudaStream):
            return self._own(given)
        if isinstance(given, int) and not isinstance(given, bool):
            return self._wrap(given, None)
        protocol = getattr(given, "__cuda_stream__", None)
        if protocol is not None:  # (version, handle); early adopters had a property instead of a method
            answer = protocol() if callable(protocol) else protocol
            return self._wrap(int(answer[1]), given)
        if hasattr(given, "cuda_stream"):  # torch.cuda.Stream
            return self._wrap(int(given.cuda_stream), given)
        raise ArgumentError(
            f"a stream of {self.device} is a Stream, an integer handle or an object with __cuda_stream__, "
            f"not a {type(given).__name__}"
        )

    def _wrap(self, handle: int, owner: Any) -> CudaStream:
        if handle in (0, LEGACY):
            return self._legacy
        stream = CudaStream(self, handle, owner)
        with self.api.current(self.context):
            answer = self._driver.cuStreamGetCtx(stream.driver_handle)
            context = self.api.check(answer, "asking for a stream's context")
        if int(context) != self._context_address:
            raise DeviceUnavailableError(f"the stream {handle:#x} is not one of {self.device}'s primary context")
        return stream

    def _own(self, stream: base.Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device != self.device:
            raise DeviceError(f"a stream of {stream.device} was used on {self.device}", 400, RUNTIME_NAMES[400])
        return stream

    def event(self, name: str = "") -> CudaEvent:
        with self.api.current(self.context), self.api.translated(f"creating an event of {self.device}"):
            return CudaEvent(self.api, self.device, self._core_device().create_event(), name)

    def _core_device(self) -> Any:
        """cuda.core's Device: one object per thread, which each thread must initialise."""
        device = self.api.core.Device(self.index)
        device.set_current()
        return device

    def record(self, event: base.Event, stream: base.Stream) -> None:
        with self.api.current(self.context):
            done = self._driver.cuEventRecord(_ours(event).driver_handle, self._own(stream).driver_handle)
            self.api.check(done, "recording an event")

    def wait(self, stream: base.Stream, event: base.Event) -> None:
        with self.api.current(self.context):
            done = self._driver.cuStreamWaitEvent(self._own(stream).driver_handle, _ours(event).driver_handle, 0)
            self.api.check(done, "waiting for an event")

    def synchronize(self, stream: base.Stream | None = None) -> None:
        driver = self._driver
        with self.api.current(self.context):
            if stream is None:
                self.api.check(driver.cuCtxSynchronize(), f"waiting for {self.device}")
            else:
                self.api.check(driver.cuStreamSynchronize(self._own(stream).driver_handle), "waiting for a stream")

    def query(self, what: base.Stream | base.Event) -> bool:
        driver = self._driver
        with self.api.current(self.context):
            if isinstance(what, base.Event):
                result = driver.cuEventQuery(_ours(what).driver_handle)
            else:
                result = driver.cuStreamQuery(self._own(what).driver_handle)
        if int(result[0]) == NOT_READY:
            return False
        self.api.check(result, "asking whether work is done")
        return True

    def timer(self, name: str = "") -> CudaEvent:
        return CudaEvent(self.api, self.device, DriverEvent(self.api, self.context), name)

    def elapsed(self, begin: base.Event, end: base.Event) -> float:
        with self.api.current(self.context):
            taken = self._driver.cuEventElapsedTime(_ours(begin).driver_handle, _ours(end).driver_handle)
            return float(self.api.check(taken, "reading the time between two events")) * 1e3

    # --- the caller's own activity ---

    def is_capturing(self, stream: CudaStream) -> bool:
        with self.api.current(self.context):
            answer = self._driver.cuStreamIsCapturing(stream.driver_handle)
            return int(self.api.check(answer, "asking whether a stream captures")) != 0

    def facts(self) -> tuple[str, int, int, int]:
        """The device's name, its bytes of memory, those that are free, and the driver's version (13010 for 13.1)."""
        with self.api.current(self.context):
            name = self.api.check(self._driver.cuDeviceGetName(256, self._number), "asking for the device's name")
            free, total = self.api.check(self._driver.cuMemGetInfo(), "asking for the device's memory")
            version = self.api.check(self._driver.cuDriverGetVersion(), "asking for the driver's version")
        return name.partition(b"\0")[0].decode(), int(total), int(free), int(version)

    def captures_here(self) -> bool:
        if cuda_graphs.captures_here(self.index):
            return True
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        return self._wrap(int(torch.cuda.current_stream(self.index).cuda_stream), None).is_capturing

    def device_of(self, address: int) -> str | None:
        attributes, ask = self._driver.CUpointer_attribute, self._driver.cuPointerGetAttribute
        status, kind = ask(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if int(status) or int(kind) != int(self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            return None
        ordinal = ask(attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        return f"cuda:{int(self.api.check(ordinal, 'asking for the device of an address'))}"

    # --- kernels ---

    def build(self, plan: Plan) -> NativeLibrary:
        return nvrtc.build_module(plan, self.isa)

    def load(self, plan: Plan, native: NativeLibrary) -> dict[str, base.Kernel]:
        if not plan.kernels:
            return {}
        with self.api.current(self.context):
            code = self._library(native)
            return {spec.name: self._kernel(code, spec, n, native) for n, spec in enumerate(plan.kernels)}

    def _library(self, native: NativeLibrary) -> Any:
        """A cubin as cuda.core's ObjectCode, which loads it for all devices at the first request for a kernel."""
        image = native.read()
        digest = hashlib.sha256(image).digest()
        if digest not in self.api.libraries:
            self.api.libraries[digest] = self.api.core.ObjectCode.from_cubin(image)
        return self.api.libraries[digest]

    def _kernel(self, code: Any, spec: KernelSpec, number: int, native: NativeLibrary) -> LoadedCudaKernel:
        driver = self._driver
        name = nvrtc.kernel_symbol(str(number))
        try:
            with self.api.translated(f"loading {native.path} on {self.device}"):
                kernel = code.get_kernel(name)
        except DeviceError as error:
            if error.code != NOT_FOUND:
                raise
            raise CompileFailedError(f"the compiled kernels {native.path} lack the function '{name}'") from error
        # A CUkernel belongs to no context; its function in this context launches faster and can be loaded now.
        handle = kernel.handle if hasattr(kernel, "handle") else kernel._handle  # the second in early versions
        found = driver.cuKernelGetFunction(handle)
        function = self.api.check(found, f"loading the kernel '{spec.name}'")
        if hasattr(driver, "cuFuncLoad"):  # CUDA 12.4: load now, not at the first launch, which may be in a capture
            self.api.check(driver.cuFuncLoad(function), f"loading the kernel '{spec.name}'")
        geometry = emit.geometry(spec, native.isa)
        if geometry.shared > SHARED_WITHOUT_ASKING:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done = driver.cuFuncSetAttribute(function, attribute, geometry.shared)
            self.api.check(done, f"giving the kernel '{spec.name}' {geometry.shared} bytes of shared memory")
        # A build of another version may have kernels that do not wait for those before them.
        waits = arch_number(native.isa) >= OVERLAP_SINCE and native.emitter_version == emitter_version("cuda")
        return LoadedCudaKernel(spec, function, geometry, self._overlapping(geometry) if waits else None)

    def _overlapping(self, geometry: Geometry) -> Any:
        """The launch configuration of a kernel that may start before the kernels before it have ended ("programmatic
        dependent launch"); grid and stream are filled in at each launch."""
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found = driver.CUlaunchConfig()
        found.blockDimX, found.blockDimY, found.blockDimZ = geometry.block
        found.sharedMemBytes = geometry.shared
        found.attrs, found.numAttrs = [attribute], 1
        return found

    def launch(
        self,
        stream: base.Stream,
        kernel: base.Kernel,
        operands: Sequence[int],
        symbols: Sequence[int],
        context: Any = None,
    ) -> None:
        assert isinstance(kernel, LoadedCudaKernel)
        on = self._own(stream)
        geometry = kernel.geometry
        grid = kernel.grid(symbols)
        if 0 in grid:
            return
        with self.api.current(self.context), kernel.lock:
            kernel.values[:] = [*operands, *symbols]
            if (how := kernel.overlapping) is not None:
                how.gridDimX, how.gridDimY, how.gridDimZ = grid
                how.hStream = on.driver_handle
                done = self._driver.cuLaunchKernelEx(how, kernel.function, kernel.parameters, 0)
            else:
                done = self._driver.cuLaunchKernel(
                    kernel.function, *grid, *geometry.block, geometry.shared, on.driver_handle, kernel.parameters, 0
                )
        if int(done[0]):
            self.api.check(done, f"launching the kernel '{kernel.spec.name}' on a grid of {grid}")

    # --- graphs ---

    def begin_capture(self, stream: base.Stream, mode: base.CaptureMode = "thread_local") -> None:
        with self.api.current(self.context):
            cuda_graphs.begin(self.api, self.index, self._own(stream).core, mode)

    def end_capture(self, stream: base.Stream) -> CudaGraph:
        with self.api.current(self.context):
            graph, shape = cuda_graphs.end(self.api, self._own(stream).core)
        return CudaGraph(self, graph, shape)

    def launch_graph(self, graph: Any, stream: base.Stream) -> None:
        on = self._own(stream)
        if on.is_capturing:
            raise CaptureRuleError("the stream captures; a graph inside a graph is not supported here")
        with self.api.current(self.context), self.api.translated("launching a graph"):
            graph.launch(on.core)


def _ours(event: base.Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise DeviceError(f"an event of {event.device} was used on a GPU", 400, RUNTIME_NAMES[400])
    return event
