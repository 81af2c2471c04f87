"""The backend of the simulated GPU: `sim:0` … `sim:7`.

Kernels are the CUDA C++ that a real GPU gets, compiled by the host's compiler against kernels/sim/shim.h; the device
behind it (`runtime/sim`) keeps CUDA's rules for streams, events and captures, and checks every access.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qcompiler.errors import SimulationError
from qcompiler.kernels.cuda import emit, signature
from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends.base import (
    Backend,
    CaptureMode,
    Event,
    Graph,
    Kernel,
    Memory,
    Stream,
    StreamKind,
)
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.sim.capture import refuse
from qcompiler.runtime.sim.clocks import Access
from qcompiler.runtime.sim.device import DEVICES, SimStream, captures, machine, sim_device, sim_stream
from qcompiler.runtime.sim.engine import LaunchOptions, LaunchRequest, Range, SimLibrary, checks_wanted, compile_sim
from qcompiler.runtime.sim.queue import Allocation, Work
from qcompiler.runtime.sim.ranges import Extent, extent_of

__all__ = ["DEVICES", "SimBackend", "SimKernel", "sim_stream"]

LAUNCHES_KEPT = 256
"""The number of symbol values for which a kernel caches its grid and the extents of its operands."""


class SimKernel(Kernel):
    """A kernel of a loaded library: the address of its `qs_call_…` and its geometry."""

    def __init__(self, spec: KernelSpec, function: int, geometry: Geometry, checked: bool) -> None:
        self.spec = spec
        self.function = function
        self.geometry = geometry
        self.checked = checked
        self._known: dict[tuple[int, ...], tuple[tuple[int, int, int], tuple[Extent, ...]]] = {}

    def at(self, symbols: Sequence[int]) -> tuple[tuple[int, int, int], tuple[Extent, ...]]:
        """The grid, and the bytes of each operand, for values of the spec's symbols."""
        key = tuple(symbols)
        if key not in self._known:
            if len(self._known) >= LAUNCHES_KEPT:
                self._known.clear()
            values = dict(zip(self.spec.symbols, key, strict=True))
            extents = tuple(extent_of(operand, values) for operand in self.spec.operands)
            self._known[key] = self.geometry.at(values), extents
        return self._known[key]


class SimBackend(Backend):
    """One simulated device, for kernels of the architecture `isa`. Backends of one index share the device."""

    kind = "sim"

    def __init__(self, index: int = 0, isa: str = "sm_80") -> None:
        signature.arch_number(isa)
        self._device = sim_device(index)
        self.device = self._device.name
        self.isa = isa

    # --- memory ---

    def allocate(self, nbytes: int, *, label: str = "") -> Memory:
        return self._device.allocate(nbytes, label)

    def upload(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        self._device.upload(stream, target, source, nbytes)

    def download(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        self._device.download(stream, target, source, nbytes)

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        self._device.copy(stream, target, source, nbytes)

    def zero(self, stream: Stream, target: int, nbytes: int) -> None:
        self._device.zero(stream, target, nbytes)

    def device_of(self, address: int) -> str | None:
        with machine().entry():
            found = machine().allocation_at(address)
            return None if found is None else f"sim:{found.device}"

    # --- streams and events ---

    def stream(self, name: str = "", *, kind: StreamKind = "nonblocking") -> Stream:
        return self._device.stream(name, kind)

    def legacy_stream(self) -> Stream:
        return self._device.legacy

    def caller_stream(self, given: Any = None) -> Stream:
        """`sim_stream` sets the current stream; torch has no simulated streams."""
        if given is None:
            return self._device.current()
        if isinstance(given, SimStream):
            if given.device != self.device:
                raise refuse(400, f"{given.place} of {given.device} was handed to {self.device}")
            return given
        if isinstance(given, int):
            return self._device.by_handle(given)
        protocol = getattr(given, "__cuda_stream__", None)
        if protocol is None:
            raise refuse(400, f"{given!r} is no stream: pass a Stream, a handle or an object with __cuda_stream__")
        return self._device.by_handle(int((protocol() if callable(protocol) else protocol)[1]))

    def event(self, name: str = "") -> Event:
        return self._device.event(name)

    def record(self, event: Event, stream: Stream) -> None:
        self._device.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._device.wait(stream, event)

    def synchronize(self, stream: Stream | None = None) -> None:
        self._device.synchronize(stream)

    def query(self, what: Stream | Event) -> bool:
        return self._device.query(what)

    def timer(self, name: str = "") -> Event:
        return self._device.event(name, timed=True)

    def elapsed(self, begin: Event, end: Event) -> float:
        return self._device.elapsed(begin, end)

    def captures_here(self) -> bool:
        with machine().entry():
            return captures().captures_here(self._device.index)

    # --- kernels ---

    def build(self, plan: Plan) -> NativeLibrary:
        source = emit.emit_sim_program(plan, self.isa)
        path = compile_sim(source, checked=checks_wanted(), name="sim")
        return NativeLibrary(self.isa, path, emitter_version("cuda"), find_compiler().version)

    def load(self, plan: Plan, native: NativeLibrary) -> dict[str, Kernel]:
        with machine().entry():
            captures().check_unsafe("loading a module")
            library = machine().engine.load(native.path)
            return {spec.name: self._kernel(spec, number, library) for number, spec in enumerate(plan.kernels)}

    def _kernel(self, spec: KernelSpec, number: int, library: SimLibrary) -> SimKernel:
        return SimKernel(spec, library.function(str(number)), emit.geometry(spec, self.isa), library.checked)

    def launch(
        self, stream: Stream, kernel: Kernel, operands: Sequence[int], symbols: Sequence[int], context: Any = None
    ) -> None:
        assert isinstance(kernel, SimKernel)
        with machine().entry():
            queue = self._device.own(stream, f"kernel '{kernel.spec.name}'")
            grid, extents = kernel.at(symbols)
            if 0 not in grid:
                self._device.enqueue(queue, self._work(kernel, grid, extents, operands, symbols))

    def _work(
        self,
        kernel: SimKernel,
        grid: tuple[int, int, int],
        extents: tuple[Extent, ...],
        operands: Sequence[int],
        symbols: Sequence[int],
    ) -> Work:
        spec, engine = kernel.spec, machine().engine
        name = f"kernel '{spec.name}'" + (f" ({spec.serves})" if spec.serves else "")
        memory, ranges, declared = [], [], []
        for operand, address, extent in zip(spec.operands, operands, extents, strict=True):
            if not extent.pieces:
                continue
            low, high = extent.hull
            what = f"operand '{operand.name}' of {name}"
            memory.append(self._resolve(address + low, high - low, what))
            # Weights in tiles, which the compiler makes of constants alone; nothing else may be read before the wait.
            constant = operand.access == "r" and operand.layout not in (None, "canonical")
            ranges += [
                Range(address + lo, address + hi, operand.access, operand.name, constant) for lo, hi in extent.pieces
            ]
            if extent.is_exact or not kernel.checked:
                declared += [
                    Access(address + lo, address + hi, operand.access, operand.name) for lo, hi in extent.pieces
                ]
        request = LaunchRequest(
            device=self._device.index,
            function=kernel.function,
            name=spec.name,
            grid=grid,
            block=kernel.geometry.block,
            shared_bytes=kernel.geometry.shared,
            args=(*operands, *symbols),
            ranges=tuple(ranges),
            overlaps=True,  # as from sm_90 on: the text of a kernel is the same for all
        )
        must_write = all(extent.is_exact for extent in extents)

        def run(seed: int) -> list[Access]:
            options = LaunchOptions(early_copies=bool(seed & 1))  # a device may complete cp.async at once or late
            report = engine.launch(dataclasses.replace(request, seed=seed, options=options))
            if not kernel.checked:  # its writes were not observed: its declared writes count
                for access in (each for each in declared if "w" in each.kind):
                    engine.mark_initialised(access.lo, access.hi - access.lo)
            if report.unwritten and must_write:
                raise SimulationError(
                    f"it left {report.unwritten} bytes of its results unwritten; its grid or block is too small, or "
                    "its operands are larger than what it computes",
                    "unwritten-output",
                )
            return _beyond(report.accesses, declared)

        return Work("kernel", name, self._device.index, tuple(declared), tuple(dict.fromkeys(memory)), run)

    def _resolve(self, address: int, nbytes: int, what: str) -> Allocation:
        found = machine().resolve(address, nbytes, what)
        if found.device != self._device.index:
            raise SimulationError(
                f"{what} lies in {found}, but the kernel runs on {self.device}; copy it there first", "wrong-device"
            )
        return found

    # --- graphs ---

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread_local") -> None:
        self._device.begin_capture(stream, mode)

    def end_capture(self, stream: Stream) -> Graph:
        return self._device.end_capture(stream)


def _beyond(observed: Sequence[tuple[int, int, Any]], declared: Sequence[Access]) -> list[Access]:
    """The observed accesses that the declared ones do not cover."""
    return [
        Access(lo, hi, kind)
        for lo, hi, kind in observed
        if not any(known.lo <= lo and hi <= known.hi and kind in known.kind for known in declared)
    ]
