"""DLPack without a library: the structures of dlpack.h, capsules read but not consumed, and exported capsules."""

from __future__ import annotations

import ctypes
from typing import Any

KDL_CPU = 1
KDL_CUDA = 2
KDL_CUDA_HOST = 3

DTYPES = {
    (0, 8): "i8", (0, 16): "i16", (0, 32): "i32", (0, 64): "i64", (1, 8): "ui8", (2, 16): "f16", (2, 32): "f32",
    (2, 64): "f64", (4, 16): "bf16", (6, 8): "i1",
}  # fmt: skip
"""(code, bits) of a DLDataType with one lane -> our name."""

_CODES = {name: key for key, name in DTYPES.items()}


class DLTensor(ctypes.Structure):
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


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_NAME = b"dltensor"
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def tensor_of(capsule: Any) -> DLTensor:
    """The tensor inside a fresh capsule. The producer still owns it: it is freed with the capsule."""
    return DLTensor.from_address(_pointer_of(id(capsule), _NAME) or 0)


def shape_and_strides(tensor: DLTensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape, and strides in elements (None means row-major)."""
    shape = tuple(tensor.shape[: tensor.ndim])
    return shape, tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether elements are contiguous in row-major order (dims of extent 1 may have any stride)."""
    if strides is None or 0 in shape:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


_handed_out: dict[int, tuple[Any, ...]] = {}
"""Objects that keep each exported tensor alive, by the address of its DLManagedTensor."""


def _forget(address: int) -> None:
    _handed_out.pop(address, None)


def _drop(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # else a consumer took it, renamed it, and calls the deleter itself
        _handed_out.pop(_pointer_of(capsule, _NAME) or 0, None)


_deleter = _Deleter(_forget)
_destructor = _Destructor(_drop)


def capsule_of(address: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int], owner: Any) -> Any:
    """A "dltensor" capsule of row-major device memory; `owner` lives until the consumer is done with it."""
    code, bits = _CODES[dtype]
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device_type, managed.tensor.device_id = device
    managed.tensor.ndim = len(shape)
    managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = code, bits, 1
    managed.tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _deleter
    key = ctypes.addressof(managed)
    _handed_out[key] = (managed, extents, owner)
    return _new_capsule(key, _NAME, _destructor)
