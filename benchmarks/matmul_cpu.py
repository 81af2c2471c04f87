"""Our linears beside other projects' on the CPU, in one interleaved run; the share of the machine's limit; growth.

    python benchmarks/matmul_cpu.py --json FILE                      # 4096 x 4096, a few formats, all peers
    python benchmarks/matmul_cpu.py --formats all --growth --json FILE --write docs/performance.md
    python benchmarks/matmul_cpu.py --read FILE --write docs/performance.md    # the page from an earlier run
    python benchmarks/matmul_cpu.py --m 1 32 --shapes 1024x512 --rounds 2 --peers   # ours alone

A *product* is x (M, K) times a weight (N, K).  Ours are named by their format: "nf4" multiplies in fp32, "nf4 bf16" has
x and result in bf16, "int4 a8" multiplies codes by rows of int8, which it makes each time.  The peers are torch,
onnxruntime, openvino, bitsandbytes, torchao and llama.cpp, each in a process of its own (cpupeers/), which takes turns
with us.  `make bench-peers` installs them in `.venv-peers`; `--peers-python` names another environment.  One that is
missing, or a product that it cannot compute, is in the table with the reason.

Each product is measured on copies of its weight, four times the largest cache together (at 128 rows and more, where
reading the weight takes little of the time, one and a quarter), so that every call reads it from memory, as in a model.
With all formats these copies take 12 GB where the cache has 32 MiB.  A *cell* is a shape and a number of rows.  In each
of its rounds every product has a turn, in a varying order; the table has medians.  The error is relative to the product
in fp32: it shows that everybody computes the same.

Before and after a cell the machine's limits are measured: reading memory, and the rate of each kind of arithmetic
(qcompiler/runtime/limits.py).  The time that the limit allows is that of the bytes (weight, x, result) or of the
operations, whichever is longer; "limit" is its share of the time that was measured, "by" says which it is.  A cell
during which other processes took more than 3 % of the cores is measured again, `--tries` times at most, and is then
marked.

`--growth` measures our products against M, N and K on one thread and on two.  Points above 1.3 times the trend of
their neighbours are measured again; those that stay there are listed and circled.  A line that others disturbed is
measured again like a cell.

`--write` puts tables and plots between the markers of a page: those of cells, those of growth, or both.  Nobody is
pinned to a core; all have `--threads`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cpubench import growth, ours, peers, quiet, tables
from cpubench.linears import Arithmetic, Product, specs_of
from cpubench.probes import Bench
from cpubench.processor import processor

from qcompiler import formats
from qcompiler.config import parse_format
from qcompiler.errors import UnknownFormatError
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.limits import Limits, middle

FORMATS = ("float", "nf4", "int4", "q4_K", "int8")
GROWTH = (("nf4", "exact"), ("nf4", "bf16"), ("int4", "int8"))
M_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512)
SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SIDE = 2048
MANY = 128
"""From so many rows on reading a weight takes a few percent of the time, and fewer copies will do."""

PAUSE = 0.02
"""Seconds before a turn: threads of the turn before, or of NumPy's product, still look for work for a while."""

ARITHMETIC: tuple[Arithmetic, ...] = ("exact", "bf16", "int8")


def product_of(text: str, arithmetic: Arithmetic = "exact") -> Product:
    """UnknownFormatError lists the formats."""
    if text == "float":
        return Product("float", arithmetic=arithmetic)
    ref = parse_format(text)
    return Product(text, ref.name, dict(ref.params), arithmetic)


def products_of(names: Sequence[str]) -> list[Product]:
    """Each format in each arithmetic, "all" for every format; plain weights have no codes to multiply."""
    listed = ["float", *formats.names()] if list(names) == ["all"] else names
    return [product_of(name, kind) for name in listed for kind in ARITHMETIC if (name, kind) != ("float", "int8")]


# --- cells -----------------------------------------------------------------------------------------------------------


def turns(runners: Sequence[ours.Runner], rounds: int, least: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """(seconds of a product in each round, why runners stopped). Every round begins with another runner, and every
    second one goes backwards: threads of the runner before may still be awake, so each takes every place."""
    found: dict[str, list[float]] = {each.name: [] for each in runners}
    stopped: dict[str, str] = {}
    for turn in range(rounds):
        first = turn % len(runners)
        for each in [*runners[first:], *runners[:first]][:: 1 if turn % 2 else -1]:
            if each.name not in stopped:
                time.sleep(PAUSE)
                try:
                    found[each.name].append(each.turn(least))
                except peers.PeerError as error:
                    stopped[each.name] = str(error)
    return {name: times for name, times in found.items() if name not in stopped}, stopped


def row(runner: ours.Runner, times: Sequence[float], limits: Limits, m: int, n: int, k: int) -> dict[str, Any]:
    """What a table says of a product. Rows and results count with four bytes an element, in bf16 with two."""
    low, middle_time, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    nbytes = runner.weight_bytes + (2 if runner.kind == "bf16" else 4) * m * (n + k)
    least = limits.seconds(runner.kind, 2.0 * m * n * k, nbytes)
    return {
        "product": runner.name, "kind": runner.kind, "ours": runner.ours, "us": 1e6 * middle_time, "low_us": 1e6 * low,
        "high_us": 1e6 * high, "weight_bytes": runner.weight_bytes, "copies": runner.copies, "error": runner.error,
        "of_limit": None if least is None else least[0] / middle_time, "bound": None if least is None else least[1],
    }  # fmt: skip


class Run:
    """The kernels, the peers' processes and the options of a run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.products = options, products_of(options.formats)
        self.shapes = [(int(n), int(k)) for n, _, k in (each.partition("x") for each in options.shapes)]
        able = [product for product in self.products if product.refused() is None]
        self.bench = Bench(specs_of(able, options.m, self.shapes), options.threads)
        self.peers, self.missing = peers.start(options.peers, options.peers_python, options.threads)
        self.seconds_of: dict[str, float] = {}
        self.watch = quiet.Watch(self.own_seconds)

    def own_seconds(self) -> float:
        """Processor time of this process and of the peers'."""
        for peer in self.peers:
            try:
                self.seconds_of[peer.project] = peer.processor_seconds()
            except peers.PeerError as error:
                self._lost(peer, str(error))
        return time.process_time() + sum(self.seconds_of.values())

    def _lost(self, peer: peers.Peer, why: str) -> None:
        self.peers = [each for each in self.peers if each is not peer]
        self.missing[peer.project] = why

    def total(self, m: int) -> int:
        """Bytes of all copies of a weight."""
        return self.options.rotate or int(ours.cache_bytes() * (1.25 if m >= MANY else ours.TIMES_THE_CACHE))

    def runners(self, m: int, n: int, k: int) -> tuple[list[ours.Runner], dict[str, str]]:
        """(all products, why those that are missing are)."""
        found, missing = [], {}
        for product in self.products:
            why = product.refused()
            if why is None:
                found.append(ours.runner(self.bench, product, m, n, k, self.total(m)))
            else:
                missing[product.name] = why
        for peer in list(self.peers):
            for engine in peer.engines:
                try:
                    found.append(peer.runner(engine, m, n, k, self.total(m)))
                except peers.PeerError as error:
                    missing[engine] = str(error)
            if peer.process.poll() is not None:
                self._lost(peer, peer.ended or f"its process ended with {peer.process.returncode}")
        return found, missing

    def cell(self, m: int, n: int, k: int) -> dict[str, Any]:
        products = [product.name for product in self.products]
        products += [engine for peer in self.peers for engine in peer.engines]
        runners, missing = self.runners(m, n, k)

        def measure() -> tuple[dict[str, Any], quiet.Noise]:
            before, stop = self.bench.limits(), self.watch.start()
            times, stopped = turns(runners, self.options.rounds, self.options.least)
            noise, after = stop(), self.bench.limits()
            limits = middle([before, after])
            rows = [row(each, times[each.name], limits, m, n, k) for each in runners if each.name in times]
            return {"rows": rows, "missing": missing | stopped, "limits": [before.json(), after.json()]}, noise

        found, noise, tries = quiet.until_quiet(measure, self.options.tries)
        for peer in self.peers:
            try:
                peer.ask("drop")
            except peers.PeerError as error:
                self._lost(peer, str(error))
        return {
            "m": m, "n": n, "k": k, "products": products, **found, "others": noise.share, "tries": tries,
            "disturbed": noise.disturbed,
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        versions = {peer.project.replace("_", "."): peer.version for peer in self.peers}
        return {
            "what": "matmul", "date": datetime.date.today().isoformat(), "machine": processor(), "isa": host_isa(),
            "threads": self.options.threads, "rounds": self.options.rounds, "versions": versions,
            "missing": self.missing, "cells": [], "growth": [],
        }  # fmt: skip

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


# --- growth ----------------------------------------------------------------------------------------------------------


def sweeps(options: argparse.Namespace) -> list[tuple[str, str, list[tuple[int, int, int]]]]:
    """(axis, title, sizes (M, N, K)) of each sweep."""
    side, sides, ms = options.growth_side, options.growth_sides, options.growth_m
    found = [("m", f"N = K = {side}", [(m, side, side) for m in ms])]
    for m in (1, 32):
        found.append(("n", f"M = {m}, K = {side}", [(m, n, side) for n in sides]))
        found.append(("k", f"M = {m}, N = {side}", [(m, side, k) for k in sides]))
    return found


def grown(measure: Callable[[int], float], sizes: Sequence[int]) -> tuple[list[float], list[growth.Outlier]]:
    """(the seconds of `measure(i)` for each size, the points above their trend). A point that stands out is measured
    again with its neighbours, and the lesser times count: a disturbance is no property of a size."""
    times = [measure(i) for i in range(len(sizes))]
    for each in growth.outliers(sizes, times):
        at = sizes.index(int(each.size))
        for i in range(max(0, at - 1), min(len(sizes), at + 2)):
            times[i] = min(times[i], measure(i))
    return times, growth.outliers(sizes, times)


def line(measure: Callable[[int], float], sizes: Sequence[int], tries: int) -> dict[str, Any]:
    """What a plot says of a product, measured again while others take the cores."""
    watch = quiet.Watch(time.process_time)

    def once() -> tuple[tuple[list[float], list[growth.Outlier]], quiet.Noise]:
        stop = watch.start()
        return grown(measure, sizes), stop()

    (times, outliers), noise, count = quiet.until_quiet(once, tries)
    return {
        "us": [1e6 * each for each in times], "outliers": [asdict(each) for each in outliers], "tries": count,
        "others": noise.share, "disturbed": noise.disturbed,
    }  # fmt: skip


def measure_growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each sweep of our products on each number of threads; says when a line of a plot is done."""
    products = [product_of(name, kind) for name, kind in GROWTH]
    planned = sweeps(options)
    places = list(dict.fromkeys(place for _, _, sizes in planned for place in sizes))
    needed = [spec for m, n, k in places for spec in specs_of(products, [m], [(n, k)])]
    bench = Bench(needed, options.threads)
    total = options.rotate or int(1.25 * ours.cache_bytes())
    for axis, title, places in planned:
        sizes = [place["mnk".index(axis)] for place in places]
        made: dict[str, Any] = {
            "name": f"{axis}-{places[0][0]}" if axis != "m" else "m", "axis": axis, "title": title, "sizes": sizes,
            "lines": [],
        }  # fmt: skip
        for product in products:
            for threads in options.growth_threads:
                bench.use_threads(threads)

                def measure(i: int, product: Product = product, places: Any = places) -> float:
                    runner = ours.runner(bench, product, *places[i], total, most=10_000)
                    times, _ = turns([runner], options.growth_rounds, options.least)
                    return statistics.median(times[product.name])

                done = {"product": product.name, "threads": threads, **line(measure, sizes, options.tries)}
                made["lines"].append(done)
                print(f"{title}: {product.name}, {threads} threads, {done['tries']} tries", flush=True)
        yield made


# --- command line ----------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help='formats or "all"; "float" is plain fp32')
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--shapes", nargs="*", default=["4096x4096"], metavar="NxK", help="none: growth alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--least", type=float, default=0.01, help="seconds of a turn")
    parser.add_argument("--tries", type=int, default=4, help="how often a disturbed cell is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rotate", type=int, default=None, help="bytes of all copies of a weight")
    parser.add_argument("--peers", nargs="*", default=list(peers.PROJECTS), choices=peers.PROJECTS, metavar="PROJECT")
    parser.add_argument("--peers-python", default=peers.default_python(), help="a Python that has the peers")
    parser.add_argument("--growth", action="store_true", help="our products against M, N, K and threads, too")
    parser.add_argument("--growth-m", type=int, nargs="+", default=list(M_SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--growth-sides", type=int, nargs="+", default=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--growth-side", type=int, default=SIDE, help=argparse.SUPPRESS)
    parser.add_argument("--growth-threads", type=int, nargs="+", default=[1, 2], help="numbers of threads for it")
    parser.add_argument("--growth-rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="writes the run to this file, after each cell and sweep")
    parser.add_argument("--read", type=Path, help="takes a run from this file instead of measuring")
    parser.add_argument("--write", type=Path, help="the page that gets tables and plots, such as docs/performance.md")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    run = Run(options)
    facts = run.facts()

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    try:
        for n, k in run.shapes:
            for m in options.m:
                facts["cells"].append(run.cell(m, n, k))
                print(tables.text(facts["cells"][-1]), flush=True)
                keep()
    finally:
        run.close()
    if options.growth:
        for sweep in measure_growth(options):
            facts["growth"].append(sweep)
            keep()
        print("\n".join(tables.growth_text(facts)))
    keep()
    return facts


def main() -> int:
    options = parsed()
    if options.read:
        facts = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        try:
            facts = measure(options)
        except UnknownFormatError as error:
            print(error, file=sys.stderr)
            return 2
    for project, why in facts["missing"].items():
        print(f"missing: {project}: {why}")
    if options.write:
        print("\n".join(f"wrote {file}" for file in tables.write(options.write, facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
