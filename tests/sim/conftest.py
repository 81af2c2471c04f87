"""Small CUDA texts on the simulated GPU's engine, without the compiler above it.

    cuda = compile_cuda(text)                                   kernels named qk_…; one translation unit
    (y,) = cuda.run("scale", x=("r", x), y=("w", y), n=5, grid=2, block=64)

An operand is (access, content) or (access, content, options): `content` of a "w" operand gives shape and dtype only,
its memory begins uninitialised. Options: `initialised`, `declared` (bytes that the launch declares), `device`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import SimulationError
from qcompiler.runtime.sim.engine import (
    LaunchOptions,
    LaunchReport,
    LaunchRequest,
    Range,
    SimEngine,
    compile_sim,
    engine,
)


def view(address: int, nbytes: int) -> np.ndarray:
    """Bytes of device memory."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def translation_unit(text: str, arch: int = 800) -> str:
    """The kernels of `text` behind the shim and device.cuh, with the entry that the engine calls for each."""
    shim = resources.files("qcompiler.kernels.sim").joinpath("shim.h").read_text(encoding="utf-8")
    device = resources.files("qcompiler.kernels.cuda").joinpath("device.cuh").read_text(encoding="utf-8")
    calls = []
    for name, parameters in re.findall(r"\bqk_(\w+)\(([^)]*)\) *\{", text):
        kinds = [re.sub(r"\s*\b\w+$", "", each.strip()) for each in parameters.split(",") if each.strip()]
        arguments = ", ".join(f"*({kind} const*)args[{i}]" for i, kind in enumerate(kinds))
        calls.append(f'extern "C" void qs_call_{name}(void* const* args) {{ qk_{name}({arguments}); }}')
    return "\n".join(["#define QC_SIM 1", f"#define __CUDA_ARCH__ {arch}", shim, device, text, *calls])


class Cuda:
    """Kernels of one text. `report` is the last launch's."""

    def __init__(self, text: str, checked: bool, arch: int) -> None:
        self.engine: SimEngine = engine()
        self.library = self.engine.load(compile_sim(translation_unit(text, arch), checked=checked, name="planted"))
        self.report: LaunchReport | None = None

    def run(
        self,
        kernel: str,
        *,
        grid: int | Sequence[int] = 1,
        block: int | Sequence[int] = 32,
        shared: int = 0,
        seed: int = 0,
        options: LaunchOptions | None = None,
        **parameters: Any,
    ) -> list[np.ndarray]:
        """What the written operands hold afterwards, in order."""
        placed: list[tuple[str, np.ndarray, int]] = []
        arguments: list[int] = []
        ranges: list[Range] = []
        try:
            for name, value in parameters.items():
                if isinstance(value, int):
                    arguments.append(value)
                    continue
                access, content, *rest = value
                more = rest[0] if rest else {}
                data = np.ascontiguousarray(content)
                address = self.engine.allocate(more.get("device", 0), data.nbytes, name)
                placed.append((access, data, address))
                arguments.append(address)
                if more.get("initialised", access != "w"):
                    view(address, data.nbytes)[:] = data.view(np.uint8).ravel()
                    self.engine.mark_initialised(address, data.nbytes)
                ranges.append(Range(address, address + more.get("declared", data.nbytes), access, name))
            self.report = self.engine.launch(
                LaunchRequest(
                    device=0, function=self.library.function(kernel), name=f"qk_{kernel}", grid=triple(grid),
                    block=triple(block), args=arguments, ranges=ranges, shared_bytes=shared, seed=seed,
                    options=options or LaunchOptions(),
                )
            )  # fmt: skip
            return [
                view(address, data.nbytes).copy().view(data.dtype).reshape(data.shape)
                for access, data, address in placed
                if "w" in access
            ]
        finally:
            for _, _, address in placed:
                self.engine.free(address)

    def finds(self, finding: str, kernel: str, **more: Any) -> str:
        """The report of the finding that the launch must end with: each time, and a sound kernel is right after it."""
        for _ in range(2):
            with pytest.raises(SimulationError) as caught:
                self.run(kernel, **more)
            assert caught.value.finding == finding, caught.value
            _probe()
        return str(caught.value)


_PROBE = """
extern "C" __global__ void qk_probe(const float* x, float* y) {
    QC_SHARED(float, tile, 0, 256);
    const int t = threadIdx.x;
    tile[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    y[blockIdx.x * 256 + t] = tile[255 - t] + 1;
}
"""


def _probe() -> None:
    """A finding leaves nothing behind in the engine: shared memory, barriers, fibers, shadows."""
    x = np.arange(1024, dtype=np.float32)
    (y,) = Cuda(_PROBE, True, 800).run("probe", grid=4, block=256, shared=1024, x=("r", x), y=("w", x))
    np.testing.assert_array_equal(y, x.reshape(4, 256)[:, ::-1].ravel() + 1)


def triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*((value,) if isinstance(value, int) else value), 1, 1)[:3]
    return x, y, z


@pytest.fixture
def compile_cuda() -> Callable[..., Cuda]:
    def compile_text(text: str, *, checked: bool = True, arch: int = 800) -> Cuda:
        return Cuda(text, checked, arch)

    return compile_text


@pytest.fixture
def twins(compile_cuda: Callable[..., Cuda]) -> Callable[..., Cuda]:
    """A kernel `qk_bad` and its correct twin `qk_good`: `@@` in the text stands for what the one has wrong."""

    def compile_twins(text: str, *, bad: str, good: str, helpers: str = "") -> Cuda:
        head = 'extern "C" __global__ void '
        return compile_cuda(
            helpers + head + text.replace("KERNEL", "qk_bad").replace("@@", bad)
            + "\n" + head + text.replace("KERNEL", "qk_good").replace("@@", good)
        )  # fmt: skip

    return compile_twins
