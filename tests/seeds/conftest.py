"""What the seed tests share: a device with three small kernels, driven by hand as the systems of the stories did.

scale   w = codes * table[0]        a stand-in for dequantising: reads a quantised weight, writes a float one
use     y = x * w                   a stand-in for the product that reads it
look    out = table[codes]          dequantising with a code table
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import DeviceSlot, Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend, Memory, Stream

N = 64
Floats = npt.NDArray[np.float32]
DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


def _operand(name: str, access: Any, dtype: Any = "f32", shape: tuple[int, ...] = (N,)) -> Operand:
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=(1,) * len(shape))


def _product(name: str, *operands: Operand, second: int) -> KernelSpec:
    one, same = AffineAccess(offset=0, coefficients=(1,)), AffineAccess(offset=0, coefficients=(second,))
    body = ScalarProgram(
        inputs=tuple((operand.name, "f32") for operand in operands),
        ops=(ScalarOp(result="r", op="arith.mulf", dtype="f32", args=(operands[0].name, operands[1].name)),),
        yields=("r",),
    )
    loop = LoopKernel(extents=(N,), iterators=("parallel",), accesses=(one, same, one), body=body)
    return KernelSpec(name=name, symbols=(), operands=operands, body=loop)


KERNELS = (
    _product("scale", _operand("codes", "r"), _operand("table", "r", shape=(1,)), _operand("w", "w"), second=0),
    _product("use", _operand("x", "r"), _operand("w", "r"), _operand("y", "w"), second=1),
    KernelSpec(
        name="look",
        symbols=(),
        operands=(
            _operand("codes", "r", "i64"),
            _operand("table", "r", shape=(16, 1)),
            _operand("out", "w", shape=(N, 1)),
        ),
        body=EmbeddingKernel(count=N, rows=16, cols=1),
    ),
)
PLAN = Plan(
    devices=(DeviceSlot(name="gpu", kind="cuda"),), streams=(), events=(), arenas=(), buffers=(), kernels=KERNELS,
    entries=(),
)  # fmt: skip


class Rig:
    """A backend and short words for what tests do with it."""

    def __init__(self, device: str) -> None:
        self.backend: Backend = registry.backend(device, registry.architecture(device))
        self.kernels = self.backend.load(PLAN, self.backend.build(PLAN))

    def put(self, values: npt.ArrayLike, dtype: Any = np.float32, label: str = "") -> Memory:
        host = np.ascontiguousarray(values, dtype)
        memory, stream = self.backend.allocate(host.nbytes, label=label), self.backend.stream("put")
        self.backend.upload(stream, memory.address, host.ctypes.data, host.nbytes)
        self.backend.synchronize(stream)
        return memory

    def empty(self, label: str = "") -> Memory:
        return self.backend.allocate(4 * N, label=label)

    def run(self, stream: Stream, name: str, *memory: Memory) -> None:
        self.backend.launch(stream, self.kernels[name], [each.address for each in memory], [])

    def read(self, memory: Memory) -> Floats:
        host, stream = np.zeros(memory.nbytes // 4, np.float32), self.backend.stream("read")
        self.backend.synchronize()
        self.backend.download(stream, host.ctypes.data, memory.address, host.nbytes)
        self.backend.synchronize(stream)
        return host


@pytest.fixture
def rig() -> Callable[[str], Rig]:
    return Rig


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
