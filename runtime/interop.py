"""Other libraries' arrays as addresses, without a copy: NumPy, torch CPU tensors, JAX, and all objects with DLPack.

torch and JAX are never imported here: a caller with one of their arrays has imported it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from qcompiler.errors import ArgumentDtypeError, ArgumentShapeError, ArgumentStructureError, DeviceUnavailableError
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.weights import DTYPE_NAMES, NUMPY_DTYPES
from qcompiler.runtime import dlpack, jax_arrays
from qcompiler.runtime.device_array import DeviceArray
from qcompiler.runtime.memory import address_of, no_memory

TORCH_NAMES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "ui8": "uint8", "i1": "bool",
}  # fmt: skip

_torch_dtypes: dict[Any, str] = {}
"""torch.dtype -> our name; filled at the first torch tensor."""


Library = Literal["numpy", "torch", "jax"]
"""Whose arrays results are; DLPack objects of other libraries count as NumPy's."""


class Source:
    """One argument as memory. `owner` keeps the memory alive; `library` decides the type of results."""

    __slots__ = ("address", "library", "owner", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], owner: Any, library: Library = "numpy") -> None:
        self.address = address
        self.shape = shape
        self.owner = owner
        self.library = library


def library_of(libraries: Iterable[Library]) -> Library:
    """Whose arrays a call returns: torch's if any argument is torch's, else JAX's if any is JAX's, else NumPy's."""
    found = set(libraries)
    return "torch" if "torch" in found else "jax" if "jax" in found else "numpy"


_pointer_at = ctypes.c_void_p.from_address


def _data_offset() -> int | None:
    """The offset of the data pointer in an ndarray object: behind the object header in every NumPy C ABI so far.

    Reading it there takes a tenth of the time of `__array_interface__`, which builds a dictionary. None if probes
    disagree.
    """
    offset = object.__basicsize__
    probes: list[Any] = [np.zeros(3, np.int8), np.zeros((2, 2))[1:], np.empty(0)]
    found = (_pointer_at(id(probe) + offset).value == probe.__array_interface__["data"][0] for probe in probes)
    return offset if all(found) else None


_DATA_OFFSET = _data_offset()


def numpy_address(array: Any) -> int:
    """The address of an array's first element."""
    if _DATA_OFFSET is not None:
        return _pointer_at(id(array) + _DATA_OFFSET).value or 0
    address: int = array.__array_interface__["data"][0]
    return address


def read(value: Any, name: str, want: str) -> Source:
    """The memory of an argument, row-major and aligned to its elements (copied only if it is not).

    ArgumentDtypeError unless it has the signature's dtype `want`; a Python number becomes a rank-0 tensor of it.
    """
    if isinstance(value, np.ndarray):
        return _read_numpy(value, name, want)
    if is_torch_tensor(value):
        return _read_torch(value, name, want)
    if isinstance(value, bool | int | float | np.generic):
        return _read_number(value, name, want)
    if isinstance(value, DeviceArray):
        raise DeviceUnavailableError(
            f"argument '{name}' is an array on {value.device}, but the program runs on cpu; pass {name}.numpy()"
        )
    if jax_arrays.is_jax_array(value):
        return _read_jax(value, name, want)
    if hasattr(value, "__dlpack__"):
        return _read_dlpack(value, name, want)
    raise ArgumentStructureError(
        f"argument '{name}' must be a tensor ({want}): a NumPy array, a torch tensor or a DLPack object, "
        f"not a {type(value).__name__}"
    )


def is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _read_numpy(value: Any, name: str, want: str) -> Source:
    dtype = DTYPE_NAMES.get(value.dtype)
    if dtype != want:
        raise wrong_dtype(name, dtype or str(value.dtype), want)
    flags = value.flags
    if not (flags.c_contiguous and flags.aligned):
        value = np.array(value, order="C", copy=True, subok=False)
    return Source(numpy_address(value), value.shape, value)


def _read_torch(value: Any, name: str, want: str) -> Source:
    dtype = torch_dtype_name(value.dtype)
    if dtype != want:
        raise wrong_dtype(name, dtype or str(value.dtype), want)
    if not value.is_cpu:
        raise DeviceUnavailableError(
            f"argument '{name}' is a torch tensor on {value.device}, but the program runs on cpu; pass {name}.cpu()"
        )
    torch = sys.modules["torch"]
    if value.layout != torch.strided:
        raise ArgumentStructureError(f"argument '{name}' is a {value.layout} tensor; pass {name}.to_dense()")
    if value.is_neg():
        value = value.resolve_neg()
    address = value.data_ptr()
    if not value.is_contiguous() or address % ITEMSIZE[dtype]:
        value = value.clone(memory_format=torch.contiguous_format)
        address = value.data_ptr()
    return Source(address, value.shape, value, "torch")


def _read_jax(value: Any, name: str, want: str) -> Source:
    jax_arrays.check_readable(value, name)
    dtype = jax_arrays.type_name(value)
    if dtype != want:
        raise wrong_dtype(name, dtype or str(value.dtype), want)
    source = _read_dlpack(value, name, want)  # waits until the array is computed
    source.library = "jax"
    return source


def _read_number(value: Any, name: str, want: str) -> Source:
    kinds = {"i1": (bool, np.bool_), "f": (float, np.floating)}
    allowed = kinds.get(want) or (kinds["f"] if "f" in want else (int, np.integer))
    if not isinstance(value, allowed) or (isinstance(value, bool) and want != "i1"):
        raise wrong_dtype(name, f"Python {type(value).__name__}", want)
    array = np.array(value, NUMPY_DTYPES[want])
    return Source(address_of(array), (), array)


def torch_dtype_name(dtype: Any) -> str | None:
    """Our name of a torch dtype; None for a dtype that programs do not have."""
    if not _torch_dtypes:
        torch = sys.modules["torch"]
        _torch_dtypes.update({getattr(torch, theirs): ours for ours, theirs in TORCH_NAMES.items()})
    return _torch_dtypes.get(dtype)


def wrong_dtype(name: str, got: str, want: str) -> ArgumentDtypeError:
    return ArgumentDtypeError(
        f"argument '{name}' has dtype {got}, the program takes {want} ({NUMPY_DTYPES[want].name}); convert it first"
    )


# --- results ---------------------------------------------------------------------------------------------------------


def new_numpy(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
    """A fresh array and its address. OutOfMemoryError if there is no room."""
    try:
        array = np.empty(shape, NUMPY_DTYPES[dtype])
    except MemoryError as error:
        raise no_memory(math.prod(shape) * ITEMSIZE[dtype], f"a result of shape {shape}") from error
    return array, numpy_address(array)


def new_torch(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
    """A fresh CPU tensor and its address. torch is loaded: an argument was a torch tensor. OutOfMemoryError."""
    torch = sys.modules["torch"]
    try:
        tensor = torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype]), device="cpu")
    except RuntimeError as error:  # raised by torch if its allocator fails
        raise no_memory(math.prod(shape) * ITEMSIZE[dtype], f"a result of shape {shape}") from error
    return tensor, tensor.data_ptr()


def new(library: Library, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], names: Sequence[str]) -> Any:
    """Fresh host memory for results, as (arrays, addresses); arrays of JAX are made of it after the call."""
    if library == "numpy":
        made = [new_numpy(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    elif library == "torch":
        made = [new_torch(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    else:
        made = [jax_arrays.new(*each) for each in zip(shapes, dtypes, names, strict=True)]
    return [array for array, _ in made], [address for _, address in made]


def target(value: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """The address of one `out=` array; errors unless it is a writable, row-major array of this shape and dtype."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        got: str | None = DTYPE_NAMES.get(value.dtype)
        fits = flags.c_contiguous and flags.aligned and flags.writeable
        address = numpy_address(value)
    elif is_torch_tensor(value):
        got = torch_dtype_name(value.dtype)
        fits = value.is_cpu and value.is_contiguous() and not value.is_neg()
        address = value.data_ptr() if fits else 0
    else:
        why = ": arrays of JAX are never written to" if jax_arrays.is_jax_array(value) else ""
        raise ArgumentStructureError(
            f"out '{name}' must be a NumPy array or a torch tensor, not a {type(value).__name__}{why}"
        )
    if got != dtype:
        raise wrong_out(name, f"dtype {value.dtype}", f"{dtype} ({NUMPY_DTYPES[dtype].name})")
    if value.shape != shape:
        raise ArgumentShapeError(f"out '{name}' has shape {tuple(value.shape)}, this call's result has {shape}")
    if not fits:
        raise ArgumentStructureError(f"out '{name}' must be a writable, contiguous array on the CPU")
    return address


def wrong_out(name: str, got: str, want: str) -> ArgumentDtypeError:
    return ArgumentDtypeError(f"out '{name}' has {got}, the result is {want}")


# --- DLPack ----------------------------------------------------------------------------------------------------------


def _read_dlpack(value: Any, name: str, want: str) -> Source:
    """Reads through the capsule without consuming it: its producer frees it when the call is over."""
    device = value.__dlpack_device__()
    if int(device[0]) not in (dlpack.KDL_CPU, dlpack.KDL_CUDA_HOST):
        raise DeviceUnavailableError(
            f"argument '{name}' is a DLPack object on device {tuple(map(int, device))}, but the program runs on cpu"
        )
    capsule = value.__dlpack__()
    tensor = dlpack.tensor_of(capsule)
    dtype = dlpack_dtype(tensor, name, want)
    shape, strides = dlpack.shape_and_strides(tensor)
    data = (tensor.data or 0) + tensor.byte_offset
    if not dlpack.is_row_major(shape, strides):
        copy = _copy_strided(data, shape, strides, dtype)
    elif data % ITEMSIZE[dtype]:
        copy = _copy_strided(data, shape, None, dtype)
    else:
        return Source(data, shape, capsule)
    return Source(address_of(copy), shape, copy)


def dlpack_dtype(tensor: dlpack.DLTensor, name: str, want: str) -> str:
    """Our name of a DLPack tensor's dtype. ArgumentDtypeError unless it is `want`."""
    dtype = dlpack.DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype != want:
        unknown = f"DLPack({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)"
        raise wrong_dtype(name, dtype or unknown, want)
    return dtype


def _copy_strided(address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> Any:
    """A row-major copy of foreign memory (strides in elements; none means row-major)."""
    itemsize = ITEMSIZE[dtype]
    if strides is None:
        strides = tuple(int(s) // itemsize for s in np.empty(shape, NUMPY_DTYPES[dtype]).strides)
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    if 0 in shape:
        return np.empty(shape, NUMPY_DTYPES[dtype])
    raw: Any = (ctypes.c_uint8 * ((high - low + 1) * itemsize)).from_address(address + low * itemsize)
    view: Any = np.ndarray(
        shape, NUMPY_DTYPES[dtype], raw, offset=-low * itemsize, strides=tuple(s * itemsize for s in strides)
    )
    return np.array(view, order="C", copy=True)
