"""Estimated times of launches and copies. `assign-streams` decides by them, and timelines show them.

    device = device_cost("sm_90a")
    cost = launch_cost(spec, {"b": 1}, device, "sm_90a")     # Cost(span=4.2, share=0.61, …), microseconds
    Occupancy().place(start, cost)                           # when it ends, given what already runs

Nothing is measured. The time of a launch is a fixed part plus the longer of two times: moving its bytes and doing its
operations. The rates are published figures of one device per architecture. A small launch is almost all fixed time, so
two of them can run at once; two launches that fill the device cannot.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.emit import engine_and_geometry
from qcompiler.plan.kernel import ITEMSIZE, KernelBody, KernelSpec, Operand
from qcompiler.plan.kernel_body import Symbols, once, value_of, volume


@dataclass(frozen=True)
class DeviceCost:
    """The figures of a device. Times are in microseconds, rates per microsecond."""

    name: str
    bandwidth: float
    """Bytes to or from its memory."""
    fp32: float
    """fp32 operations of its ordinary units; a multiply-add counts two."""
    tensor: float
    """Operations of its tensor cores, on 16-bit values with fp32 sums."""
    link: float
    """Bytes to or from another device, one way."""
    threads_to_fill: int
    """Threads needed to keep its arithmetic units busy."""
    latency: float
    """One round trip to memory."""
    launch: float
    """From the end of a kernel to the start of the next one on the same stream, in a captured graph."""
    event: float
    """An edge between two streams: from the record after a kernel to the start of the kernel that waits."""
    link_latency: float
    """An empty copy to another device."""


ATTAINED_FRACTION = 0.75
"""The fraction of a published rate that a kernel is assumed to reach. It is the design target of the 4-bit kernels."""

ROUND_TRIPS = 4
"""Dependent trips to memory in the shortest kernel: the first bytes of its operands, what those lead to (a scale, an
index, the next tile), the block reduction, the result."""

BYTES_IN_FLIGHT_PER_THREAD = 16
"""Bytes that a thread has in flight: the kernels load 16 bytes at a time."""


def _gpu(name: str, bandwidth: float, fp32: float, tensor: float, link: float, multiprocessors: int) -> DeviceCost:
    """A GPU from published figures (GB/s, TFLOP/s, TFLOP/s, GB/s), and figures assumed the same for all GPUs:

    - threads_to_fill: one warp for each of a multiprocessor's four schedulers (and tensor cores).
    - latency: 400 cycles to global memory on V100, A100 and H100 (doi 10.1016/j.ultsonch.2023.106546, table 3), which
      is 0.23 to 0.28 us at 1.4 to 1.75 GHz.
    - launch: 0.5 us between kernels of a graph on a V100 (NVIDIA, "Getting Started with CUDA Graphs", 2019: 3.4 us for
      each kernel of 2.9 us); 0.58 us for each node of a chain of empty kernels on an RTX 5070 Ti
      (github.com/ahrefs/ocannl, issue 488).
    - event: between 1 us (github.com/chelsea0x3b/cudarc, pull request 335) and 3 us on an RTX 3080
      (github.com/facebookincubator/velox, pull request 6096).
    - link_latency: two trips over PCIe of 1 to 2 us (cudarc, above) plus about the time of an event. Latency dominates
      small copies.
    """
    return DeviceCost(
        name, bandwidth * 1e3, fp32 * 1e6, tensor * 1e6, link * 1e3, threads_to_fill=4 * 32 * multiprocessors,
        latency=0.25, launch=0.6, event=2.0, link_latency=5.0,
    )  # fmt: skip


GPUS: dict[str, DeviceCost] = {
    "sm_70": _gpu("V100 SXM2", 900, 15.7, 125, 16, 80),
    "sm_75": _gpu("T4", 320, 8.1, 65, 16, 40),
    "sm_80": _gpu("A100 SXM 40 GB", 1555, 19.5, 312, 32, 108),
    "sm_86": _gpu("A40", 696, 37.4, 149.7, 32, 84),
    "sm_89": _gpu("L40S", 864, 91.6, 362, 32, 142),
    "sm_90a": _gpu("H100 SXM", 3350, 66.9, 989, 64, 132),
    "sm_100": _gpu("B200", 8000, 75, 2250, 64, 148),
    "sm_120": _gpu("RTX 5090", 1792, 104.8, 209.5, 64, 170),
}
"""One device of each architecture, from NVIDIA's data sheets (dense rates; the link is PCIe x16, 3.0 to 5.0)."""

CPU = DeviceCost(
    "8 cores at 3 GHz", bandwidth=51.2e3, fp32=0.768e6, tensor=0.768e6, link=51.2e3, threads_to_fill=8,
    latency=0.1, launch=0.25, event=0.0, link_latency=0.25,
)  # fmt: skip
"""Eight cores with AVX2: two channels of DDR4-3200, 2 x 8 fp32 multiply-adds per core and cycle, 100 ns to memory.
`launch` is the time to open a parallel region (docs/runtime.md). A CPU has one stream, so no events."""

DEFAULT_GPU = "sm_80"
"""The GPU assumed when a plan's target names none."""


def device_cost(isa: str, kind: str = "cuda") -> DeviceCost:
    """The figures for an architecture or instruction set. `kind` is "cpu" or "cuda"."""
    return CPU if kind == "cpu" else GPUS.get(isa, GPUS[DEFAULT_GPU])


@dataclass(frozen=True)
class Cost:
    """One launch or copy. Alone on an idle device it takes `span` microseconds and uses the fraction `share` (0 to 1)
    of the device."""

    span: float
    share: float
    nbytes: int = 0
    operations: int = 0


NO_COST = Cost(0.0, 0.0)


# --- launches and copies ---------------------------------------------------------------------------------------------


def launch_cost(spec: KernelSpec, symbols: Symbols, device: DeviceCost, isa: str, kind: str = "cuda") -> Cost:
    """The cost of one launch of a kernel at these sizes. A grid with a 0 is not launched and costs nothing."""
    nbytes = bytes_moved(spec.operands, spec.body, symbols)
    operations = operations_of(spec.body, spec.operands, symbols)
    if kind == "cpu":
        return _cost(device, nbytes, operations, device.fp32)

    engine, geometry = engine_and_geometry(spec, isa)
    x, y, z = geometry.at({name: symbols[name] for name in spec.symbols})
    if not x * y * z:
        return NO_COST
    rate = device.tensor if engine == "mma" else device.fp32
    return _cost(device, nbytes, operations, rate, x * y * z * geometry.threads)


def unknown_cost(operands: Sequence[Operand], symbols: Symbols, device: DeviceCost) -> Cost:
    """The cost of a kernel with known operands and unknown work (schedules written by hand)."""
    return _cost(device, bytes_moved(operands, None, symbols), 0, device.fp32)


def copy_cost(nbytes: int, device: DeviceCost, *, crossing: bool) -> Cost:
    """The cost of copying `nbytes` within a device, or between two devices (`crossing`). A copy between devices is
    assumed to use none of the memory bandwidth."""
    if not nbytes:
        return NO_COST
    if crossing:
        return Cost(device.link_latency + nbytes / (ATTAINED_FRACTION * device.link), 0.0, nbytes)
    return _cost(device, 2 * nbytes, 0, device.fp32)


def _cost(device: DeviceCost, nbytes: int, operations: int, rate: float, threads: int | None = None) -> Cost:
    """The cost of a launch with this many threads (None: enough to fill the device). Bandwidth is limited by bytes in
    flight divided by latency (Little's law). Arithmetic is limited by the fraction of `device.threads_to_fill` that the
    threads fill."""
    moving, computing = nbytes / (ATTAINED_FRACTION * device.bandwidth), operations / (ATTAINED_FRACTION * rate)
    busy = wide = 1.0
    if threads is not None:
        busy = min(1.0, threads * BYTES_IN_FLIGHT_PER_THREAD / (device.bandwidth * device.latency))
        wide = min(1.0, threads / device.threads_to_fill)
    span = device.launch + ROUND_TRIPS * device.latency + max(moving / busy, computing / wide)
    return Cost(span, max(moving, computing) / span, nbytes, operations)


# --- bytes and operations --------------------------------------------------------------------------------------------


def bytes_moved(operands: Sequence[Operand], body: KernelBody | None, symbols: Symbols) -> int:
    """Bytes read and written at these sizes. Each operand counts once, a broadcast one at its stored size, and of a
    table only the part that is used."""
    return sum(_operand_bytes(operand, body, symbols) for operand in operands)


def _operand_bytes(operand: Operand, body: KernelBody | None, symbols: Symbols) -> int:
    nbytes = stored_bytes(operand, symbols)
    return once(operand, nbytes) if body is None else body.moved(operand, nbytes, symbols)


def stored_bytes(operand: Operand, symbols: Symbols) -> int:
    """Bytes that an operand occupies in memory. A dim of stride 0 counts once."""
    if operand.format is not None:
        rows, cols = (value_of(size, symbols) for size in operand.shape)
        return _packed_bytes(operand.format.name, tuple(sorted(operand.format.params.items())), operand.layout,
                             operand.dtype, rows, cols)  # fmt: skip
    sizes = [
        size
        for size, stride in zip(operand.shape, operand.strides or operand.shape, strict=True)
        if stride != 0 or size == 1
    ]
    return volume(sizes, symbols) * ITEMSIZE[operand.dtype]


@cache
def _packed_bytes(
    name: str, params: tuple[tuple[str, int | bool | str], ...], layout: str | None, dtype: str, rows: int, cols: int
) -> int:
    fmt = formats.get(name, **dict(params))
    if layout in (None, "canonical"):
        return int(fmt.nbytes(rows, cols))
    return layouts.get(str(layout)).nbytes(fmt, dtype, rows, cols)  # type: ignore[arg-type]


def operations_of(body: KernelBody, operands: Sequence[Operand], symbols: Symbols) -> int:
    """Arithmetic at these sizes, as the kind of kernel declares it."""
    return body.operations(operands, symbols)


# --- concurrent launches ---------------------------------------------------------------------------------------------


class Occupancy:
    """How much of a device is in use over time. Launches placed first keep their share; later ones get what is left.

    The total never exceeds the device, and a launch that fills the device lets nothing run beside it.
    """

    def __init__(self) -> None:
        self._starts = [0.0]
        self._loads = [0.0]

    def finish(self, start: float, cost: Cost) -> float:
        """When a launch that may start at `start` would end."""
        return self._walk(start, cost)[0]

    def place(self, start: float, cost: Cost) -> float:
        """Reserves the device for a launch that may start at `start`; returns when it ends."""
        end, taken = self._walk(start, cost)
        for low, high, load in taken:
            first, last = self._cut(low), self._cut(high)
            for i in range(first, last):
                self._loads[i] += load
        return end

    def _walk(self, start: float, cost: Cost) -> tuple[float, list[tuple[float, float, float]]]:
        """The end of the launch, and the pieces (begin, end, share) it runs in."""
        if cost.share <= 0:
            return start + cost.span, []
        at, left, taken = start, cost.span, []
        number = bisect.bisect_right(self._starts, start) - 1
        while left > 1e-9:
            free = max(0.0, 1.0 - self._loads[number])
            pace = min(1.0, free / cost.share)
            until = self._starts[number + 1] if number + 1 < len(self._starts) else float("inf")
            if pace > 1e-9:
                done = at + left / pace
                end = min(until, done)
                taken.append((at, end, pace * cost.share))
                # Nothing is left in its last piece, whatever (end - at) * pace rounds to: times far from 0 are coarse.
                left = 0.0 if end == done else left - (end - at) * pace
                at = end
            else:
                at = until
            number += 1
        return at, taken

    def _cut(self, at: float) -> int:
        """The index of the piece that begins at `at`, split off if needed."""
        number = bisect.bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            self._starts.insert(number, at)
            self._loads.insert(number, self._loads[number - 1] if number else 0.0)
        return number
