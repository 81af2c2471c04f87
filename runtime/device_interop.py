"""Arguments and results of a program on a GPU: host arrays are copied to it, device arrays are used in place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentShapeError,
    ArgumentStructureError,
    CaptureRuleError,
    DeviceUnavailableError,
)
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.weights import DTYPE_NAMES, NUMPY_DTYPES
from qcompiler.runtime import dlpack, interop, jax_arrays
from qcompiler.runtime.backends.base import Backend, Event, Stream
from qcompiler.runtime.binding import element_count
from qcompiler.runtime.device_array import DeviceArray, Pool
from qcompiler.runtime.forking import free_after_fork
from qcompiler.runtime.interop import Library
from qcompiler.runtime.streams import Queue, is_capturing, order


@dataclass(slots=True)
class Argument:
    """One argument as memory. `device` is None for host memory; `owner` keeps it alive.

    Its bytes are valid after the event `ready`, or after all work given to `stream`, or else in the caller's order.
    """

    address: int
    shape: tuple[int, ...]
    device: str | None
    owner: Any
    library: Library = "numpy"
    stream: Stream | None = None
    ready: Event | None = None


def read(value: Any, name: str, want: str, homes: Mapping[str, Queue], *, capturing: bool) -> Argument:
    """The memory of an argument of a program on `homes`' devices (by name). Its device is not checked here.

    `capturing`: the caller records a capture, in which a producer must not be asked to wait.
    """
    if isinstance(value, DeviceArray):
        if value.type_name != want:
            raise interop.wrong_dtype(name, value.type_name, want)
        if value.is_captured and not capturing:
            raise CaptureRuleError(
                f"argument '{name}' is computed by a capture that has not ended: it has no contents yet"
            )
        return Argument(value.address, value.shape, value.device, value, ready=value.ready)
    if interop.is_torch_tensor(value):
        return _read_torch(value, name, want, homes, capturing)
    if not isinstance(value, np.ndarray):
        if jax_arrays.is_jax_array(value):
            jax_arrays.check_readable(value, name)
        if hasattr(value, "__dlpack_device__"):
            kind, index = map(int, value.__dlpack_device__())
            if kind == dlpack.KDL_CUDA:
                return _read_dlpack(value, name, want, f"cuda:{index}", homes, capturing)
            if kind not in (dlpack.KDL_CPU, dlpack.KDL_CUDA_HOST):
                raise ArgumentStructureError(
                    f"argument '{name}' is a DLPack object on device ({kind}, {index}), which is neither a CPU nor a "
                    "CUDA device"
                )
        elif hasattr(value, "__cuda_array_interface__"):
            return _read_interface(value, name, want, homes)
    source = interop.read(value, name, want)
    return Argument(source.address, source.shape, None, source.owner, source.library)


def _read_torch(value: Any, name: str, want: str, homes: Mapping[str, Queue], capturing: bool) -> Argument:
    if value.is_cpu:
        source = interop.read(value, name, want)
        return Argument(source.address, source.shape, None, source.owner, "torch")
    dtype = interop.torch_dtype_name(value.dtype)
    if dtype != want:
        raise interop.wrong_dtype(name, dtype or str(value.dtype), want)
    if not value.is_cuda:
        raise DeviceUnavailableError(f"argument '{name}' is a torch tensor on {value.device}; pass {name}.cpu()")
    device, ready = f"cuda:{value.get_device()}", None
    if not value.is_contiguous() or value.is_neg():
        _require_plain(name, 0, dtype, not capturing)
        value = value.resolve_neg().contiguous()  # by torch, on its current stream
        ready = homes[device].backend.caller_stream() if device in homes else None
    return Argument(value.data_ptr(), tuple(value.shape), device, value, "torch", ready)


def _read_dlpack(
    value: Any, name: str, want: str, device: str, homes: Mapping[str, Queue], capturing: bool
) -> Argument:
    """A CUDA object of another library. Its producer makes our stream wait for it."""
    wait = homes[device].stream.handle if device in homes and not capturing else -1
    capsule = value.__dlpack__(stream=wait)
    tensor = dlpack.tensor_of(capsule)
    dtype = interop.dlpack_dtype(tensor, name, want)
    shape, strides = dlpack.shape_and_strides(tensor)
    address = (tensor.data or 0) + tensor.byte_offset
    _require_plain(name, address, dtype, dlpack.is_row_major(shape, strides))
    library: Library = "jax" if jax_arrays.is_jax_array(value) else "numpy"
    return Argument(address, shape, device, (value, capsule), library)


def _read_interface(value: Any, name: str, want: str, homes: Mapping[str, Queue]) -> Argument:
    """An object with only `__cuda_array_interface__`. This does not give its device; the driver may."""
    interface = value.__cuda_array_interface__
    dtype = DTYPE_NAMES.get(np.dtype(interface["typestr"]))
    if dtype != want:
        raise interop.wrong_dtype(name, dtype or interface["typestr"], want)
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    elements = None if strides is None else tuple(stride // ITEMSIZE[dtype] for stride in strides)
    address = int(interface["data"][0])
    _require_plain(name, address, dtype, dlpack.is_row_major(shape, elements))
    home = next(iter(homes.values()))
    device = home.backend.device_of(address) or (home.backend.device if home.backend.kind == "cuda" else "cuda")
    stream = interface.get("stream")
    ready = home.backend.caller_stream(int(stream)) if stream is not None and home.backend.kind == "cuda" else None
    return Argument(address, shape, device, value, "numpy", ready)


def _require_plain(name: str, address: int, dtype: str, row_major: bool) -> None:
    if not row_major or address % ITEMSIZE[dtype]:
        raise ArgumentStructureError(
            f"argument '{name}' is not row-major in the device's memory; make it contiguous before the call"
        )


class Uploader:
    """Copies host arrays to a device's memory, on a stream of its own."""

    def __init__(self, backend: Backend) -> None:
        self._queue = Queue(backend, backend.stream("uploads"))
        self._pool = Pool(self._queue, lambda nbytes, label: backend.allocate(nbytes, label=label))
        self._ready = backend.event("uploaded")
        self._lock = threading.Lock()
        free_after_fork(self)

    def put(self, value: Any, given: Any) -> DeviceArray:
        """A copy of a host array, ready in the order of the caller's stream (`given`, or the current one)."""
        backend = self._queue.backend
        _require_host(value, backend.device)
        dtype = _dtype_of(value)
        source = interop.read(value, "array", dtype)
        caller = Queue(backend, backend.caller_stream(given))
        if is_capturing(backend, caller.stream):
            raise CaptureRuleError("the caller records a capture, in which nothing is uploaded; do it before")
        with self._lock:
            lease = self._pool.take(element_count(source.shape, {}) * ITEMSIZE[dtype], caller.stream)
            array = DeviceArray(
                backend, lease.memory.address, tuple(source.shape), dtype, self._queue.stream, lease, self._ready
            )
            order([caller], [self._queue])
            if array.nbytes:
                backend.upload(self._queue.stream, array.address, source.address, array.nbytes)
            backend.record(self._ready, self._queue.stream)
            order([self._queue], [caller])
        return array


def _dtype_of(values: Any) -> str:
    """Our name of an array's dtype. ArgumentDtypeError for a dtype that programs do not have."""
    if interop.is_torch_tensor(values):
        name = interop.torch_dtype_name(values.dtype)
    else:
        name = DTYPE_NAMES.get(np.asarray(values).dtype)
    if name is None:
        raise ArgumentDtypeError(
            f"an array of {getattr(values, 'dtype', type(values).__name__)} has a dtype that programs do not have"
        )
    return name


def _require_host(value: Any, device: str) -> None:
    """DeviceUnavailableError for an array that is already on a device."""
    if isinstance(value, DeviceArray):
        where = value.device
    elif interop.is_torch_tensor(value) and not value.is_cpu:
        where = str(value.device)
    else:
        return
    way_out = "pass it to the program as it is" if where == device else "copy it to the host first"
    raise DeviceUnavailableError(f"array() copies host arrays to {device}, and this one is on {where}; {way_out}")


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ResultMemory:
    """The memory of one result: on the host (`device` None) or on a device. `array` is set for a DeviceArray.

    A result that is not `wanted` stays in memory of the session or of the graph, and has no address.
    """

    address: int
    device: str | None
    array: DeviceArray | None = None
    wanted: bool = True


def new_torch(shape: tuple[int, ...], dtype: str, device: str, stream: Stream | None) -> Any:
    """A fresh torch tensor on `device`, allocated in the order of `stream`, or of torch's current one."""
    torch = sys.modules["torch"]
    torch_dtype = getattr(torch, interop.TORCH_NAMES[dtype])
    if stream is None:
        return torch.empty(shape, dtype=torch_dtype, device=device)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, device=device)):
        return torch.empty(shape, dtype=torch_dtype, device=device)


def target(value: Any, name: str, shape: tuple[int, ...], dtype: str) -> ResultMemory:
    """The memory of one `out=` array; errors unless it is a writable, row-major array of this shape and dtype.

    None is a result that the caller does not want.
    """
    if value is None:
        return ResultMemory(0, None, wanted=False)
    if isinstance(value, DeviceArray):
        if value.type_name != dtype:
            raise interop.wrong_out(name, f"dtype {value.type_name}", f"{dtype} ({NUMPY_DTYPES[dtype].name})")
        _check_shape(name, value.shape, shape)
        return ResultMemory(value.address, value.device, value)
    if interop.is_torch_tensor(value) and value.is_cuda:
        got = interop.torch_dtype_name(value.dtype)
        if got != dtype:
            raise interop.wrong_out(name, f"dtype {value.dtype}", f"{dtype} ({NUMPY_DTYPES[dtype].name})")
        _check_shape(name, tuple(value.shape), shape)
        if not value.is_contiguous() or value.is_neg():
            raise ArgumentStructureError(f"out '{name}' must be a contiguous tensor")
        return ResultMemory(value.data_ptr(), f"cuda:{value.get_device()}")
    return ResultMemory(interop.target(value, name, shape, dtype), None)


def _check_shape(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    if got != want:
        raise ArgumentShapeError(f"out '{name}' has shape {got}, this call's result has {want}")
