"""The cuda backend's use of the driver: modules, errors by their runtime-API names, and the current device.

cuda.core provides devices, streams, events, buffers, kernels and graphs.  Where it lacks a call that the backend
interface needs (copies by address, launches from a block of parameters, whether a stream captures), cuda.bindings'
driver is called on the same handles.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qcompiler.errors import (
    DeviceError,
    DeviceUnavailableError,
    MissingDependencyError,
    OutOfMemoryError,
    QCompilerError,
)
from qcompiler.kernels.cuda.signature import ARCHS, arch_number
from qcompiler.runtime.nvrtc import importing_cuda

INSTALL = "pip install 'qcompiler[cuda]'"

OUT_OF_MEMORY = 2
NO_DEVICE = 100
NOT_READY = 600
NOT_FOUND = 500
UNKNOWN = 999

RUNTIME_NAMES: dict[int, str] = {
    1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation", 3: "cudaErrorInitializationError",
    4: "cudaErrorCudartUnloading", 46: "cudaErrorDevicesUnavailable", 100: "cudaErrorNoDevice",
    101: "cudaErrorInvalidDevice", 200: "cudaErrorInvalidKernelImage", 201: "cudaErrorDeviceUninitialized",
    209: "cudaErrorNoKernelImageForDevice", 218: "cudaErrorInvalidPtx", 304: "cudaErrorOperatingSystem",
    400: "cudaErrorInvalidResourceHandle", 401: "cudaErrorIllegalState", 500: "cudaErrorSymbolNotFound",
    600: "cudaErrorNotReady", 700: "cudaErrorIllegalAddress", 701: "cudaErrorLaunchOutOfResources",
    702: "cudaErrorLaunchTimeout", 710: "cudaErrorAssert", 714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction", 716: "cudaErrorMisalignedAddress", 717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc", 719: "cudaErrorLaunchFailure", 800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported", 802: "cudaErrorSystemNotReady", 803: "cudaErrorSystemDriverMismatch",
    900: "cudaErrorStreamCaptureUnsupported", 901: "cudaErrorStreamCaptureInvalidated",
    902: "cudaErrorStreamCaptureMerge", 903: "cudaErrorStreamCaptureUnmatched", 904: "cudaErrorStreamCaptureUnjoined",
    905: "cudaErrorStreamCaptureIsolation", 906: "cudaErrorStreamCaptureImplicit", 907: "cudaErrorCapturedEvent",
    908: "cudaErrorStreamCaptureWrongThread", 909: "cudaErrorTimeout", 999: "cudaErrorUnknown",
}  # fmt: skip
"""The runtime API's name of each code; driver and runtime share their numbers."""

_LOST = range(700, 720)
"""Codes after a fault that destroyed the context: every later call of the process repeats the error."""


class Current:
    """See `Api.current`. A class, since a generator would take as long as the launch that it encloses. Inside
    `Held` of the same context it does nothing."""

    __slots__ = ("_api", "_context", "_pushed")

    def __init__(self, found: Api, context: Any) -> None:
        self._api = found
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        if getattr(self._api.here, "context", None) is self._context:
            return
        driver = self._api.driver
        error, present = driver.cuCtxGetCurrent()
        if int(error) or int(present) != int(self._context):
            self._api.check(driver.cuCtxPushCurrent(self._context), "making the device current")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._api.driver.cuCtxPopCurrent()


class Held(Current):
    """The same around several calls of the backend, each of which then need not ask which context is current.

    Only where no exception can come between (`uninterrupted`), and no other code runs.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        super().__enter__()
        self._before = getattr(self._api.here, "context", None)
        self._api.here.context = self._context

    def __exit__(self, *_: object) -> None:
        self._api.here.context = self._before
        super().__exit__()


@dataclass(frozen=True)
class Api:
    """`driver` is cuda.bindings.driver, `core` cuda.core.

    `libraries` are the loaded cubins by the digest of their bytes. They stay loaded: cuda.core unloads a dropped cubin,
    but a graph may still hold kernels of a dropped program, and a thread that captures must not unload anything.
    """

    driver: Any
    core: Any
    libraries: dict[bytes, Any] = field(default_factory=dict)
    here: threading.local = field(default_factory=threading.local)
    """`context`: the one that this thread holds (`Held`)."""

    def check(self, result: tuple[Any, ...], doing: str) -> Any:
        """The values that follow a driver call's status: None, one, or a tuple. DeviceError if the call failed."""
        if code := int(result[0]):
            raise self.error(code, result[0], doing)
        values = result[1:]
        return values if len(values) > 1 else values[0] if values else None

    def error(self, code: int, status: Any, doing: str) -> DeviceError:
        symbol = RUNTIME_NAMES.get(code) or str(getattr(status, "name", "cudaErrorUnknown"))
        if code == OUT_OF_MEMORY:
            return OutOfMemoryError(f"{doing} failed: the device has no memory left", code, symbol)
        lost = "; an earlier kernel failed, and the process must be restarted" if code in _LOST else ""
        return DeviceError(f"{doing} failed{lost}", code, symbol)

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Inside, an exception of cuda.core becomes a DeviceError with the driver's code.

        Its CUDAError has no code, only a text that begins with the status' name ("CUDA_ERROR_NOT_FOUND: …").
        """
        try:
            yield
        except QCompilerError:
            raise
        except Exception as error:
            if not isinstance(error, RuntimeError) and type(error).__name__ != "CUDAError":
                raise
            name, _, rest = str(error).partition(":")
            status = getattr(self.driver.CUresult, name.strip(), None)
            code = int(rest) if name == "UNEXPECTED ERROR CODE" else int(status or UNKNOWN)
            raise self.error(code, status, doing if code != UNKNOWN else f"{doing} ({error})") from error

    def current(self, context: Any) -> Current:
        """Makes `context` the thread's current one inside, and restores the previous one afterwards."""
        return Current(self, context)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Inside, calls that a capture forbids to its thread (freeing memory) neither fail nor break the capture."""
        driver = self.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.check(driver.cuThreadExchangeStreamCaptureMode(mode), "relaxing the thread's capture mode")
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)


@functools.cache
def api() -> Api:
    """The imported bindings. MissingDependencyError has the command that installs them."""
    try:
        with importing_cuda:
            driver = importlib.import_module("cuda.bindings.driver")
            core = importlib.import_module("cuda.core")
            if not hasattr(core, "Device"):  # before 0.5
                core = importlib.import_module("cuda.core.experimental")
    except ImportError as error:
        raise MissingDependencyError(
            f"CUDA devices need cuda-core and cuda-bindings ({error}); install them with {INSTALL}"
        ) from error
    return Api(driver, core)


def device_count() -> int:
    """The number of GPUs; 0 without a driver.

    DeviceUnavailableError for a driver that does not start, MissingDependencyError for one without its bindings.
    """
    return _count(api()) if _driver_installed() else 0


def _count(found: Api) -> int:
    try:
        status = int(found.driver.cuInit(0)[0])
    except RuntimeError:  # the bindings load libcuda at the first call; it is missing
        return 0
    if status == NO_DEVICE:
        return 0
    if status:
        error = found.error(status, status, "cuInit")
        raise DeviceUnavailableError(f"the CUDA driver does not start: {error}")
    return int(found.check(found.driver.cuDeviceGetCount(), "counting devices"))


def _driver_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def capability(found: Api, index: int) -> tuple[int, int]:
    """(9, 0): the compute capability of a device."""
    attributes = found.driver.CUdevice_attribute
    device = found.check(found.driver.cuDeviceGet(index), f"opening cuda:{index}")
    major, minor = (
        found.check(found.driver.cuDeviceGetAttribute(attribute, device), "reading the compute capability")
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return int(major), int(minor)


def device_arch(index: int) -> str:
    """The architecture to compile for on a device ("sm_90a" on an H100).

    DeviceUnavailableError for a GPU that no supported architecture fits.
    """
    found = api()
    found.check(found.driver.cuInit(0), "starting the CUDA driver")
    return arch_for(capability(found, index), f"cuda:{index}")


def arch_for(device: tuple[int, int], name: str) -> str:
    """The newest supported architecture that a compute capability runs."""
    served = [arch for arch in ARCHS if runs_on(arch, device)]
    if not served:
        raise DeviceUnavailableError(
            f"{name} has compute capability {device[0]}.{device[1]}; programs compile for {', '.join(ARCHS)}"
        )
    return served[-1]


def runs_on(arch: str, device: tuple[int, int]) -> bool:
    """Whether a cubin of `arch` runs on a compute capability: the same major version and no newer minor (CUDA C++
    Programming Guide, "Binary Compatibility"). A cubin of an "a" architecture runs on exactly that one."""
    major, minor = divmod(arch_number(arch), 10)
    if arch.endswith("a"):
        return (major, minor) == device
    return major == device[0] and minor <= device[1]
