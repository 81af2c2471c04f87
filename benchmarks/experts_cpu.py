"""The experts of a mixture on the CPU: products in fp32, bf16 and int8, and torch's dense products, in one run.

    python benchmarks/experts_cpu.py [--formats int8 int4 q4_K] [--rows 1 8 32 128 512] [--rounds 15] [--apart]
        [--json FILE]

One layer of a mixture with the shape of a small Mixtral (hidden 1024, 8 experts of 3584, two for each row): gate and
up, SwiGLU, down, the weighted sum.  The router is left out: `index` and `weights` are arguments, so every program
computes the same pairs.  `--layers` programs of each kind, with weights of their own, take turns, so that weights miss
the caches; the first of them wakes the threads and is not timed.  Ratios are medians over rounds in which the runners
follow each other; torch multiplies the rows of each expert, in fp32 and in bf16.  Runners of "float" have weights in
bf16 that are not quantised.  `--apart`: also programs whose SwiGLU and weighted sum are not in the kernels of the
products (`fuse-experts`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc
from qcompiler.config import COMPUTES

HIDDEN, FFN, EXPERTS, TOP = 1024, 3584, 8, 2


class Experts(nn.Module):
    """(rows, HIDDEN), the experts of each row and their weights, both (rows, TOP), to (rows, HIDDEN)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN, generator=generator) / FFN**0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs, rows = index.reshape(-1), x.repeat_interleave(TOP, dim=0)
        gate, up = torch.bmm(self.gate_up[pairs], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        hidden = functional.silu(gate) * up
        out = torch.bmm(self.down[pairs], hidden.unsqueeze(-1)).squeeze(-1)
        return (out.reshape(-1, TOP, HIDDEN) * weights.unsqueeze(-1)).sum(dim=1)


def dense(model: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same, expert by expert, as a program in torch would compute it."""
    out = torch.zeros_like(x)
    for expert in index.unique().tolist():
        row, place = (index == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[row], model.gate_up[expert]).chunk(2, dim=-1)
        made = functional.linear(functional.silu(gate) * up, model.down[expert])
        out.index_add_(0, row, made * weights[row, place, None])
    return out


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, EXPERTS, generator=generator)
    weights, index = scores.softmax(-1).topk(TOP)
    return torch.randn(rows, HIDDEN, generator=generator), index, weights


def runners_of(rows: int, formats: list[str], layers: int, *, apart: bool) -> dict[str, list[Callable[..., Any]]]:
    models = [Experts(seed).eval() for seed in range(layers)]
    narrow = [Experts(seed).eval().to(torch.bfloat16) for seed in range(layers)]
    given = inputs(rows)
    found: dict[str, list[Callable[..., Any]]] = {
        "torch fp32": [lambda *a, m=m: dense(m, *a) for m in models],
        "torch bf16": [lambda *a, m=m: dense(m, *in_bf16(a)) for m in narrow],
    }
    for name in formats:
        if name == "float":
            programs = [qc.qcompile(model, in_bf16(given)) for model in narrow]
            found["float bf16"] = [lambda *a, run=run: run(*in_bf16(a)) for run in programs]
            continue
        for compute in COMPUTES:
            for how, separate in (("", ()), (" apart", ("gate_up", "down")))[: 1 + apart]:
                recipe = qc.QuantConfig(name, compute=compute, separate=separate, promise_bits=None)
                found[f"{name} {compute}{how}"] = [qc.qcompile(model, given, quant=recipe) for model in models]
    return found


def in_bf16(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(torch.bfloat16) if each.is_floating_point() else each for each in given)


def timed(runners: dict[str, list[Callable[..., Any]]], given: tuple[Any, ...], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, each in runners.items():
            time.sleep(0.02)  # threads of the runner before stop spinning: torch's do so for some milliseconds
            each[0](*given)  # and those of this one wake up
            start = time.perf_counter()
            for run in each[1:]:
                run(*given)
            if number:  # the first round fills caches and starts threads
                times[name].append((time.perf_counter() - start) / (len(each) - 1))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["float", "int8", "int4", "q4_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 512])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers: at least 2, of which the first is not timed")
    results = []
    for rows in options.rows:
        with torch.inference_mode():
            runners = runners_of(rows, options.formats, options.layers, apart=options.apart)
            times = timed(runners, inputs(rows), options.rounds)
        print(f"\n{rows} rows, {TOP} of {EXPERTS} experts each, {torch.get_num_threads()} threads")
        for name, values in times.items():
            ratio = median(a / b for a, b in zip(values, times["torch fp32"], strict=True))
            work = 6 * rows * TOP * HIDDEN * FFN / median(values) / 1e9
            print(f"  {name:18} {median(values) * 1e3:9.3f} ms   {ratio:5.2f} of torch's time   {work:7.1f} GFLOP/s")
            results.append({"rows": rows, "runner": name, "median_s": median(values), "of_torch": round(ratio, 3)})
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
