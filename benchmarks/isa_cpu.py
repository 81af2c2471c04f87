"""Linears on every instruction set that this machine runs, interleaved in one run.

    python benchmarks/isa_cpu.py [--threads 1] [--cpu-time] [--rounds 9] [--m 1 8 128] [--size 2048] [--json out.json]
        [--amx] [--formats int8 int4:group=128] [--shape 2048x5632]

Prints a table of 10^9 operations per second, medians of all rounds: a row for each format, arithmetic and number of
rows, a column for each way to compute. The ways are those that `QC_ISA` and `QC_INT8` force. On a processor without
AVX-VNNI but with AVX-512 VNNI, AVX2's kernels with AVX-VNNI run in the EVEX encoding of the same instruction.

With `--amx` the products are those of int8 rows, by tiles of AMX and by `vpdpbusd`, and torch's `_int_mm` (int32 out,
from 17 rows on) and linears in bf16 stand beside them. A last column has the tiles' share of what the same run measures
as their limit (runtime/probes.cpp), in pairs of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpubench.linears import Product, linear_spec, numbers, operands, packed, specs_of
from cpubench.probes import Bench

from qcompiler.config import resolve_format
from qcompiler.runtime.amx import INT8_FLAGS, tiles_refused
from qcompiler.runtime.int8_units import UNITS
from qcompiler.runtime.isa import cpuinfo_flags, supported_isas

FORMATS: dict[str, dict[str, Any]] = {"nf4": {}, "int4": {"group": 32}, "q4_K": {}, "int8": {}}
PRODUCTS = [
    *(Product(name, name, params) for name, params in FORMATS.items()),
    *(Product(name, name, params, "int8") for name, params in FORMATS.items() if name != "nf4"),
]  # fmt: skip
"""nf4 has no products of integers."""

AMX_FORMATS = (
    "int8", "int8:group=128", "int4:group=128", "int4:group=32", "q4_0", "q8_0", "q4_K", "q5_K", "q6_K", "q3_K",
)  # fmt: skip

SECONDS = 2e-3
"""Of each measurement."""


@dataclass(frozen=True)
class Way:
    """An instruction set, the instructions that multiply int8, and text in front of the kernels."""

    title: str
    isa: str
    units: str = "vnni"
    before: str = ""


def ways() -> list[Way]:
    """Those of this machine."""
    flags, isas = cpuinfo_flags(Path("/proc/cpuinfo")) or frozenset(), supported_isas()
    found = []
    if "x86-64-v4" in isas:
        found += [Way("AVX-512", "x86-64-v4"), Way("AVX-512, pairs", "x86-64-v4", "pairs")]
    if "x86-64-v3" in isas:
        if "avx_vnni" in flags:
            found.append(Way("AVX2, AVX-VNNI", "x86-64-v3"))
        elif {"avx512vl", "avx512_vnni"} <= flags:
            found.append(Way("AVX2, AVX-VNNI as EVEX", "x86-64-v3", before="#define QI_EVEX 1\n"))
        found.append(Way("AVX2", "x86-64-v3", "pairs"))
    return [*found, Way(f"plain {isas[0]}", isas[0], "pairs")]


AMX, VNNI = Way("AMX", "x86-64-v4", "amx"), Way("AVX-512 VNNI", "x86-64-v4")
LIMIT = "limit of AMX"


def callers(benches: dict[str, Bench], product: Product, m: int, n: int, k: int) -> dict[str, Callable[[int], float]]:
    """For each way: seconds of a call, the mean of some."""
    x, bias, _ = numbers(m, n, k)
    given = operands(product, x, packed(product, n, k), bias)
    spec = linear_spec(product, m, n, k)
    return {title: bench.caller(spec, given, [m]) for title, bench in benches.items()}


def peers(bench: Bench, m: int, n: int, k: int) -> dict[str, Callable[[int], float]]:
    """torch's products, and the seconds that the tiles' limit allows."""
    import torch

    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (n, k)))
    x, w = (torch.randn(shape).bfloat16() for shape in ((m, k), (n, k)))
    bias, columns = torch.randn(n).bfloat16(), b.t()

    def timed(call: Callable[[], object]) -> Callable[[int], float]:
        def run(times: int) -> float:
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times

        return run

    found = {"torch bf16": timed(lambda: torch.nn.functional.linear(x, w, bias))}
    if m > 16:
        found["torch _int_mm"] = timed(lambda: torch._int_mm(a, columns))
    context = ctypes.byref(bench.context)
    return {**found, LIMIT: lambda times: 2.0 * m * n * k / bench.library.qb_int8(context)}


def measured(calls: dict[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in rounds that alternate their order."""
    times: dict[str, list[float]] = {title: [] for title in calls}
    titles = list(calls)
    counts = {title: max(1, int(SECONDS / max(call(1), 1e-7))) for title, call in calls.items()}
    for turn in range(rounds):
        # Each takes the place behind another's calls in turn: their weights lie in the caches, and the clock takes a
        # while to rise behind products by AMX.
        first = turn % len(calls)
        for title in [*titles[first:], *titles[:first]][:: 1 if turn % 2 else -1]:
            time.sleep(0.003)
            calls[title](1)
            times[title].append(calls[title](counts[title]))
    return times


def measure_amx(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table of AMX, printed as they are measured."""
    import torch

    if (why := tiles_refused(INT8_FLAGS)) is not None:
        raise SystemExit(why)
    torch.set_num_threads(options.threads)
    n, k = (int(each) for each in options.shape.split("x"))
    chosen = [(text, resolve_format(text)) for text in options.formats]
    products = [Product(text, fmt.name, dict(fmt.params), "int8") for text, fmt in chosen]
    benches = {
        way.title: Bench(specs_of(products, options.m, [(n, k)]), options.threads, isa=way.isa, units=UNITS[way.units])
        for way in (AMX, VNNI)
    }
    print(f"{n} x {k}, {options.threads} threads, medians of {options.rounds}; us")
    print("| weights | M | AMX | AVX-512 VNNI | torch _int_mm | torch bf16 | VNNI by AMX | AMX by its limit |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    found = []
    for product in products:
        for m in options.m:
            calls = {**callers(benches, product, m, n, k), **peers(benches["AMX"], m, n, k)}
            times = measured(calls, options.rounds)
            us = {title: 1e6 * statistics.median(each) for title, each in times.items()}
            ratio, share = (
                statistics.median(a / b for a, b in zip(times[title], times["AMX"], strict=True))
                for title in (VNNI.title, LIMIT)
            )
            found.append({
                "n": n, "k": k, "threads": options.threads, "format": product.label, "m": m, "us": us,
                "vnni_by_amx": ratio, "share_of_limit": share,
            })  # fmt: skip
            cells = (
                f"{us[each]:.0f}" if each in us else "" for each in ("AMX", VNNI.title, "torch _int_mm", "torch bf16")
            )
            print(f"| {product.label} | {m} | {' | '.join(cells)} | {ratio:.2f} | {share:.2f} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, with one thread")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--m", type=int, nargs="*", default=[1, 8, 128])
    parser.add_argument("--size", type=int, default=2048, help="N and K")
    parser.add_argument(
        "--amx", action="store_true", help="products of int8 rows by AMX, beside AVX-512 VNNI and torch"
    )
    parser.add_argument("--formats", nargs="+", default=list(AMX_FORMATS), help="formats for --amx")
    parser.add_argument("--shape", default="4096x4096", metavar="NxK", help="of the weight, for --amx")
    parser.add_argument("--json", default=None, help="also write every figure to this file")
    options = parser.parse_args()
    if options.amx:
        rows = measure_amx(options)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return
    size, specs = options.size, specs_of(PRODUCTS, options.m, [(options.size, options.size)])
    benches = {
        way.title: Bench(
            specs, options.threads, cpu_time=options.cpu_time, isa=way.isa, units=UNITS[way.units], before=way.before
        )
        for way in ways()
    }
    print("| weights | inputs | M | " + " | ".join(benches) + " |")
    print("|---|---|---:|" + "---:|" * len(benches))
    found: list[dict[str, Any]] = []
    for product in PRODUCTS:
        for m in options.m:
            times = measured(callers(benches, product, m, size, size), options.rounds)
            seconds = {title: statistics.median(each) for title, each in times.items()}
            rates = {title: 2e-9 * m * size * size / each for title, each in seconds.items()}
            inputs = "int8" if product.codes else "floats"
            found.append({"format": product.label, "inputs": inputs, "m": m, "size": size, "gops": rates})
            cells = " | ".join(f"{rate:.0f}" for rate in rates.values())
            print(f"| {product.label} | {inputs} | {m} | {cells} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
