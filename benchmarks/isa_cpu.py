"""Linears on every instruction set that this machine runs, interleaved in one run.

    python benchmarks/isa_cpu.py [--threads 1] [--cpu-time] [--rounds 9] [--m 1 8 128] [--size 2048] [--json out.json]

Prints a table of 10^9 operations per second, medians of all rounds: a row for each format, arithmetic and number of
rows, a column for each way to compute. The ways are those that `QC_ISA` and `QC_INT8` force. On a processor without
AVX-VNNI but with AVX-512 VNNI, AVX2's kernels with AVX-VNNI run in the EVEX encoding of the same instruction.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpubench.linears import Product, linear_spec, numbers, operands, packed, specs_of
from cpubench.probes import Bench

from qcompiler.runtime.int8_units import UNITS
from qcompiler.runtime.isa import cpuinfo_flags, supported_isas

FORMATS: dict[str, dict[str, Any]] = {"nf4": {}, "int4": {"group": 32}, "q4_K": {}, "int8": {}}
PRODUCTS = [
    *(Product(name, name, params) for name, params in FORMATS.items()),
    *(Product(name, name, params, "int8") for name, params in FORMATS.items() if name != "nf4"),
]  # fmt: skip
"""nf4 has no products of integers."""

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


def callers(benches: dict[str, Bench], product: Product, m: int, size: int) -> dict[str, Callable[[int], float]]:
    """For each way: seconds of a call, the mean of some."""
    x, bias, _ = numbers(m, size, size)
    given = operands(product, x, packed(product, size, size), bias)
    spec = linear_spec(product, m, size, size)
    return {title: bench.caller(spec, given, [m]) for title, bench in benches.items()}


def measured(calls: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in rounds that alternate their order."""
    times: dict[str, list[float]] = {title: [] for title in calls}
    counts = {title: max(1, int(SECONDS / max(call(1), 1e-7))) for title, call in calls.items()}
    for turn in range(rounds):
        for title in list(calls)[:: 1 if turn % 2 else -1]:
            times[title].append(calls[title](counts[title]))
    return {title: statistics.median(each) for title, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, with one thread")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--m", type=int, nargs="*", default=[1, 8, 128])
    parser.add_argument("--size", type=int, default=2048, help="N and K")
    parser.add_argument("--json", default=None, help="also write every figure to this file")
    options = parser.parse_args()
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
            seconds = measured(callers(benches, product, m, size), options.rounds)
            rates = {title: 2e-9 * m * size * size / each for title, each in seconds.items()}
            inputs = "int8" if product.codes else "floats"
            found.append({"format": product.label, "inputs": inputs, "m": m, "size": size, "gops": rates})
            cells = " | ".join(f"{rate:.0f}" for rate in rates.values())
            print(f"| {product.label} | {inputs} | {m} | {cells} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
