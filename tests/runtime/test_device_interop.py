"""Other libraries' device arrays by their protocols, and capsules handed out. No GPU: addresses are only carried."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from qcompiler.errors import ArgumentDtypeError, ArgumentStructureError
from qcompiler.runtime import device_interop, dlpack
from qcompiler.runtime.backends.registry import backend
from qcompiler.runtime.streams import Queue

DTYPES = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "i8": np.int8, "ui8": np.uint8, "i64": np.int64,
    "i1": np.bool_, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip


class Owner:
    """What keeps exported memory alive."""

    def __init__(self, array: Any) -> None:
        self.array = array


def capsule(array: Any, dtype: str, device: tuple[int, int] = (dlpack.KDL_CPU, 0), owner: Any = None) -> Any:
    return dlpack.capsule_of(array.ctypes.data, array.shape, dtype, device, owner or Owner(array))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_a_capsule_is_what_another_library_reads(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(max(int(np.prod(shape)), 1))[: int(np.prod(shape))].reshape(shape).astype(DTYPES[dtype])
    tensor = torch.from_dlpack(capsule(values, dtype))
    assert tuple(tensor.shape) == shape
    assert torch.equal(tensor.double(), torch.from_numpy(values.astype(np.float64)))


def test_a_consumer_keeps_the_owner_until_it_is_done() -> None:
    owner = Owner(np.arange(4, dtype=np.float32))
    gone = weakref.ref(owner)
    tensor = torch.from_dlpack(capsule(owner.array, "f32", owner=owner))
    del owner
    gc.collect()
    assert gone() is not None and tensor.tolist() == [0, 1, 2, 3]
    del tensor
    gc.collect()
    assert gone() is None


def test_a_capsule_that_nobody_takes_lets_its_owner_go() -> None:
    owner = Owner(np.arange(4, dtype=np.float32))
    gone = weakref.ref(owner)
    unused = capsule(owner.array, "f32", owner=owner)
    del owner, unused
    gc.collect()
    assert gone() is None


class Cuda:
    """An object on cuda:1 that speaks DLPack; remembers the stream it was asked to make wait."""

    def __init__(self, array: Any, dtype: str = "f32") -> None:
        self.array, self.dtype = array, dtype
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.KDL_CUDA, 1

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.asked.append(stream)
        return capsule(self.array, self.dtype, self.__dlpack_device__())


class Interface:
    """An object with `__cuda_array_interface__` only."""

    def __init__(self, array: Any, **changes: Any) -> None:
        found = {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 3}
        self.__cuda_array_interface__ = found | changes


@pytest.fixture
def homes() -> dict[str, Queue]:
    cpu = backend("cpu", "x86-64")
    return {"cuda:1": Queue(cpu, cpu.stream("home"))}


def test_a_dlpack_object_of_a_gpu_is_read_in_place_and_waits_for_our_stream(homes: dict[str, Queue]) -> None:
    value = Cuda(np.zeros((2, 3), np.float32))
    argument = device_interop.read(value, "x", "f32", homes, capturing=False)
    assert (argument.address, argument.shape, argument.device) == (value.array.ctypes.data, (2, 3), "cuda:1")
    device_interop.read(value, "x", "f32", homes, capturing=True)
    assert value.asked == [homes["cuda:1"].stream.handle, -1]
    with pytest.raises(ArgumentDtypeError, match="'x' has dtype f32, the program takes f16"):
        device_interop.read(value, "x", "f16", homes, capturing=False)


def test_a_cuda_array_interface_is_read_in_place(homes: dict[str, Queue]) -> None:
    array = np.zeros((2, 3), np.float32)
    argument = device_interop.read(Interface(array), "x", "f32", homes, capturing=False)
    assert (argument.address, argument.shape, argument.device) == (array.ctypes.data, (2, 3), "cuda")
    device_interop.read(Interface(array, strides=(12, 4)), "x", "f32", homes, capturing=False)
    with pytest.raises(ArgumentStructureError, match="'x' is not row-major in the device's memory"):
        device_interop.read(Interface(array, strides=(4, 8)), "x", "f32", homes, capturing=False)
    with pytest.raises(ArgumentDtypeError, match="dtype i32"):
        device_interop.read(Interface(array, typestr="<i4"), "x", "f32", homes, capturing=False)


def test_a_dlpack_object_of_another_kind_of_device_is_refused(homes: dict[str, Queue]) -> None:
    class Metal:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    with pytest.raises(ArgumentStructureError, match=r"device \(8, 0\), which is neither a CPU nor a CUDA device"):
        device_interop.read(Metal(), "x", "f32", homes, capturing=False)
