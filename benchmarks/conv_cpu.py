"""Convolutions of ResNet-18 beside torch's fp32 convolution, per shape, in one interleaved run.

    .venv/bin/python benchmarks/conv_cpu.py [--rounds 15] [--threads 2] [--batch 1] [--json out.json]

Each shape is a program of its own (one convolution with a relu at 224 x 224's sizes), called from Python like a user's
program; torch runs the same two operators. On both sides images are stored channels first, as in torch: our time
includes the copy to channels-last, which a whole model makes once. Every round times each program once for each shape,
in a varying order, so that a slow moment of the machine affects all of them; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import qcompiler as qc

# (channels in, out, kernel, stride, image): each convolution of ResNet-18 at 224 x 224 once
SHAPES = (
    (3, 64, 7, 2, 224), (64, 64, 3, 1, 56), (64, 128, 3, 2, 56), (64, 128, 1, 2, 56), (128, 128, 3, 1, 28),
    (128, 256, 3, 2, 28), (256, 256, 3, 1, 14), (256, 512, 3, 2, 14), (512, 512, 3, 1, 7),
)  # fmt: skip
QUANTS = (None, "int8", "nf4")
BATCH_SECONDS = 2e-3
"""Calls shorter than this are timed in batches of about this length."""


@dataclass(frozen=True)
class Row:
    """One shape: median seconds per call by engine, and GFLOP of one call."""

    shape: tuple[int, int, int, int, int]
    gflop: float
    seconds: dict[str, float]


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, int, int, int, int]) -> None:
        super().__init__()
        inside, out, kernel, stride, _ = shape
        self.conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


def engines_of(shape: tuple[int, int, int, int, int], batch: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model, x = Layer(shape).eval(), torch.randn(batch, shape[0], shape[4], shape[4])

    def eager() -> object:
        with torch.no_grad():
            return model(x)

    engines: dict[str, Callable[[], object]] = {"torch": eager}
    for quant in QUANTS:
        recipe = qc.QuantConfig(quant, promise_bits=None) if quant else None
        program = qc.qcompile(model, (x,), quant=recipe)
        with torch.no_grad():
            wanted = program.oracle(x)
        assert (program(x) - wanted).norm() <= 1e-5 * wanted.norm(), (shape, quant)
        engines[quant or "f32"] = lambda program=program: program(x)
    return engines


def measure(engines: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds per call by engine."""
    calls = {}
    for name, run in engines.items():
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(BATCH_SECONDS / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            time.sleep(0.003)  # the other engine's threads stop spinning
            start = time.perf_counter()
            for _ in range(calls[name]):
                engines[name]()
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def table(rows: list[Row]) -> str:
    names = list(rows[0].seconds)
    lines = [f"{'in  out  k  s  image':24s}" + "".join(f"{name:>12s}" for name in names) + "   ratio of f32 to torch"]
    for row in rows:
        cells = "".join(f"{row.gflop / row.seconds[name]:7.0f} GF/s" for name in names)
        text = "{:4d} {:4d} {:2d} {:2d} {:5d}".format(*row.shape)
        lines.append(f"{text:24s}{cells}   {row.seconds['f32'] / row.seconds['torch']:.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of the shapes to run; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["QC_NUM_THREADS"] = str(options.threads)
    rows: list[Row] = []
    for shape in [SHAPES[i] for i in options.shapes] if options.shapes else SHAPES:
        inside, out, kernel, stride, image = shape
        size = (image + 2 * (kernel // 2) - kernel) // stride + 1
        flop = 2e-9 * options.batch * size * size * out * inside * kernel * kernel
        engines = engines_of(shape, options.batch)
        rows.append(Row(shape, flop, measure(engines, options.rounds)))
        print(f"conv_cpu: {shape} done", file=sys.stderr)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
