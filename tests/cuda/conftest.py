"""Runs emitted CUDA kernels on a device and compiles them with NVRTC.

    sim_run(spec, [x, w, out], {"m": 3})          one kernel; returns the arrays it wrote
    sim_module([a, b], "sm_80").run("a", [...])   several kernels of one compilation
    nvrtc([a, b], "sm_90a")["a"].registers        what ptxas says about each kernel

The device is the simulated GPU, and `cuda:0` as well where there is one: a test that uses `sim_run` or `sim_module`
runs once on each.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.kernels.cuda import emit, signature
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime import sass
from qcompiler.runtime.nvrtc import Resources, compile_cubin

# --- operands ---------------------------------------------------------------------------------------------------------


def span(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte behind its last one, whatever its strides."""
    low = high = array.ctypes.data
    if array.size == 0:
        return low, low
    for extent, stride in zip(array.shape, array.strides, strict=True):
        low, high = (low, high + (extent - 1) * stride) if stride >= 0 else (low + (extent - 1) * stride, high)
    return low, high + array.itemsize


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array's span, holes included, as a view of its memory."""
    low, high = span(array)
    return memory(low, high - low)


def memory(address: int, nbytes: int) -> np.ndarray:
    """Host bytes at an address, as a view."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def like(array: np.ndarray, content: np.ndarray) -> np.ndarray:
    """An array of the same shape and strides over other bytes of the same span."""
    low, _ = span(array)
    held = np.ascontiguousarray(content)
    return np.ndarray(array.shape, array.dtype, held, array.ctypes.data - low, array.strides)


@dataclass
class Placed:
    """One operand in device memory: `address` of its first byte, the operand's `pointer`, and how it is used."""

    array: np.ndarray
    address: int
    nbytes: int
    pointer: int
    access: str
    label: str


def operand_access(spec: KernelSpec, arrays: Sequence[np.ndarray]) -> dict[int, str]:
    """Access by identity of the array: one array given for several operands is one piece of memory (in place)."""
    access: dict[int, str] = {}
    for operand, array in zip(spec.operands, arrays, strict=True):
        old = access.get(id(array), operand.access)
        access[id(array)] = operand.access if old == operand.access else "rw"
    return access


# --- devices ----------------------------------------------------------------------------------------------------------


class SimModule:
    """Kernels of one compilation on a simulated GPU."""

    def __init__(self, specs: Sequence[KernelSpec], arch: str, checked: bool) -> None:
        from qcompiler.runtime.sim.engine import compile_sim, engine

        self.specs = {spec.name: spec for spec in specs}
        self.arch = arch
        self.source = emit.emit_sim_module(specs, arch)
        self.engine = engine()
        self.library = self.engine.load(compile_sim(self.source, checked=checked, name="test"))
        self.reports: list[Any] = []

    def run(
        self,
        name: str,
        operands: Sequence[np.ndarray],
        symbols: Mapping[str, int] | Sequence[int] = (),
        *,
        seed: int = 0,
        device: int = 0,
        partial: bool = False,
    ) -> list[np.ndarray]:
        """The arrays that the kernel wrote, in the order of its operands; the given ones are left as they are.

        Every operand lies in an allocation of its own, as large as the array's span. What is "w" begins uninitialised
        and must be written completely unless the array has holes or the test says that it is `partial`.
        """
        from qcompiler.runtime.sim.engine import LaunchRequest, Range

        spec = self.specs[name]
        values = named(spec, symbols)
        self.engine.reserve(device)
        placed = self._place(spec, operands, device)
        grid = emit.geometry(spec, self.arch)
        blocks = grid.at(values)
        try:
            if 0 not in blocks:
                each = {p.address: p for p in placed}
                ranges = [Range(p.address, p.address + p.nbytes, p.access, p.label) for p in each.values() if p.nbytes]
                request = LaunchRequest(
                    device=device,
                    function=self.library.function(name),
                    name=name,
                    grid=blocks,
                    block=grid.block,
                    shared_bytes=grid.shared,
                    args=[*(p.pointer for p in placed), *values.values()],
                    ranges=ranges,
                    seed=seed,
                )
                report = self.engine.launch(request)
                self.reports.append(report)
                whole = not partial and all(p.nbytes == p.array.nbytes for p in placed if p.access == "w")
                assert not (whole and report.unwritten), f"{name} left {report.unwritten} bytes of its output unwritten"
            return self._outputs(spec, placed)
        finally:
            for address in {p.address for p in placed}:
                self.engine.free(address)

    def _place(self, spec: KernelSpec, arrays: Sequence[np.ndarray], device: int) -> list[Placed]:
        access = operand_access(spec, arrays)
        done: dict[int, Placed] = {}
        for operand, array in zip(spec.operands, arrays, strict=True):
            if id(array) in done:
                continue
            low, high = span(array)
            address = self.engine.allocate(device, max(high - low, 1), f"{spec.name}.{operand.name}")
            pointer = address + array.ctypes.data - low
            mine = Placed(array, address, high - low, pointer, access[id(array)], operand.name)
            if mine.access != "w" and mine.nbytes:
                memory(address, mine.nbytes)[:] = raw(array)
                self.engine.mark_initialised(address, mine.nbytes)
            done[id(array)] = mine
        return [done[id(array)] for array in arrays]

    def _outputs(self, spec: KernelSpec, placed: Sequence[Placed]) -> list[np.ndarray]:
        results = []
        for operand, mine in zip(spec.operands, placed, strict=True):
            content = memory(mine.address, mine.nbytes).copy()
            if operand.access != "r":
                results.append(like(mine.array, content))
            elif mine.access == "r":
                assert (content == raw(mine.array)).all(), f"{spec.name} changed its input {operand.name}"
        return results


class GpuModule:
    """Kernels of one compilation on a real GPU. What a simulated one watches is compared afterwards: the red zones
    around each operand, the inputs, and outputs over two different fillings."""

    ZONE = 256

    def __init__(self, specs: Sequence[KernelSpec], backend: Any) -> None:
        from qcompiler.plan.plan import Plan

        self.specs = {spec.name: spec for spec in specs}
        self.backend = backend
        self.source = emit.emit_module(specs, backend.isa)
        self.stream = backend.stream("test")
        plan = Plan(
            devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=tuple(self.specs.values()), entries=()
        )
        self.kernels = backend.load(plan, backend.build(plan))

    def run(
        self,
        name: str,
        operands: Sequence[np.ndarray],
        symbols: Mapping[str, int] | Sequence[int] = (),
        *,
        seed: int = 0,
        device: int = 0,
        partial: bool = False,
    ) -> list[np.ndarray]:
        """As `SimModule.run`; the order of threads (`seed`) is the hardware's."""
        del seed, device
        spec = self.specs[name]
        access = operand_access(spec, operands)
        holes = any(span(a)[1] - span(a)[0] != a.nbytes for a in operands if access[id(a)] == "w")
        first = self._once(spec, operands, named(spec, symbols), 0)
        if not (partial or holes or 0 in emit.geometry(spec, self.backend.isa).at(named(spec, symbols))):
            second = self._once(spec, operands, named(spec, symbols), 0xFF)
            for a, b in zip(first, second, strict=True):
                assert a.tobytes() == b.tobytes(), f"{name} left a part of its output unwritten"
        return first

    def _once(
        self, spec: KernelSpec, arrays: Sequence[np.ndarray], symbols: Mapping[str, int], filling: int
    ) -> list[np.ndarray]:
        backend, access = self.backend, operand_access(spec, arrays)
        before: dict[int, np.ndarray] = {}
        memories: dict[int, Any] = {}
        for operand, array in zip(spec.operands, arrays, strict=True):
            if id(array) not in memories:
                size = span(array)[1] - span(array)[0]
                content = np.full(size + 2 * self.ZONE, 0xA5, np.uint8)
                content[self.ZONE : self.ZONE + size] = filling if access[id(array)] == "w" else raw(array)
                memories[id(array)] = backend.allocate(content.nbytes, label=operand.name)
                backend.upload(self.stream, memories[id(array)].address, content.ctypes.data, content.nbytes)
                before[id(array)] = content
        pointers = [memories[id(a)].address + self.ZONE + a.ctypes.data - span(a)[0] for a in arrays]
        backend.launch(self.stream, self.kernels[spec.name], pointers, list(symbols.values()))
        after = {key: np.zeros_like(content) for key, content in before.items()}
        for key, content in after.items():
            backend.download(self.stream, content.ctypes.data, memories[key].address, content.nbytes)
        backend.synchronize(self.stream)
        results = []
        for operand, array in zip(spec.operands, arrays, strict=True):
            old, new = before[id(array)], after[id(array)]
            zones = np.r_[0 : self.ZONE, old.size - self.ZONE : old.size]
            assert (old[zones] == new[zones]).all(), f"{spec.name} wrote outside its operand {operand.name}"
            if operand.access != "r":
                results.append(like(array, new[self.ZONE : -self.ZONE]))
            elif access[id(array)] == "r":
                assert (old == new).all(), f"{spec.name} changed its input {operand.name}"
        for memory in memories.values():
            memory.close()
        return results


def named(spec: KernelSpec, symbols: Mapping[str, int] | Sequence[int]) -> dict[str, int]:
    """Values of a spec's symbols, in their order."""
    if isinstance(symbols, Mapping):
        return {name: symbols[name] for name in spec.symbols}
    return dict(zip(spec.symbols, symbols, strict=True))


_MODULES: dict[str, Any] = {}


@functools.cache
def gpu_backend() -> Any:
    """`cuda:0`, or None where there is no GPU."""
    from qcompiler.runtime.backends import registry

    if not registry.is_available("cuda:0"):
        return None
    return registry.backend("cuda:0", registry.architecture("cuda:0"))


def build_module(specs: Sequence[KernelSpec], arch: str = "sm_80", *, checked: bool = True) -> SimModule:
    """The module of `specs` for the simulated GPU, compiled once per session."""
    key = _key("sim", arch, str(checked), specs)
    if key not in _MODULES:
        _MODULES[key] = SimModule(specs, arch, checked)
    module: SimModule = _MODULES[key]
    return module


def build_gpu_module(specs: Sequence[KernelSpec], arch: str = "sm_80", *, checked: bool = True) -> GpuModule:
    """The module of `specs` for `cuda:0`: compiled for that GPU, whatever `arch` the simulated one stands in for."""
    del checked
    key = _key("cuda", arch, "", specs)
    if key not in _MODULES:
        _MODULES[key] = GpuModule(specs, gpu_backend())
    module: GpuModule = _MODULES[key]
    return module


def _key(device: str, arch: str, checked: str, specs: Sequence[KernelSpec]) -> str:
    parts = [device, arch, checked, *(part for spec in specs for part in (spec.name, spec.digest))]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


@pytest.fixture(scope="session", params=["sim:0", "cuda:0"] if gpu_backend() else ["sim:0"])
def sim_module(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``sim_module(specs, arch="sm_80", checked=True)``: a module with ``run(name, operands, symbols, seed=, …)``."""
    return build_module if request.param == "sim:0" else build_gpu_module


@pytest.fixture(scope="session")
def sim_run(sim_module: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """``sim_run(spec, operands, symbols, arch=, checked=, seed=, device=, partial=)``: the arrays it wrote."""

    def run(
        spec: KernelSpec,
        operands: Sequence[np.ndarray],
        symbols: Mapping[str, int] | Sequence[int] = (),
        *,
        arch: str = "sm_80",
        checked: bool = True,
        **options: Any,
    ) -> list[np.ndarray]:
        results: list[np.ndarray] = sim_module([spec], arch, checked=checked).run(
            spec.name, operands, symbols, **options
        )
        return results

    return run


# --- NVRTC ------------------------------------------------------------------------------------------------------------


def resources(specs: Sequence[KernelSpec], arch: str) -> dict[str, Resources]:
    """What each kernel takes, by name. A compile error fails the test with NVRTC's words."""
    cubin = compile_cubin(emit.emit_module(specs, arch), arch, name="test")
    return {name.removeprefix("qk_"): taken for name, taken in cubin.resources.items()}


@pytest.fixture(scope="session")
def nvrtc() -> Callable[[Sequence[KernelSpec], str], dict[str, Resources]]:
    """``nvrtc(specs, arch)``: compiles, and gives `Resources` by kernel name."""
    return resources


@pytest.fixture(scope="session")
def nvrtc_functions() -> Callable[[Sequence[KernelSpec], str], Mapping[str, sass.Function]]:
    """``nvrtc_functions(specs, arch)``: compiles, and gives the machine code by symbol."""
    return lambda specs, arch: sass.disassemble(compile_cubin(emit.emit_module(specs, arch), arch, name="test").path)


@pytest.fixture(params=signature.ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    """Each architecture that programs compile for; sm_70 by CUDA 12's NVRTC."""
    name: str = request.param
    return name
