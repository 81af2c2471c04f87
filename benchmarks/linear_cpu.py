"""Linear kernels beside torch's fp32 linear, per shape and M, in one interleaved run.

    .venv/bin/python benchmarks/linear_cpu.py [--rounds 15] [--threads 2] [--m 1 32 4096] [--json out.json]
        [--formats nf4 q4_K tq:bits=3] [--shapes 4096x4096] [--int8] [--bf16] [--dots] [--older] [--cpu-time]

Every round times each kernel once for each case (short calls in batches), in a varying order, so that a slow moment of
the machine affects all of them; the table gives medians. The same run also measures fused multiply-adds on all threads
(peak), and reading memory far larger than the caches (bandwidth). torch is timed through its Python call, our kernels
are called from C++.

With `--cpu-time` clocks count processor time: for one thread on a shared machine.

With `--int8` the table has products of codes beside those of decoded values: "int8 a8" and "int4 a8" read rows of int8,
"rows" is the time to make these from fp32, "_int_mm" is torch's product of int8 matrices (int32 out, from 17 rows on).

With `--bf16` each format stands twice, with x, bias and result in fp32 and ("nf4 bf16") in bf16, and so does torch.

With `--dots` those in bf16 stand once more ("nf4 bf16 dots"), and those in fp32 ("q4_K fma"), without tiles of AMX.

With `--older` so does each format that has other bytes in cpu_p16_v1 ("v1 q4_K"), the layout of programs saved before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cpubench.linears import SUFFIX, Product, linear_spec, numbers, operands, packed, rows_spec, specs_of, weight
from cpubench.probes import Bench

from qcompiler.config import resolve_format
from qcompiler.formats.int8_rows import row_bytes
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.threads import resolve_num_threads

SHAPES = ((384, 384), (1536, 384), (384, 1536))
MS = (1, 8, 32, 512, 4096)
USUAL = (Product("nf4", "nf4", {"block": 64}), Product("int4", "int4", {"group": 32}), Product("int8", "int8"),
         Product("f32"))  # fmt: skip

BATCH_SECONDS = 500e-6
"""Calls shorter than this are timed in batches of about this length."""


@dataclass
class Engine:
    """One way to compute a case: `run(times)` returns seconds per call; `weight_bytes` are read once per call."""

    name: str
    run: Callable[[int], float]
    weight_bytes: int
    calls: int = 1


def timed(call: Callable[[], object], now: Callable[[], float]) -> Callable[[int], float]:
    """`run` of an engine that is called from Python."""

    def run(times: int) -> float:
        start = now()
        for _ in range(times):
            call()
        return (now() - start) / times

    return run


def torch_engine(arrays: Sequence[npt.NDArray[Any]], dtype: torch.dtype, now: Callable[[], float]) -> Engine:
    x, w, bias = (torch.from_numpy(array).to(dtype) for array in arrays)
    name = "torch" + SUFFIX["bf16"] * (dtype == torch.bfloat16)
    run = timed(lambda: torch.nn.functional.linear(x, w, bias), now)
    return Engine(name, run, w.numel() * w.element_size())


def int_mm_engine(m: int, n: int, k: int, now: Callable[[], float]) -> Engine:
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (n, k)))
    return Engine("_int_mm", timed(lambda: torch._int_mm(a, b.t()), now), n * k)


def make_case(
    bench: Bench, products: Sequence[Product], m: int, n: int, k: int, now: Callable[[], float], *, dots: bool = False
) -> list[Engine]:
    x, bias, _ = numbers(m, n, k)
    given = x, weight(n, k), bias
    engines = [torch_engine(given, torch.float32, now)]
    if any(product.arithmetic == "bf16" for product in products):
        engines.append(torch_engine(given, torch.bfloat16, now))
    for product in products:
        data = packed(product, n, k)
        call = bench.caller(linear_spec(product, m, n, k), operands(product, x, data, bias), [m])
        engines.append(Engine(product.name, call, data.size))
        if dots and (other := {"bf16": "dots", "exact": "fma"}.get(product.arithmetic)):
            call = bench.caller(linear_spec(product, m, n, k), operands(product, x, data, bias), [m], dots=True)
            engines.append(Engine(f"{product.name} {other}", call, data.size))
    if any(product.codes for product in products):
        made = np.zeros((m, row_bytes(k)), np.int8)
        engines.append(Engine("rows", bench.caller(rows_spec(k), [x, made], [m]), x.nbytes))
        engines += [int_mm_engine(m, n, k, now)] if m > 16 else []
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


def rows(bench: Bench, engines: list[Engine], m: int, n: int, k: int, rounds: int) -> list[dict[str, Any]]:
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


def chosen_products(options: argparse.Namespace) -> list[Product]:
    """The products that the options ask for."""
    given = [(text, resolve_format(text)) for text in options.formats or ()]
    found = [Product(text, fmt.name, dict(fmt.params)) for text, fmt in given] or list(USUAL)
    if options.int8:
        found = [each for each in USUAL if each.label in ("int8", "int4")]
        found += [replace(each, arithmetic="int8") for each in found]
    if options.older:
        older = (replace(each, older=True) for each in found)
        found += [each for each in older if each.layout != replace(each, older=False).layout]
    if options.bf16:
        found += [replace(each, arithmetic="bf16") for each in found if not each.codes]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--m", type=int, nargs="*", default=list(MS))
    parser.add_argument("--formats", nargs="*", help="formats (tq, tq:bits=3) instead of the usual four")
    parser.add_argument("--shapes", nargs="*", default=[f"{n}x{k}" for n, k in SHAPES], metavar="NxK")
    parser.add_argument("--bf16", action="store_true", help="each format in bf16 as well, and torch's linear")
    parser.add_argument("--dots", action="store_true", help="also without tiles of AMX")
    parser.add_argument("--int8", action="store_true", help="products of codes with rows of int8 beside fp32 ones")
    parser.add_argument("--older", action="store_true", help="the older layout as well, where it has other bytes")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, with one thread")
    parser.add_argument("--json", default=None, help="also write every row to this file")
    options = parser.parse_args()
    now = time.process_time if options.cpu_time else time.perf_counter
    products = chosen_products(options)
    shapes = [(int(n), int(k)) for n, _, k in (text.partition("x") for text in options.shapes)]
    threads = resolve_num_threads(options.threads)
    torch.set_num_threads(threads)
    bench = Bench(specs_of(products, options.m, shapes), threads, cpu_time=options.cpu_time)
    print(f"{threads} threads, {host_isa()}, torch {torch.__version__}, medians of {options.rounds}")
    print(
        f"{'N x K':>10} {'M':>5} {'engine':>10} {'us':>9} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>6} {'of read':>8} "
        f"{'x torch':>8}"
    )
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for n, k in shapes:
            for m in options.m:
                for row in rows(
                    bench, make_case(bench, products, m, n, k, now, dots=options.dots), m, n, k, options.rounds
                ):
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
