"""Linear kernels beside torch's fp32 linear, per shape and M, in one interleaved run.

    .venv/bin/python benchmarks/linear_cpu.py [--rounds 15] [--threads 2] [--m 1 32 4096] [--json out.json]
        [--formats nf4 q4_K q6_K] [--shapes 4096x4096] [--int8] [--bf16] [--older] [--cpu-time]

Every round times each kernel once for each case (short calls in batches), in a varying order, so that a slow moment of
the machine affects all of them; the table gives medians. The same run also measures fused multiply-adds on all threads
(peak), and reading memory far larger than the caches (bandwidth). torch is timed through its Python call, our kernels
are called from C++.

With `--cpu-time` clocks count processor time: for one thread on a shared machine.

With `--int8` the table has products of codes beside those of decoded values: "int8 a8" and "int4 a8" read rows of int8,
"rows" is the time to make these from fp32, "_int_mm" is torch's product of int8 matrices (int32 out, from 17 rows on).

With `--bf16` each format stands twice, with x, bias and result in fp32 and ("nf4 bf16") in bf16, and so does torch.

With `--older` so does each format that has other bytes in cpu_p16_v1 ("v1 q4_K"), the layout of programs saved before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qcompiler import formats
from qcompiler.formats.int8_rows import quantise, row_bytes
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu import emit
from qcompiler.kernels.select import weight_layout
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.compiler import compile_library
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.support import Context, parallel_address
from qcompiler.runtime.threads import resolve_num_threads

SHAPES = ((384, 384), (1536, 384), (384, 1536))
MS = (1, 8, 32, 512, 4096)
FORMATS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "nf4": ("nf4", {"block": 64}), "int4": ("int4", {"group": 32}), "int8": ("int8", {}), "f32": None,
}  # fmt: skip
CODES = " a8"
"""Suffix of a format whose codes are multiplied with rows of int8."""

BF16 = " bf16"
"""Suffix of a format whose factors are bf16."""

OLDER = "v1 "
"""Prefix of a format in the layout in which every format was before."""

CPU_TIME = False
CLOCK_PROCESS_CPUTIME_ID = 2

BATCH_SECONDS = 500e-6
"""Calls shorter than this are timed in batches of about this length."""

PROBES = r"""
#include <time.h>
extern "C" { int qb_clock = CLOCK_MONOTONIC; }
static double seconds() { timespec t; clock_gettime(qb_clock, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
extern "C" double qb_call(qc_kernel kernel, qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t times) {
    const double start = seconds();
    for (int64_t i = 0; i < times; i++) kernel(ctx, op, sym);
    return (seconds() - start) / times;
}
enum { CHAINS = 24 / QC_REGS, STEPS = 100000 };
static void peak_task(void*, int64_t, char* scratch) {
    vf sum[CHAINS];
    for (int i = 0; i < CHAINS; i++) sum[i] = vset((float)i);
    const vf a = vset(0.999f), b = vset(0.5f);
    for (int64_t k = 0; k < STEPS; k++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) sum[i] = vfma(sum[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = sum[0] + sum[i];
    vstore((float*)scratch, sum[0]);
}
extern "C" double qb_peak(qc_ctx* ctx) {  // FLOP per second
    const double start = seconds();
    ctx->parallel(ctx, ctx->num_threads * 8, peak_task, 0);
    return ctx->num_threads * 8 * 2.0 * 16 * CHAINS * STEPS / (seconds() - start);
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


@dataclass
class Engine:
    """One way to compute a case: `run(times)` returns seconds per call; `weight_bytes` are read once per call."""

    name: str
    run: Callable[[int], float]
    weight_bytes: int
    calls: int = 1


def m_class(m: int) -> Any:
    return "1" if m == 1 else "2-8" if m <= 8 else "large"


def rows_spec(k: int) -> KernelSpec:
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k, 1)),
        Operand(name="out", dtype="i8", access="w", shape=("m", row_bytes(k)), strides=(row_bytes(k), 1)),
    )
    body = QuantizeRowsKernel(rows="m", cols=k, kind="token")
    return KernelSpec(name=f"rows_{k}", symbols=("m",), operands=operands, body=body)


def dtype_of(kind: str) -> DType:
    return "bf16" if kind.endswith(BF16) else "f32"


def layout_of(kind: str, ref: FormatRef | None) -> str:
    return "cpu_p16_v1" if kind.startswith(OLDER) else weight_layout("cpu", ref)


def make_spec(kind: str, m: int, n: int, k: int) -> KernelSpec:
    codes, dtype = kind.endswith(CODES), dtype_of(kind)
    chosen = FORMATS[kind]
    ref = None if chosen is None else FormatRef(name=chosen[0], params=chosen[1])
    operands = (
        Operand(name="x", dtype="i8", access="r", shape=("m", row_bytes(k)), strides=(row_bytes(k), 1))
        if codes
        else Operand(name="x", dtype=dtype, access="r", shape=("m", k), strides=(k, 1)),
        Operand(name="w", dtype=dtype, access="r", shape=(n, k), format=ref, layout=layout_of(kind, ref)),
        Operand(name="bias", dtype=dtype, access="r", shape=(n,), strides=(1,)),
        Operand(name="out", dtype=dtype, access="w", shape=("m", n), strides=(n, 1)),
    )
    body = LinearKernel(m="m", n=n, k=k, m_class=m_class(m), has_bias=True, codes=codes)
    name = f"{kind.replace(' ', '_')}_{n}_{k}_{m_class(m).replace('-', '_')}"
    return KernelSpec(name=name, symbols=("m",), operands=operands, body=body)


def aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    buffer = np.zeros(data.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]


class Bench:
    """The compiled kernels of all cases, a context on the runtime's pool, and the probes."""

    def __init__(self, specs: Sequence[KernelSpec], threads: int) -> None:
        isa = host_isa()
        unique = tuple({spec.name: spec for spec in specs}.values())
        source = emit.emit_kernels(unique, isa) + PROBES
        self.library = ctypes.CDLL(str(compile_library(source, isa, name="bench-linear")))
        for probe in ("qb_call", "qb_peak", "qb_read"):
            getattr(self.library, probe).restype = ctypes.c_double
        scratch = max([64, *(emit.scratch_bytes(spec, isa) for spec in unique)])
        stride = -(-scratch // 64) * 64
        self.scratch = aligned(np.zeros(stride * threads, np.uint8))
        self.context = Context(parallel_address(), None, self.scratch.ctypes.data, stride, threads, 0, 0, 0, -1, 0)
        if CPU_TIME:
            ctypes.c_int.in_dll(self.library, "qb_clock").value = CLOCK_PROCESS_CPUTIME_ID
        self.memory = np.ones(64 << 20, np.float32)

    def peak(self) -> float:
        return float(self.library.qb_peak(ctypes.byref(self.context)))

    def bandwidth(self) -> float:
        pointer = ctypes.c_void_p(self.memory.ctypes.data)
        return float(self.library.qb_read(ctypes.byref(self.context), pointer, ctypes.c_int64(self.memory.size)))

    def engine(self, spec: KernelSpec, kind: str, arrays: Sequence[npt.NDArray[Any]], m: int, nbytes: int) -> Engine:
        kernel = ctypes.cast(self.library[f"qk_{spec.name}"], ctypes.c_void_p)
        operands = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        symbols = (ctypes.c_int64 * 1)(m)

        def run(times: int) -> float:
            keep = arrays  # the addresses above point into them
            call = self.library.qb_call(kernel, ctypes.byref(self.context), operands, symbols, ctypes.c_int64(times))
            del keep
            return float(call)

        return Engine(kind, run, nbytes)


def now() -> float:
    return time.process_time() if CPU_TIME else time.perf_counter()


def torch_engine(
    x: npt.NDArray[Any], w: npt.NDArray[Any], bias: npt.NDArray[Any], dtype: torch.dtype = torch.float32
) -> Engine:
    tensors = [torch.from_numpy(array).to(dtype) for array in (x, w, bias)]

    def run(times: int) -> float:
        start = now()
        for _ in range(times):
            torch.nn.functional.linear(*tensors)
        return (now() - start) / times

    nbytes = tensors[1].numel() * tensors[1].element_size()
    return Engine("torch" + BF16 * (dtype == torch.bfloat16), run, nbytes)


def int_mm_engine(m: int, n: int, k: int) -> Engine:
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (n, k)))

    def run(times: int) -> float:
        start = now()
        for _ in range(times):
            torch._int_mm(a, b.t())
        return (now() - start) / times

    return Engine("_int_mm", run, n * k)


def make_case(bench: Bench, m: int, n: int, k: int) -> list[Engine]:
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    w = rng.standard_normal((n, k)).astype(np.float32)
    engines = [torch_engine(x, w, bias)]
    if any(kind.endswith(BF16) for kind in FORMATS):
        engines.append(torch_engine(x, w, bias, torch.bfloat16))
    for kind, chosen in FORMATS.items():
        fmt = None if chosen is None else formats.get(chosen[0], **chosen[1])
        ref = None if chosen is None else FormatRef(name=chosen[0], params=chosen[1])
        layout, dtype = layouts.get(layout_of(kind, ref)), dtype_of(kind)
        numbers = NUMPY_DTYPES[dtype]
        canonical = w.astype(numbers).view(np.uint8).reshape(-1) if fmt is None else fmt.encode(w).data
        data = aligned(layout.pack(fmt, dtype, n, k, canonical))
        given = quantise(x, "token", 0.0, None) if kind.endswith(CODES) else x.astype(numbers)
        arrays: list[npt.NDArray[Any]] = [given, data, bias.astype(numbers), np.zeros((m, n), numbers)]
        engines.append(bench.engine(make_spec(kind, m, n, k), kind, arrays, m, data.size))
    if any(kind.endswith(CODES) for kind in FORMATS):
        made = np.zeros((m, row_bytes(k)), np.int8)
        engines.append(bench.engine(rows_spec(k), "rows", [x, made], m, x.nbytes))
        engines += [int_mm_engine(m, n, k)] if m > 16 else []
    for engine in engines:
        once = min(engine.run(1) for _ in range(3))
        engine.calls = max(1, int(BATCH_SECONDS / max(once, 1e-7)))
    return engines


def measure(bench: Bench, engines: list[Engine], rounds: int) -> tuple[dict[str, float], float, float]:
    """(median seconds per call by engine, median peak in FLOP/s, median bandwidth in byte/s)."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    peaks, reads = [], []
    for turn in range(rounds):
        # The call after torch shares the cores with torch's spinning threads, so each kernel takes that place in turn.
        first = turn % len(engines)
        for engine in (*engines[first:], *engines[:first])[:: 1 if turn % 2 else -1]:
            time.sleep(0.003)  # the other engine's threads stop spinning
            engine.run(1)
            times[engine.name].append(engine.run(engine.calls))
        peaks.append(bench.peak())
        reads.append(bench.bandwidth())
    return {name: statistics.median(t) for name, t in times.items()}, statistics.median(peaks), statistics.median(reads)


def rows(bench: Bench, m: int, n: int, k: int, rounds: int) -> list[dict[str, Any]]:
    engines = make_case(bench, m, n, k)
    times, peak, read = measure(bench, engines, rounds)
    flops = 2.0 * m * n * k
    return [
        {
            "n": n, "k": k, "m": m, "engine": engine.name, "us": 1e6 * times[engine.name],
            "gflops": flops / times[engine.name] / 1e9, "of_peak": flops / times[engine.name] / peak,
            "gbytes": engine.weight_bytes / times[engine.name] / 1e9,
            "of_bandwidth": engine.weight_bytes / times[engine.name] / read,
            "speedup": times["torch"] / times[engine.name], "peak_gflops": peak / 1e9, "read_gbytes": read / 1e9,
        }
        for engine in engines
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--m", type=int, nargs="*", default=list(MS))
    parser.add_argument("--formats", nargs="*", help="formats with their default parameters, instead of the usual four")
    parser.add_argument("--shapes", nargs="*", default=[f"{n}x{k}" for n, k in SHAPES], metavar="NxK")
    parser.add_argument("--bf16", action="store_true", help="each format in bf16 as well, and torch's linear")
    parser.add_argument("--int8", action="store_true", help="products of codes with rows of int8 beside fp32 ones")
    parser.add_argument("--older", action="store_true", help="the older layout as well, where it has other bytes")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, with one thread")
    parser.add_argument("--json", default=None, help="also write every row to this file")
    options = parser.parse_args()
    global CPU_TIME  # noqa: PLW0603
    CPU_TIME = options.cpu_time
    if options.formats:
        FORMATS.clear()
        FORMATS.update({name: (name, {}) for name in options.formats})
    if options.int8:
        chosen = {kind: FORMATS[kind] for kind in ("int8", "int4")}
        FORMATS.clear()
        FORMATS.update(chosen | {kind + CODES: each for kind, each in chosen.items()})
    if options.older:
        for kind, chosen in list(FORMATS.items()):
            ref = None if chosen is None else FormatRef(name=chosen[0], params=chosen[1])
            if layout_of(kind, ref) != layout_of(OLDER, ref):
                FORMATS[OLDER + kind] = chosen
    if options.bf16:
        FORMATS.update({kind + BF16: chosen for kind, chosen in FORMATS.items() if not kind.endswith(CODES)})
    shapes = [(int(n), int(k)) for n, _, k in (text.partition("x") for text in options.shapes)]
    threads = resolve_num_threads(options.threads)
    torch.set_num_threads(threads)
    specs = [make_spec(kind, m, n, k) for n, k in shapes for m in options.m for kind in FORMATS]
    bench = Bench([*specs, *(rows_spec(k) for k in sorted({k for _, k in shapes}) if options.int8)], threads)
    print(f"{threads} threads, {host_isa()}, torch {torch.__version__}, medians of {options.rounds}")
    print(
        f"{'N x K':>10} {'M':>5} {'engine':>10} {'us':>9} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>6} {'of read':>8} "
        f"{'x torch':>8}"
    )
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for n, k in shapes:
            for m in options.m:
                for row in rows(bench, m, n, k, options.rounds):
                    found.append(row)
                    print(
                        f"{n:>5}x{k:<4} {m:>5} {row['engine']:>10} {row['us']:>9.1f} {row['gflops']:>8.1f} "
                        f"{row['of_peak']:>8.1%} {row['gbytes']:>6.1f} {row['of_bandwidth']:>8.1%} "
                        f"{row['speedup']:>8.2f}"
                    )
                    sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
