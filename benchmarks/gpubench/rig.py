"""One device for the benchmark: memory, launches, captures, and times on a real GPU.

    rig = rig_of("cuda:0")           # or "sim:0": the same calls, checked accesses, no times
    graph = rig.capture(lambda: [call(i) for i in range(calls)])
    rig.time(graph, rounds)          # seconds for each replay, None on the simulated GPU

Everything uses the runtime's backends; times come from the driver's events, so neither torch nor any other package is
needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubench.occupancy import blocks_per_multiprocessor
from gpubench.weights import BF16
from qcompiler.errors import DeviceError
from qcompiler.kernels.cuda import emit
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Graph, Kernel, Memory

Array = npt.NDArray[Any]

ATTRIBUTES = {
    "multiprocessors": "MULTIPROCESSOR_COUNT", "l2_bytes": "L2_CACHE_SIZE", "clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE", "bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
    "shared_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_per_multiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "registers_per_multiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
}  # fmt: skip

SIM_CACHE = 1 << 10


def plan_of(spec: KernelSpec) -> Plan:
    """A plan with only one kernel: a module of its own, so that a kernel that fails to build fails alone."""
    return Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=(spec,), entries=())


class Rig:
    """A device without times: the common part of the simulated GPU and a real one."""

    timed = False
    multiprocessors = 132

    def __init__(self, device: str) -> None:
        self.device = device
        self.kind = registry.parse(device)[0]
        self.isa = registry.architecture(device)
        self.backend = registry.backend(device, self.isa)
        self.stream = self.backend.stream("bench")
        self.cache = SIM_CACHE
        self._kernels: dict[str, tuple[Kernel, dict[str, Any]]] = {}

    # --- memory ---

    def allocate(self, nbytes: int) -> Memory:
        return self.backend.allocate(nbytes, label="bench")

    def upload(self, array: Array) -> Memory:
        data = np.ascontiguousarray(array)
        memory = self.allocate(data.nbytes)
        self.write(memory, data)
        return memory

    def upload_floats(self, count: int) -> Memory:
        return self.upload(np.random.default_rng(0).standard_normal(count, np.float32))

    def write(self, memory: Memory, array: Array) -> None:
        data = np.ascontiguousarray(array)
        self.backend.upload(self.stream, memory.address, data.ctypes.data, data.nbytes)
        self.backend.synchronize(self.stream)

    def poison(self, memory: Memory) -> None:
        """Sets every byte to 0xff: NaN as a float of any width."""
        self.write(memory, np.full(memory.nbytes, 0xFF, np.uint8))

    def read(self, memory: Memory, shape: Sequence[int], dtype: Any = BF16) -> Array:
        result = np.empty(tuple(shape), dtype)
        self.backend.download(self.stream, result.ctypes.data, memory.address, result.nbytes)
        self.backend.synchronize(self.stream)
        return result

    # --- kernels ---

    def kernel(self, spec: KernelSpec) -> Kernel:
        return self._load(spec)[0]

    def facts(self, spec: KernelSpec, symbols: Sequence[int]) -> dict[str, Any]:
        """Engine, launch, resources, the number of blocks that a multiprocessor holds, and the number of waves."""
        emitted, resources = emit.emit_kernel(spec, self.isa), self._load(spec)[1]
        geometry = emitted.geometry
        grid = geometry.at(dict(zip(spec.symbols, symbols, strict=True)))
        facts = {
            "name": spec.name, "engine": emitted.engine, "grid": grid, "block": geometry.block,
            "shared": geometry.shared + resources.get("shared_static", 0), "note": "; ".join(emitted.notes),
            **resources,
        }  # fmt: skip
        if "registers" in resources:
            held = blocks_per_multiprocessor(self.isa, geometry.threads, resources["registers"], facts["shared"])
            facts["blocks_per_sm"] = held
            facts["waves"] = round(grid[0] * grid[1] * grid[2] / (held * self.multiprocessors), 2) if held else None
        return facts

    def _load(self, spec: KernelSpec) -> tuple[Kernel, dict[str, Any]]:
        if spec.name not in self._kernels:
            plan = plan_of(spec)
            native = self.backend.build(plan)
            resources = {}
            record = native.path.with_suffix(".json")  # beside a cubin; a library of the simulator has none
            if self.kind == "cuda" and record.exists():
                resources = json.loads(record.read_text())["kernels"].get("qk_0", {})  # the only kernel of its plan
            self._kernels[spec.name] = self.backend.load(plan, native)[spec.name], resources
        return self._kernels[spec.name]

    def launch(self, kernel: Kernel, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        self.backend.launch(self.stream, kernel, addresses, symbols)

    def synchronize(self) -> None:
        self.backend.synchronize(self.stream)

    # --- graphs and times ---

    def capture(self, record: Callable[[], object]) -> Graph:
        """The launches of `record` on the rig's stream as a graph. A capture that fails has ended, too."""
        self.backend.begin_capture(self.stream)
        try:
            record()
        except BaseException:
            try:
                self.backend.end_capture(self.stream).close()
            except DeviceError as broken:
                print(f"the capture of a failed cell ended with: {broken}", file=sys.stderr)
            raise
        return self.backend.end_capture(self.stream)

    def replay(self, graph: Graph) -> None:
        graph.launch(self.stream)
        self.synchronize()

    def time(self, run: Callable[[], object], rounds: int) -> list[float] | None:
        """Seconds of `run` on the stream, one for each round; None on a device without times."""
        del run, rounds
        return None

    def healthy(self) -> str | None:
        """None if the device still works, else its error: after a kernel's fault nothing works in this process."""
        try:
            memory = self.upload(np.arange(64, dtype=np.int32))
            self.read(memory, (64,), np.int32)
        except Exception as error:  # after any error this process is of no use
            return f"{type(error).__name__}: {error}"
        return None

    # --- references ---

    def reference(self, values: Array) -> Any:
        """A weight's values in the form of `product`'s argument."""
        return values

    def product(self, x: Array, values: Any) -> Array:
        """x values^T in float64."""
        result: Array = x.astype(np.float64) @ values.astype(np.float64).T
        return result

    def environment(self) -> dict[str, Any]:
        return {"device": self.device, "arch": self.isa, "kind": self.kind}


class SimRig(Rig):
    """`sim:0`."""


class CudaRig(Rig):
    """`cuda:0`: times by events of the driver. torch computes references on the GPU if it can."""

    timed = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        backend: Any = self.backend
        self.api, self._driver = backend.api, backend.api.driver
        self.attributes = self._attributes(backend.index)
        self.cache = self.attributes["l2_bytes"]
        self.multiprocessors = max(1, self.attributes["multiprocessors"])
        with self.api.current(backend.context):
            self._events = [self.api.check(self._driver.cuEventCreate(0), "creating an event") for _ in range(2)]

    def _attributes(self, index: int) -> dict[str, int]:
        found = {}
        device = self.api.check(self._driver.cuDeviceGet(index), "opening the device")
        for name, word in ATTRIBUTES.items():
            attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{word}")
            found[name] = int(self.api.check(self._driver.cuDeviceGetAttribute(attribute, device), f"reading {name}"))
        return found

    def time(self, run: Callable[[], object], rounds: int) -> list[float] | None:
        backend: Any = self.backend
        begin, end = self._events
        handle = self.stream.driver_handle  # type: ignore[attr-defined]
        seconds = []
        for _ in range(rounds):
            with self.api.current(backend.context):
                self.api.check(self._driver.cuEventRecord(begin, handle), "recording an event")
            run()
            with self.api.current(backend.context):
                self.api.check(self._driver.cuEventRecord(end, handle), "recording an event")
                self.api.check(self._driver.cuEventSynchronize(end), "waiting for an event")
                elapsed = self.api.check(self._driver.cuEventElapsedTime(begin, end), "reading a time")
            seconds.append(float(elapsed) / 1e3)
        return seconds

    def reference(self, values: Array) -> Any:
        torch = torch_with_gpu()
        if torch is None:
            return values
        wide = values if values.dtype != BF16 else values.astype(np.float32)
        kept = torch.from_numpy(wide).cuda()
        return kept.bfloat16() if values.dtype == BF16 else kept

    def product(self, x: Array, values: Any) -> Array:
        if isinstance(values, np.ndarray):
            return super().product(x, values)
        torch = torch_with_gpu()
        assert torch is not None
        left = torch.from_numpy(x.astype(np.float32)).cuda().double()
        result: Array = (left @ values.double().T).cpu().numpy()
        return result

    def environment(self) -> dict[str, Any]:
        backend: Any = self.backend
        number = self.api.check(self._driver.cuDeviceGet(backend.index), "opening the device")
        name = self.api.check(self._driver.cuDeviceGetName(256, number), "asking for the device's name")
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        version = int(self.api.check(self._driver.cuDriverGetVersion(), "asking for the driver's version"))
        driver = f"{version // 1000}.{version % 1000 // 10}"
        return {
            **super().environment(), "gpu": text.split("\0")[0].strip(), "driver_cuda": driver,
            "attributes": self.attributes,
        }  # fmt: skip


def torch_with_gpu() -> Any:
    """torch if it is there and sees a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def rig_of(device: str) -> Rig:
    """The rig of "cuda:0" or "sim:0". DeviceUnavailableError if it does not exist."""
    registry.require(device)
    return CudaRig(device) if registry.parse(device)[0] == "cuda" else SimRig(device)
