"""Other libraries' arrays as addresses, without a copy: NumPy, torch CPU tensors, anything that speaks DLPack.

torch is never imported here: a caller who passes a torch tensor has imported it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from qcompiler.errors import ArgumentDtypeError, ArgumentStructureError, DeviceUnavailableError
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.weights import DTYPE_NAMES, NUMPY_DTYPES
from qcompiler.runtime.memory import address_of

TORCH_NAMES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "ui8": "uint8", "i1": "bool",
}  # fmt: skip

_torch_dtypes: dict[Any, str] = {}
"""torch.dtype -> our name; filled when the first torch tensor is met."""


class Source:
    """One argument as memory. `owner` keeps the memory alive; `is_torch` decides what results are."""

    __slots__ = ("address", "is_torch", "owner", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], owner: Any, is_torch: bool) -> None:
        self.address = address
        self.shape = shape
        self.owner = owner
        self.is_torch = is_torch


_pointer_at = ctypes.c_void_p.from_address


def _data_offset() -> int | None:
    """Where an ndarray object keeps its data pointer: right behind the object header in every NumPy C ABI so far.

    Reading it there costs a tenth of `__array_interface__`, which builds a dictionary. None if probes disagree.
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
    """The memory behind an argument, row-major and aligned to its elements (copied only if it is not).

    ArgumentDtypeError unless it has the signature's dtype `want`; a Python number becomes a rank-0 tensor of it.
    """
    if isinstance(value, np.ndarray):
        return _read_numpy(value, name, want)
    if is_torch_tensor(value):
        return _read_torch(value, name, want)
    if isinstance(value, bool | int | float | np.generic):
        return _read_number(value, name, want)
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
    return Source(numpy_address(value), value.shape, value, False)


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
    return Source(address, value.shape, value, True)


def _read_number(value: Any, name: str, want: str) -> Source:
    kinds = {"i1": (bool, np.bool_), "f": (float, np.floating)}
    allowed = kinds.get(want) or (kinds["f"] if "f" in want else (int, np.integer))
    if not isinstance(value, allowed) or (isinstance(value, bool) and want != "i1"):
        raise wrong_dtype(name, f"Python {type(value).__name__}", want)
    array = np.array(value, NUMPY_DTYPES[want])
    return Source(address_of(array), (), array, False)


def torch_dtype_name(dtype: Any) -> str | None:
    """Our name of a torch dtype; None for one that programs do not have."""
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
    """A fresh array and its address."""
    array = np.empty(shape, NUMPY_DTYPES[dtype])
    return array, numpy_address(array)


def new_torch(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
    """A fresh CPU tensor and its address. torch is loaded: an argument was a torch tensor."""
    torch = sys.modules["torch"]
    tensor = torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype]), device="cpu")
    return tensor, tensor.data_ptr()


def target(value: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """The address of one `out=` array; errors if it is not a writable, row-major array of this shape and dtype."""
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
        raise ArgumentStructureError(
            f"out '{name}' must be a NumPy array or a torch tensor, not a {type(value).__name__}"
        )
    if got != dtype:
        raise wrong_out(name, f"dtype {value.dtype}", f"{dtype} ({NUMPY_DTYPES[dtype].name})")
    if value.shape != shape:
        from qcompiler.errors import ArgumentShapeError

        raise ArgumentShapeError(f"out '{name}' has shape {tuple(value.shape)}, this call's result has {shape}")
    if not fits:
        raise ArgumentStructureError(f"out '{name}' must be a writable, contiguous array on the CPU")
    return address


def wrong_out(name: str, got: str, want: str) -> ArgumentDtypeError:
    return ArgumentDtypeError(f"out '{name}' has {got}, the result is {want}")


# --- DLPack ----------------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h (version 0 and 1 alike)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DLPACK_DTYPES = {
    (0, 8): "i8", (0, 16): "i16", (0, 32): "i32", (0, 64): "i64", (1, 8): "ui8", (2, 16): "f16", (2, 32): "f32",
    (2, 64): "f64", (4, 16): "bf16", (6, 8): "i1",
}  # fmt: skip
_KDL_CPU = 1

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _read_dlpack(value: Any, name: str, want: str) -> Source:
    """Reads through the capsule without consuming it: its producer frees it when the call is over."""
    device = value.__dlpack_device__()
    if int(device[0]) != _KDL_CPU:
        raise DeviceUnavailableError(
            f"argument '{name}' is a DLPack object on device {tuple(map(int, device))}, but the program runs on cpu"
        )
    capsule = value.__dlpack__()
    address = _capsule_pointer(capsule, b"dltensor")
    tensor = _DLTensor.from_address(address or 0)
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype != want:
        unknown = f"DLPack({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)"
        raise wrong_dtype(name, dtype or unknown, want)
    shape = tuple(tensor.shape[: tensor.ndim])
    data = (tensor.data or 0) + tensor.byte_offset
    if not tensor.strides or _row_major(shape, tensor.strides[: tensor.ndim]):
        if data % ITEMSIZE[dtype] == 0:
            return Source(data, shape, capsule, False)
        strides = None
    else:
        strides = tuple(tensor.strides[: tensor.ndim])
    copy = _copy_strided(data, shape, strides, dtype)
    return Source(address_of(copy), shape, copy, False)


def _row_major(shape: tuple[int, ...], strides: Sequence[int]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


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
