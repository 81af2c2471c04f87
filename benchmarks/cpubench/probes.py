"""The limits of the machine, measured beside the kernels: bytes and operations per second. Calls of compiled kernels.

Each probe runs on all threads of a session's pool.  Operations count a multiplication and an addition apart.

    bandwidth    reading memory far larger than the caches
    "fp32"       fused multiply-adds of fp32
    "bf16"       `vdpbf16ps`: pairs of bf16, summed in fp32
    "int8"       `vpdpbusd` (VNNI): fours of bytes, summed in int32

A rate is None where the processor (or the instruction set in `QC_ISA`) has no such instruction.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.kernels.cpu import emit
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime.compiler import compile_library
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.support import Context, parallel_address

CLOCK_PROCESS_CPUTIME_ID = 2

PROBES = r"""
#include <time.h>
extern "C" { int qb_clock = CLOCK_MONOTONIC; }
static double seconds() { timespec t; clock_gettime(qb_clock, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
extern "C" double qb_call(qc_kernel kernel, qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t times) {
    const double start = seconds();
    for (int64_t i = 0; i < times; i++) kernel(ctx, op, sym);
    return (seconds() - start) / times;
}

// The kernels of `steps`, one after another, for each of `copies` sets of operands.
extern "C" double qb_pass(const qc_kernel* kernels, int64_t steps, qc_ctx* ctx, void* const* const* op,
                          const int64_t* sym, int64_t copies) {
    const double start = seconds();
    for (int64_t copy = 0; copy < copies; copy++)
        for (int64_t step = 0; step < steps; step++) kernels[step](ctx, op[copy * steps + step], sym);
    return seconds() - start;
}

enum { CHAINS = 24 / QC_REGS, STEPS = 100000, SHARES = 8 };
static double rate(qc_ctx* ctx, void (*task)(void*, int64_t, char*), double operations) {
    const double start = seconds();
    ctx->parallel(ctx, ctx->num_threads * SHARES, task, 0);
    return ctx->num_threads * SHARES * operations * CHAINS * STEPS / (seconds() - start);
}
// Every loop over the chains is unrolled: one that is not keeps their sums in memory.
#define EACH_CHAIN(i) _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++)
static void peak_task(void*, int64_t, char* scratch) {
    vf sum[CHAINS];
    EACH_CHAIN(i) sum[i] = vset((float)i);
    const vf a = vset(0.999f), b = vset(0.5f);
    for (int64_t k = 0; k < STEPS; k++) EACH_CHAIN(i) sum[i] = vfma(sum[i], a, b);
    EACH_CHAIN(i) sum[0] = sum[0] + sum[i];
    vstore((float*)scratch, sum[0]);
}
extern "C" double qb_fp32(qc_ctx* ctx) { return rate(ctx, peak_task, 2.0 * 16); }

#if defined(QC_AVX512)
__attribute__((target("avx512bf16"))) static void bf16_task(void*, int64_t task, char* scratch) {
    __m512 sum[CHAINS];
    EACH_CHAIN(i) sum[i] = _mm512_set1_ps((float)i);
    const __m512bh a = (__m512bh)_mm512_set1_epi16((short)(0x3f80 + task)), b = (__m512bh)_mm512_set1_epi16(0x3a00);
    for (int64_t k = 0; k < STEPS; k++) EACH_CHAIN(i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    EACH_CHAIN(i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    _mm512_storeu_ps(scratch, sum[0]);
}
__attribute__((target("avx512vnni"))) static void int8_task(void*, int64_t task, char* scratch) {
    __m512i sum[CHAINS];
    EACH_CHAIN(i) sum[i] = _mm512_set1_epi32(i);
    const __m512i a = _mm512_set1_epi8((char)(task + 1)), b = _mm512_set1_epi8((char)(task - 3));
    for (int64_t k = 0; k < STEPS; k++)
        EACH_CHAIN(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum[i]) : "v"(a), "v"(b));
    EACH_CHAIN(i) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    _mm512_storeu_si512(scratch, sum[0]);
}
#endif
extern "C" double qb_bf16(qc_ctx* ctx) {
#if defined(QC_AVX512)
    if (__builtin_cpu_supports("avx512bf16")) return rate(ctx, bf16_task, 4.0 * 16);
#endif
    return 0;
}
extern "C" double qb_int8(qc_ctx* ctx) {
#if defined(QC_AVX512)
    if (__builtin_cpu_supports("avx512vnni")) return rate(ctx, int8_task, 8.0 * 16);
#endif
    return 0;
}

struct read_job { const float* data; int64_t count; int64_t tasks; };
static void read_task(void* arg, int64_t task, char* scratch) {
    const read_job* job = (const read_job*)arg;
    const int64_t first = job->count / job->tasks * task, last = first + job->count / job->tasks;
    vf a = vzero(), b = a, c = a, d = a;
    for (int64_t i = first; i + 64 <= last; i += 64) {
        a = a + vload(job->data + i), b = b + vload(job->data + i + 16);
        c = c + vload(job->data + i + 32), d = d + vload(job->data + i + 48);
    }
    vstore((float*)scratch, a + b + c + d);
}
extern "C" double qb_read(qc_ctx* ctx, const float* data, int64_t count) {  // bytes per second
    read_job job = {data, count, ctx->num_threads * 16};
    const double start = seconds();
    ctx->parallel(ctx, job.tasks, read_task, &job);
    return 4.0 * count / (seconds() - start);
}
"""


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

    def json(self) -> dict[str, float | None]:
        return asdict(self)


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


def aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of bytes that begins at a multiple of 64."""
    buffer = np.zeros(data.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]


class Bench:
    """The compiled kernels of all cases, a context on the runtime's pool, and the probes.

    With `cpu_time` clocks count the processor time of the process."""

    def __init__(self, specs: Sequence[KernelSpec], threads: int, *, cpu_time: bool = False) -> None:
        isa = host_isa()
        unique = tuple({spec.name: spec for spec in specs}.values())
        source = emit.emit_kernels(unique, isa) + PROBES
        self.library = ctypes.CDLL(str(compile_library(source, isa, name="bench-linear")))
        for probe in ("qb_call", "qb_pass", "qb_fp32", "qb_bf16", "qb_int8", "qb_read"):
            getattr(self.library, probe).restype = ctypes.c_double
        scratch = max([64, *(emit.scratch_bytes(spec, isa) for spec in unique)])
        self.stride = -(-scratch // 64) * 64
        self.use_threads(threads)
        if cpu_time:
            ctypes.c_int.in_dll(self.library, "qb_clock").value = CLOCK_PROCESS_CPUTIME_ID
        self.memory = np.ones(64 << 20, np.float32)

    def use_threads(self, threads: int) -> None:
        """Runs kernels and probes on so many threads from now on."""
        self.scratch = aligned(np.zeros(self.stride * threads, np.uint8))
        self.context = Context(parallel_address(), None, self.scratch.ctypes.data, self.stride, threads, 0, 0, 0, -1, 0)

    def peak(self) -> float:
        """Operations per second of fused multiply-adds of fp32."""
        return float(self.library.qb_fp32(ctypes.byref(self.context)))

    def bandwidth(self) -> float:
        """Bytes per second."""
        pointer = ctypes.c_void_p(self.memory.ctypes.data)
        return float(self.library.qb_read(ctypes.byref(self.context), pointer, ctypes.c_int64(self.memory.size)))

    def limits(self, rounds: int = 3) -> Limits:
        """The medians of all probes."""
        return middle([self._limits() for _ in range(rounds)])

    def _limits(self) -> Limits:
        context = ctypes.byref(self.context)
        bf16, int8 = (float(probe(context)) or None for probe in (self.library.qb_bf16, self.library.qb_int8))
        return Limits(self.bandwidth(), self.peak(), bf16, int8)

    def caller(
        self, spec: KernelSpec, arrays: Sequence[npt.NDArray[Any]], symbols: Sequence[int]
    ) -> Callable[[int], float]:
        """`call(times)` returns the seconds of one call; the operands stay the same."""
        kernel = ctypes.cast(self.library[f"qk_{spec.name}"], ctypes.c_void_p)
        operands = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        values = (ctypes.c_int64 * len(symbols))(*symbols)

        def call(times: int) -> float:
            keep = arrays  # the addresses above point into them
            found = self.library.qb_call(kernel, ctypes.byref(self.context), operands, values, ctypes.c_int64(times))
            del keep
            return float(found)

        return call

    def passes(
        self,
        specs: Sequence[KernelSpec],
        copies: Sequence[Sequence[Sequence[npt.NDArray[Any]]]],
        symbols: Sequence[int],
    ) -> Callable[[], float]:
        """`call()` returns the seconds of a pass: for each copy the kernels in order, each with its own operands."""
        kernels = (ctypes.c_void_p * len(specs))(*(self._address(spec) for spec in specs))
        flat = [[a.ctypes.data for a in arrays] for copy in copies for arrays in copy]
        lists = [(ctypes.c_void_p * len(each))(*each) for each in flat]
        operands = (ctypes.c_void_p * len(lists))(*(ctypes.addressof(each) for each in lists))
        values = (ctypes.c_int64 * len(symbols))(*symbols)
        counts = ctypes.c_int64(len(specs)), ctypes.c_int64(len(copies))

        def call() -> float:
            keep = copies, lists  # the addresses above point into them
            context = ctypes.byref(self.context)
            found = self.library.qb_pass(kernels, counts[0], context, operands, values, counts[1])
            del keep
            return float(found)

        return call

    def _address(self, spec: KernelSpec) -> int:
        return ctypes.cast(self.library[f"qk_{spec.name}"], ctypes.c_void_p).value or 0
