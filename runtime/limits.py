"""The limits of a machine: bytes and operations per second, which a launch's time is compared with.

    limits = Probes("x86-64-v4").limits(2)             # measured on two threads, the best of some rounds
    limits.bound("bf16", operations=2e6, nbytes=3e5)   # (least seconds, "bytes" or "bf16")

Each probe of a CPU (probes.cpp) runs on all threads of a session's pool.  Operations count a multiplication and an
addition apart.

    bandwidth    reading memory far larger than the caches
    "fp32"       fused multiply-adds of fp32
    "bf16"       tiles of AMX where they multiply bf16 (bf16_units.py), else `vdpbf16ps`: pairs of bf16, summed in fp32;
                 on a GPU its tensor cores on 16-bit values
    "int8"       tiles of AMX where they multiply int8 (int8_units.py), else `vpdpbusd` (VNNI): fours of bytes, summed
                 in int32

A rate is None where the processor (or the instruction set in `QC_ISA`) has no such instruction.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal

from qcompiler.kernels.cpu import emit
from qcompiler.runtime.bf16_units import bf16_units
from qcompiler.runtime.code import load
from qcompiler.runtime.compiler import compile_code
from qcompiler.runtime.int8_units import int8_units
from qcompiler.runtime.memory import Block
from qcompiler.runtime.support import Context, parallel_address

READ_BYTES, PIECES = 256 << 20, 8
"""What the probe of bandwidth reads: many times the last cache of most processors, in pieces that are timed apart."""

READS, RATES = 4, 24
"""Rounds of the probes. The best of each counts: what else the machine does only takes away, and a probe that takes
less than a slice of the scheduler's often runs undisturbed."""

STEPS = 10_000
"""Steps of a probe of operations: 0.3 to 0.6 ms."""

Arithmetic = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class Limits:
    """Bytes per second, and operations per second by kind of arithmetic (None: the processor has none)."""

    bandwidth: float
    fp32: float
    bf16: float | None
    int8: float | None

    def seconds(self, kind: str, operations: float, nbytes: float) -> tuple[float, str] | None:
        """(the least seconds for a job, what takes them: "bytes" or the kind). None if `kind` has no rate."""
        rate = getattr(self, kind)
        if rate is None:
            return None
        return max((nbytes / self.bandwidth, "bytes"), (operations / rate, kind))

    def bound(self, kind: str, operations: float, nbytes: float) -> tuple[float, str]:
        """As `seconds`. For a kind without a rate the bytes alone."""
        return self.seconds(kind, operations, nbytes) or (nbytes / self.bandwidth, "bytes")

    def json(self) -> dict[str, float | None]:
        return asdict(self)

    def __str__(self) -> str:
        rates = [f"{kind} {rate / 1e9:.0f} Gop/s" for kind, rate in self.json().items() if rate and kind != "bandwidth"]
        return f"{self.bandwidth / 1e9:.1f} GB/s, {', '.join(rates)}"


@dataclass(frozen=True)
class Machine:
    """The machine of a profile. `rates` says whether its operations per second were measured here or are published
    figures of the device; its bandwidth is always measured."""

    name: str
    limits: Limits
    rates: Literal["measured", "published"]

    def __str__(self) -> str:
        rates = " (rates are published, not measured)" if self.rates == "published" else ""
        return f"{self.name}: {self.limits}{rates}"


def middle(found: Sequence[Limits]) -> Limits:
    """The median of each."""

    def of(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    bandwidth, fp32 = (
        statistics.median(each.bandwidth for each in found),
        statistics.median(each.fp32 for each in found),
    )
    return Limits(bandwidth, fp32, of(each.bf16 for each in found), of(each.int8 for each in found))


def probes_text() -> str:
    """The C++ of the probes. It follows the headers of the CPU's kernels."""
    return resources.files("qcompiler.runtime").joinpath("probes.cpp").read_text()


class Probes:
    """The compiled probes for an instruction set. CompilerMissingError if they were never compiled and cannot be."""

    def __init__(self, isa: str) -> None:
        self._isa = isa
        source = emit.emit_kernels((), isa) + probes_text()
        self._library: Any = load(compile_code(source, isa, name="probes"))
        for probe in ("qb_fp32", "qb_bf16", "qb_int8", "qb_read"):
            getattr(self._library, probe).restype = ctypes.c_double

        ctypes.c_int64.in_dll(self._library, "qb_steps").value = STEPS

    def limits(self, threads: int) -> Limits:
        """The best of all rounds on so many threads; they take about 0.1 s."""
        memory, scratch = Block(READ_BYTES), Block(64 * threads)
        memory.bytes[:] = 0  # pages that were never written are one page of zeros, which the caches hold
        context = Context(
            parallel=parallel_address(),
            scratch=scratch.address,
            scratch_stride=64,
            num_threads=threads,
            error_kernel=-1,
            int8_units=int8_units(self._isa),
            bf16_units=bf16_units(self._isa),
        )
        to, library, piece = ctypes.byref(context), self._library, READ_BYTES // PIECES
        starts = READS * [ctypes.c_void_p(memory.address + piece * number) for number in range(PIECES)]
        read = max(library.qb_read(to, start, ctypes.c_int64(piece // 4)) for start in starts)
        probes = (library.qb_fp32, library.qb_bf16, library.qb_int8)
        fp32, bf16, int8 = (max(float(probe(to)) for _ in range(RATES)) for probe in probes)
        return Limits(float(read), fp32, bf16 or None, int8 or None)


@functools.cache
def _probes(isa: str) -> Probes:
    return Probes(isa)


_measured: dict[tuple[str, int], Limits] = {}


def cpu_limits(threads: int, isa: str) -> Limits:
    """The limits of this machine on so many threads, measured once per process. CompilerMissingError as of `Probes`."""
    key = (isa, threads)
    if key not in _measured:
        _measured[key] = _probes(isa).limits(threads)
    return _measured[key]
