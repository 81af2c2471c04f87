"""Where the time of a decode step on the CPU goes, and what a parallel region costs.

    python benchmarks/profile_cpu.py                     # hidden 256, 1024 and 2048, one thread and two
    python benchmarks/profile_cpu.py --hidden 256 --rounds 500

The Llama of merged_cpu.py: four layers, random weights, a static cache, one token.  The programs with one thread and
with two take turns, `--turns` times; the figures are the least of the turns' medians, since other work on the machine
only adds.  Then regions of empty tasks are timed: with workers that spin, and with workers that sleep.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from merged_cpu import programs

import qcompiler as qc
from qcompiler.runtime.compiler import compile_library
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.profile import PRODUCTS, Profile
from qcompiler.runtime.session import make_context

POSITION = 100

PROBE = r"""
static void nothing(void*, int64_t, char*) {}
extern "C" void region(qc_ctx* ctx, int64_t tasks, int64_t repeats) {
    for (int64_t i = 0; i < repeats; ++i) ctx->parallel(ctx, tasks, nothing, nullptr);
}
"""


def profiles(hidden: int, quant: str, threads: Sequence[int], rounds: int, turns: int) -> list[tuple[Profile, float]]:
    """For each number of threads the profile with the least time in steps, and the microseconds of a call outside of
    the compiled function."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.qca"
        programs(hidden, quant, ())[0].save(path)
        runs = [qc.load(path, num_threads=count) for count in threads]
        given = {"input_ids": np.ones((1, 1), np.int64), "cache_position": np.array([POSITION])}
        found = [[run.profile(**given, rounds=rounds) for run in runs] for _ in range(turns)]
    return [
        (
            min(own, key=lambda each: each.steps_us),
            min(each.call_us for each in own) - min(each.entry_us for each in own),
        )
        for own in zip(*found, strict=True)
    ]


def row(hidden: int, quant: str, found: Profile, outside: float) -> str:
    kinds = {each.kind: each for each in found.kinds()}
    products = sum(kinds[kind].us for kind in PRODUCTS if kind in kinds)
    attention = kinds["attention"].us
    others = [step for step in found.steps if step.kind not in (*PRODUCTS, "attention")]
    return (
        f"| {hidden} | {quant} | {found.threads} | {products:.1f} | {attention:.1f} | "
        f"{sum(step.us for step in others):.1f} ({len(others)}) | {sum(step.regions for step in found.steps)} of "
        f"{len(found.steps)} | {outside:.1f} | {found.not_product:.1%} |"
    )


def region_ns(threads: int, tasks: int, *, asleep: bool) -> float:
    """Nanoseconds of a region of empty tasks on the calling thread, the median of many."""
    abi = resources.files("qcompiler.kernels.cpu").joinpath("abi.h").read_text().replace("#pragma once\n", "")
    region = ctypes.CDLL(str(compile_library(abi + PROBE, host_isa()))).region
    context = make_context(threads, 64)
    repeats, times = 1 if asleep else 1000, []
    for _ in range(200):
        if asleep:
            time.sleep(1e-3)  # workers spin for 50 µs
        began = time.perf_counter_ns()
        region(ctypes.byref(context), ctypes.c_int64(tasks), ctypes.c_int64(repeats))
        times.append((time.perf_counter_ns() - began) / repeats)
    return float(np.median(times))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    given: Any = parser.parse_args(arguments)
    print("| hidden | format | threads | products, µs | attention, µs | others, µs (launches) | regions | outside, µs |"
          " not products |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for hidden in given.hidden:
        for found in profiles(hidden, given.quant, given.threads, given.rounds, given.turns):
            print(row(hidden, given.quant, *found), flush=True)
    threads = max(given.threads)
    print()
    for tasks in (threads, 4 * threads):
        awake, asleep = (region_ns(threads, tasks, asleep=each) / 1e3 for each in (False, True))
        alone = region_ns(1, tasks, asleep=False) / 1e3
        print(f"a region of {tasks} empty tasks: {awake:.2f} µs with {threads} threads awake, {asleep:.1f} µs of the "
              f"caller's with workers asleep, {alone:.2f} µs with one thread", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
