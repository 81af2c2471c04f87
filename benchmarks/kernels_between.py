"""Two versions of the CPU's kernels in one process, in turns: what a change of the headers in kernels/cpu is worth.

    .venv/bin/python benchmarks/kernels_between.py --before 83d3faa5 --products nf4:exact q4_K:bf16 q4_0:int8
        [--m 8 32 128] [--shapes 4096x4096 2048x5632] [--rounds 9] [--threads 2] [--cached] [--json out.json]
        [--without=-mtune=icelake-server]

The headers of `--before`, a revision of this repository, and those of the working tree are compiled with the same
emitted kernels. Each round times both, in alternating order, and the probes of the machine's rates; the table gives
the median of the time over that of the kernels before, taken within rounds, and the share of the rate of the
arithmetic. A weight is in memory when its turn comes, as in matmul_cpu.py; with `--cached` two copies of it take turns.
Headers whose kernels are emitted in another way, or take more scratch, do not compile against this tree. `--without`
leaves flags of the compiler out of the kernels before: with `--before HEAD`, and nothing changed since, the table says
what these are worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from cpubench import ours
from cpubench.linears import KIND, Product
from cpubench.probes import Bench
from cpubench.turns import ROOT, about, in_turns

from qcompiler.config import parse_format
from qcompiler.kernels.cpu import emit
from qcompiler.runtime import compiler
from qcompiler.runtime.isa import host_isa

LEAST = 0.02
"""Seconds of a turn."""


@dataclass
class Cell:
    """One product: seconds of both versions, the median of their ratios, and the share of the arithmetic's rate."""

    product: str
    m: int
    n: int
    k: int
    before: float
    after: float
    ratio: float
    of_rate: float


def headers_of(revision: str) -> Callable[[str], str]:
    """emit.py's `header`, from a revision."""

    def read(name: str) -> str:
        command = ["git", "-C", str(ROOT), "show", f"{revision}:kernels/cpu/{name}"]
        return emit.alone(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return read


def flags_without(left_out: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """compiler.py's `flags_for`, with some flags left out."""
    flags_for = compiler.flags_for
    unknown = set(left_out) - set(flags_for(host_isa()))
    if unknown:
        raise SystemExit(f"the compiler gets no {', '.join(sorted(unknown))}, but {' '.join(flags_for(host_isa()))}")
    return lambda isa: tuple(flag for flag in flags_for(isa) if flag not in left_out)


def product_of(text: str) -> Product:
    """From a text like "nf4:block=64:bf16": a format, or float, and the arithmetic behind the last colon."""
    name, _, arithmetic = text.rpartition(":")
    if arithmetic not in KIND:
        raise SystemExit(f"'{text}': the arithmetic is one of {', '.join(KIND)}, as in nf4:exact")
    if name == "float":
        return Product("float", arithmetic=arithmetic)
    ref = parse_format(name)
    return Product(name, ref.name, dict(ref.params), arithmetic)


def measure(benches: Sequence[Bench], product: Product, m: int, n: int, k: int, rounds: int, total: int) -> Cell:
    """Times both in turns. `total`: bytes of all copies of the weight."""
    runners = [ours.runner(bench, product, m, n, k, total) for bench in benches]
    rates = []

    def probe() -> None:
        limits = benches[0].limits(1)
        rates.append(getattr(limits, runners[0].kind) or limits.fp32)

    works = [lambda _, runner=runner: runner.turn(LEAST) for runner in runners]
    before, after, ratio = in_turns(works, rounds, probe)
    return Cell(product.name, m, n, k, before, after, ratio, 2 * m * n * k / statistics.median(rates) / after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, help="a revision of this repository")
    parser.add_argument("--products", nargs="+", required=True, type=product_of)
    parser.add_argument("--m", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096"], help="NxK")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--without", action="append", default=[], metavar="FLAG", help="of the compiler, before")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    total = 1 if given.cached else ours.TIMES_THE_CACHE * ours.cache_bytes()
    cells = []
    for shape in given.shapes:
        n, k = (int(size) for size in shape.split("x"))
        specs = [spec for product in given.products for m in given.m for spec in ours.specs(product, m, n, k)]
        with (
            mock.patch.object(emit, "header", headers_of(given.before)),
            mock.patch.object(compiler, "flags_for", flags_without(given.without)),
        ):
            before = Bench(specs, given.threads)
        after = Bench(specs, given.threads)
        after.context, after.dots = before.context, before.dots  # the same memory: where scratch lies counts
        benches = [before, after]
        for product in given.products:
            for m in given.m:
                cell = measure(benches, product, m, n, k, given.rounds, total)
                cells.append(cell)
                print(
                    f"{cell.product:16s} {shape:10s} M = {m:4d}  {cell.before * 1e6:9.1f} -> {cell.after * 1e6:9.1f} us"
                    f"  {cell.ratio:5.2f} of the time  {cell.of_rate:4.0%} of the rate",
                    flush=True,
                )
    if given.json:
        what = about(
            before=given.before, isa=host_isa(), threads=given.threads, rounds=given.rounds, cached=given.cached,
            without=given.without,
        )  # fmt: skip
        given.json.write_text(json.dumps(what | {"cells": [asdict(cell) for cell in cells]}, indent=1))


if __name__ == "__main__":
    main()
