"""Where the checks of conformance.py run: the simulated GPU, or a real one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qcompiler.kernels.cuda.emit import header
from qcompiler.kernels.cuda.signature import arch_number


class SimDevice:
    """`sim:0`, standing in for `arch`, with every access checked."""

    def __init__(self, checks: Iterable[Any], arch: str = "sm_80") -> None:
        from qcompiler.runtime.sim.engine import compile_sim, engine

        kernels = list(checks)
        parts = [
            f"#define QC_SIM 1\n#define __CUDA_ARCH__ {10 * arch_number(arch)}",
            header("shim.h", "qcompiler.kernels.sim"),
            header("device.cuh"),
            *(check.text for check in kernels),
            *(check.call for check in kernels),
        ]
        self.engine = engine()
        self.engine.reserve(0)
        self.library = self.engine.load(compile_sim("\n".join(parts), checked=True, name="conformance"))

    def run(self, check: Any, case: Any, seed: int = 0) -> list[Any]:
        """The outputs of one launch."""
        from qcompiler.runtime.sim.engine import LaunchRequest, Range

        arrays = [*case.inputs, *case.outputs]
        addresses = [self.engine.allocate(0, array.nbytes, f"{check.name}[{i}]") for i, array in enumerate(arrays)]
        ranges = []
        for i, (address, array) in enumerate(zip(addresses, arrays, strict=True)):
            host_bytes(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
            self.engine.mark_initialised(address, array.nbytes)
            access: Any = "r" if i < len(case.inputs) else "rw"
            ranges.append(Range(address, address + array.nbytes, access, f"{check.name}[{i}]"))
        try:
            self.engine.launch(
                LaunchRequest(
                    device=0,
                    function=self.library.function(check.name),
                    name=check.name,
                    grid=(case.grid, 1, 1),
                    block=(case.block, 1, 1),
                    shared_bytes=case.shared,
                    args=addresses,
                    ranges=ranges,
                    seed=seed,
                )
            )
            results = addresses[len(case.inputs) :]
            return [like(out, host_bytes(at, out.nbytes)) for at, out in zip(results, case.outputs, strict=True)]
        finally:
            for address in addresses:
                self.engine.free(address)


def compile_checks(checks: Iterable[Any], arch: str) -> Any:
    """The cubin of all checks."""
    from qcompiler.runtime import nvrtc

    source = header("device.cuh") + "".join(check.text for check in checks)
    return nvrtc.compile_cubin(source, arch, name="conformance")


class GpuDevice:
    """`cuda:N`."""

    def __init__(self, checks: Iterable[Any], index: int = 0) -> None:
        from qcompiler.runtime.backends.cuda import CudaBackend
        from qcompiler.runtime.backends.cuda_driver import api

        self.backend = CudaBackend(index)
        self.api = api()
        self.cubin = compile_checks(checks, self.backend.isa)
        image = ctypes.create_string_buffer(self.cubin.read())
        with self.api.current(self.backend.context):
            loaded = self.api.driver.cuModuleLoadData(ctypes.addressof(image))
            self.module = self.api.check(loaded, "loading the checks")
        self.stream = self.backend.stream("conformance")

    def run(self, check: Any, case: Any, seed: int = 0) -> list[Any]:
        """The outputs of one launch."""
        del seed
        driver, backend = self.api.driver, self.backend
        arrays = [np.ascontiguousarray(array) for array in (*case.inputs, *case.outputs)]
        memories = [backend.allocate(array.nbytes, label=check.name) for array in arrays]
        for memory, array in zip(memories, arrays, strict=True):
            backend.upload(self.stream, memory.address, array.ctypes.data, array.nbytes)
        values = (ctypes.c_void_p * len(arrays))(*(memory.address for memory in memories))
        pointers = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(values) + 8 * i for i in range(len(arrays))))
        with self.api.current(backend.context):
            found = driver.cuModuleGetFunction(self.module, f"qk_{check.name}".encode())
            function = self.api.check(found, f"finding {check.name}")
            where = (case.grid, 1, 1, case.block, 1, 1, case.shared, self.stream.driver_handle)
            done = driver.cuLaunchKernel(function, *where, ctypes.addressof(pointers), 0)
            self.api.check(done, f"launching {check.name}")
        results = [np.zeros_like(out) for out in case.outputs]
        for memory, out in zip(memories[len(case.inputs) :], results, strict=True):
            backend.download(self.stream, out.ctypes.data, memory.address, out.nbytes)
        backend.synchronize(self.stream)
        for memory in memories:
            memory.close()
        return results


def host_bytes(address: int, nbytes: int) -> Any:
    """Simulated device memory as an array: it is ordinary host memory."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def like(array: Any, data: Any) -> Any:
    return data.copy().view(array.dtype).reshape(array.shape)


def judge_all(device: Any, checks: Sequence[Any]) -> dict[str, str | None]:
    """What is wrong with each check, or None."""
    verdicts = {}
    for check in checks:
        case = check.case()
        verdicts[check.name] = case.judge(device.run(check, case))
    return verdicts
