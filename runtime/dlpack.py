"""DLPack without a library: the structures of dlpack.h, capsules read but not consumed, and exported capsules."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.runtime.memory import align_up, no_memory

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


# --- memory that belongs to its consumer -----------------------------------------------------------------------------

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.free.restype = None
_libc.free.argtypes = (ctypes.c_void_p,)
_free = _Deleter(ctypes.cast(_libc.free, ctypes.c_void_p).value or 0)

ALIGNMENT = 64
"""What XLA asks of memory that it takes without a copy."""


def _free_unread(capsule: int) -> None:
    if _is_valid(capsule, _NAME):
        _libc.free(_pointer_of(capsule, _NAME))


_unread = _Destructor(_free_unread)


class HostTensor:
    """A row-major tensor on the CPU for a consumer of DLPack: header, extents and elements in one block of `malloc`.

    The header is at the start of the block, so DLPack's deleter is `free` itself: the consumer needs no Python to drop
    the tensor.  `__dlpack__` gives the block away and works once.  OutOfMemoryError if there is no room.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        code, bits = _CODES[dtype]
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        extents = ctypes.sizeof(_Managed)
        data = align_up(extents + 8 * len(shape), ALIGNMENT)
        self._block: int | None = _libc.aligned_alloc(ALIGNMENT, align_up(data + nbytes, ALIGNMENT))
        if self._block is None:
            raise no_memory(nbytes, f"a result of shape {shape}")
        managed = _Managed.from_address(self._block)
        ctypes.memset(self._block, 0, data)
        managed.tensor.data = self.address = self._block + data
        managed.tensor.device_type = KDL_CPU
        managed.tensor.ndim = len(shape)
        managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = code, bits, 1
        ctypes.memmove(self._block + extents, (ctypes.c_int64 * len(shape))(*shape), 8 * len(shape))
        managed.tensor.shape = ctypes.cast(self._block + extents, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = _free

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CPU, 0

    def __dlpack__(self, **_options: Any) -> Any:
        """The capsule. BufferError for the second one."""
        if self._block is None:
            raise BufferError("this tensor was given away already")
        block, self._block = self._block, None
        return _new_capsule(block, _NAME, _unread)

    def __del__(self) -> None:
        if getattr(self, "_block", None) is not None:
            _libc.free(self._block)
