"""Matrix products with packed weights on a GPU, beside torch's bf16 matmul and other 4- and 8-bit kernels, in one run.

    python benchmarks/matmul_cuda.py [--rounds 15] [--m 1 16 …] [--format nf4 …] [--shape 4096x4096 …] [--budget 240]
                                     [--json out.json]

Ours: nf4, int4, int8, q4_K and fp8 weights with bf16 rows. Peers: torch's bf16 `mm` (cuBLAS), torch's
`_weight_int4pack_mm`, bitsandbytes' nf4 where it is installed. Every engine is a CUDA graph of calls that cycle through
copies of the weight which are larger than the L2 cache together, so that weights come from memory as they do in a
model. Each round replays every engine once, and a copy from device memory to device memory; rows hold medians: time,
the bytes that a call must move (weight, input, output) per second as a share of what the copy moved, and the speed
relative to torch's bf16 matmul. Every result is checked against the decoded weight before it is timed. A peer that
cannot run is listed with the reason. Where there is no GPU the benchmark says so and succeeds.

This file holds what needs no GPU: sizes, medians, ratios, the table and the JSON; matmul_engines.py holds the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPES = ((4096, 4096), (11008, 4096))
"""(N, K): a square projection and the first of an MLP, of a Llama of 7 B parameters."""

MS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 2048)
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"block": 64}, "int4": {"group": 32}, "int8": {}, "q4_K": {}, "fp8_e4m3": {},
}  # fmt: skip
BASELINE = "torch bf16"
SCHEMA = 1
"""Version of the JSON: raised whenever a field changes its meaning or goes."""


@dataclass
class Measured:
    """One engine at one size: seconds per call of every round; `nbytes` are what a call must move."""

    n: int
    k: int
    m: int
    engine: str
    path: str
    nbytes: int
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Slowest less fastest round, as a share of the median."""
        return (max(self.times) - min(self.times)) / self.seconds


@dataclass(frozen=True)
class NotRun:
    """An engine that was wanted and did not run, and why."""

    engine: str
    reason: str


def rows(measured: Sequence[Measured], copy: Measured) -> list[dict[str, Any]]:
    """One row per engine of one size; `copy` was timed in the same rounds. ValueError without a baseline."""
    torchs = [each for each in measured if each.engine == BASELINE]
    if len(torchs) != 1:
        raise ValueError(f"{len(torchs)} of {len(measured)} engines are '{BASELINE}'; rows are relative to one")
    copied = copy.nbytes / copy.seconds
    return [
        {
            "n": each.n, "k": each.k, "m": each.m, "engine": each.engine, "path": each.path, "us": 1e6 * each.seconds,
            "gbytes": each.nbytes / each.seconds / 1e9, "of_copy": each.nbytes / each.seconds / copied,
            "tflops": 2 * each.m * each.n * each.k / each.seconds / 1e12,
            "of_bf16": torchs[0].seconds / each.seconds, "copy_gbytes": copied / 1e9, "rounds": len(each.times),
            "spread": each.spread,
        }
        for each in measured
    ]  # fmt: skip


def document(device: dict[str, Any], found: Sequence[dict[str, Any]], absent: Sequence[NotRun]) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "schema": SCHEMA, "device": device, "rows": list(found), "not_run": [vars(each) for each in absent],
    }  # fmt: skip


def sizes(shapes: Sequence[tuple[int, int]], ms: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(n, k, m) in the order of measuring: few rows and many first, for a budget of time that ends in between."""
    telling = [m for m in (1, 16, 512, 2048, 64) if m in ms]
    order = [*telling, *(m for m in ms if m not in telling)]
    return ((n, k, m) for m in order for n, k in shapes)


def table(found: Sequence[dict[str, Any]]) -> Any:
    """A rich table, by shape, M and engine."""
    from rich.table import Table

    made = Table(title="medians; of copy: bytes moved per second; of bf16: speed relative to torch's matmul")
    for name in ("N x K", "M", "engine", "path", "us", "GB/s", "of copy", "TFLOP/s", "of bf16", "spread"):
        made.add_column(name, justify="left" if name in ("engine", "path") else "right")
    before: tuple[int, int, int] | None = None
    for row in sorted(found, key=lambda r: (r["n"], r["k"], r["m"])):
        size = (row["n"], row["k"], row["m"])
        if before is not None and size != before:
            made.add_section()
        before = size
        made.add_row(
            f"{row['n']}x{row['k']}", str(row["m"]), row["engine"], row["path"], f"{row['us']:.1f}",
            f"{row['gbytes']:.0f}", f"{row['of_copy']:.1%}", f"{row['tflops']:.1f}", f"{row['of_bf16']:.2f}x",
            f"{row['spread']:.1%}",
        )  # fmt: skip
    return made


def no_gpu() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def engines() -> Any:
    """matmul_engines.py, beside this file."""
    name = "qcompiler_benchmark_matmul_engines"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("matmul_engines.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--m", type=int, nargs="+", default=list(MS))
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--shape", type=shape, nargs="+", default=list(SHAPES), help="NxK")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further size begins")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(given)
    reason = no_gpu()
    if reason is not None:
        print(f"no GPU: {reason}; nothing was measured")
        if chosen.json:
            chosen.json.write_text(json.dumps(document({"gpu": None, "reason": reason}, [], [])), encoding="utf-8")
        return 0
    from rich.console import Console

    began, found, absent = time.monotonic(), [], []
    bench = engines().Bench({name: FORMATS[name] for name in chosen.format}, chosen.shape, chosen.m, Measured)
    for n, k, m in sizes(chosen.shape, chosen.m):
        if time.monotonic() - began > chosen.budget:
            absent.append(NotRun(f"all at M = {m}, {n} x {k}", f"the budget of {chosen.budget:.0f} s was spent"))
            continue
        measured, copy, missing = bench.measure(n, k, m, chosen.rounds)
        found += rows(measured, copy)
        absent += [each for each in (NotRun(*each) for each in missing) if each not in absent]
        if chosen.json:  # what was measured so far, whatever ends the run
            chosen.json.write_text(json.dumps(document(bench.device, found, absent), indent=1), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(json.dumps(bench.device))
    console.print(table(found))
    for each in absent:
        console.print(f"not run: {each.engine}: {each.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
