"""Whole models on the CPU beside torch in fp32 and bf16, in one interleaved run: MiniLM, layers of ViT and of a Llama.

    python benchmarks/model_cpu.py --json FILE
    python benchmarks/model_cpu.py --models vit --formats nf4 --compute exact --rounds 5
    python benchmarks/model_cpu.py --small                       # narrow models, one round: that everything runs

    minilm    all-MiniLM-L6-v2 with its weights, 1 x 32 and 32 x 128 tokens
    vit       ViT-B/16's widths, `--layers` layers with random weights, an image of 224 x 224 (197 tokens)
    llama     hidden 2048, FFN 5632, 32 heads, 4 of them for keys and values, `--layers` layers with random weights,
              1 and 128 tokens without a cache; lm_cpu.py measures generation

"nf4" computes in fp32, "nf4 bf16" and "nf4 int8" multiply in these (docs/quantisation.md).  Each cell has medians, the
median of the ratios to torch fp32 round by round, the rate of the matrix products over the whole time, and the error of
the result relative to torch fp32 (with random weights it says little about quality).  A cell during which other
processes took the cores is measured again, as in matmul_cpu.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpubench import quiet
from minilm_cpu import load_example, matmul_flops
from torch import nn

import qcompiler as qc
from qcompiler.config import resolve_format
from qcompiler.formats.integer_product import integer_product
from qcompiler.runtime.isa import host_isa

PAUSE = 0.05
"""Seconds before a turn, as in lm_cpu.py."""

NAMES = ("minilm", "vit", "llama")


class First(nn.Module):
    """The first result of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor) -> Any:
        return self.model(given)[0]


@dataclass(frozen=True)
class Model:
    """`compiled(quant)` compiles it; each case has a name, its inputs, and the operations of its matrix products."""

    name: str
    module: nn.Module
    compiled: Callable[[qc.QuantConfig], Any]
    cases: list[tuple[str, dict[str, torch.Tensor], float]]


def minilm(*, small: bool) -> Model:
    example = load_example()
    module = example.load_encoder()
    cases = []
    for shape in example.SHAPES[: 1 if small else None]:
        batch = {"input_ids": torch.randint(1000, 30000, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
        cases.append((f"{shape[0]} x {shape[1]} tokens", batch, float(matmul_flops(*shape))))
    return Model("minilm", module, lambda quant: example.compile_encoder(module, quant, None), cases)


def vit(layers: int, *, small: bool) -> Model:
    from transformers import ViTConfig, ViTModel

    hidden, inner, heads, side = (64, 128, 2, 32) if small else (768, 3072, 12, 224)
    config = ViTConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_hidden_layers=layers,
        image_size=side, patch_size=16,
    )  # fmt: skip
    module = First(ViTModel(config, add_pooling_layer=False)).eval()
    image = torch.randn(1, 3, side, side)
    patches = (side // 16) ** 2
    tokens = patches + 1
    operations = 2.0 * patches * hidden * 3 * 16 * 16
    operations += layers * (2.0 * tokens * (4 * hidden * hidden + 2 * hidden * inner) + 4.0 * tokens**2 * hidden)
    case = (f"an image, {tokens} tokens, {layers} layers", {"given": image}, operations)
    return Model("vit", module, lambda quant: qc.qcompile(module, (image,), quant=quant), [case])


def llama(layers: int, *, small: bool) -> Model:
    from transformers import LlamaConfig, LlamaModel

    hidden, inner, heads, kv_heads = (64, 128, 4, 2) if small else (2048, 5632, 32, 4)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    module = First(LlamaModel(config)).eval()
    weights = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads + 3 * hidden * inner
    cases = []
    for tokens in (1, 128):
        operations = layers * (2.0 * tokens * weights + 2.0 * tokens * (tokens + 1) * hidden)
        cases.append((f"{tokens} tokens, {layers} layers", {"given": torch.arange(tokens)[None] % 1000}, operations))
    sizes = {"given": {1: ("s", 1, 512)}}
    example = (torch.arange(7)[None],)
    return Model("llama", module, lambda quant: qc.qcompile(module, example, quant=quant, dynamic_shapes=sizes), cases)


def models(options: argparse.Namespace) -> Iterator[Model]:
    for name in options.models:
        torch.manual_seed(0)
        yield (
            minilm(small=options.small)
            if name == "minilm"
            else (vit if name == "vit" else llama)(options.layers, small=options.small)
        )


def runners_of(model: Model, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """torch in fp32 comes first. Formats without a product of integers are left out where that is asked for."""
    narrow = copy.deepcopy(model.module).to(torch.bfloat16)

    def in_bf16(**given: torch.Tensor) -> Any:
        return narrow(**{name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()})

    found: dict[str, Callable[..., Any]] = {"torch fp32": model.module, "torch bf16": in_bf16}
    for text in options.formats:
        for compute in options.compute:
            if compute != "int8" or not isinstance(integer_product(resolve_format(text)), str):
                name = text if compute == "exact" else f"{text} {compute}"
                found[name] = model.compiled(qc.QuantConfig(text, compute=compute, promise_bits=None))
    return found


def first_of(result: Any) -> torch.Tensor:
    """The tensor that models give, alone, in a tuple or under a name."""
    if isinstance(result, torch.Tensor):
        return result.float()
    return first_of(next(iter(result.values())) if isinstance(result, dict) else result[0])


def turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; every round begins with another one."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            time.sleep(PAUSE)
            calls[name]()
            begin = time.perf_counter()
            calls[name]()
            found[name].append(time.perf_counter() - begin)
    return found


@torch.no_grad()
def cell(
    runners: dict[str, Callable[..., Any]], given: dict[str, torch.Tensor], operations: float, rounds: int, tries: int
) -> dict[str, Any]:
    calls = {name: (lambda run=run: run(**given)) for name, run in runners.items()}
    results = {name: first_of(call()) for name, call in calls.items()}
    expected, watch = results["torch fp32"], quiet.Watch(time.process_time)

    def measure() -> tuple[dict[str, list[float]], quiet.Noise]:
        stop = watch.start()
        return turns(calls, rounds), stop()

    times, noise, count = quiet.until_quiet(measure, tries)
    base = times["torch fp32"]
    rows = [
        {
            "runner": name, "ms": 1e3 * statistics.median(seconds), "least_ms": 1e3 * min(seconds),
            "ratio": statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
            "gflops": operations / statistics.median(seconds) / 1e9,
            "error": float((results[name] - expected).norm() / expected.norm()),
        }
        for name, seconds in times.items()
    ]  # fmt: skip
    return {"rows": rows, "others": noise.share, "tries": count, "disturbed": noise.disturbed}


def text(found: dict[str, Any]) -> str:
    marked = ", DISTURBED" if found["disturbed"] else ""
    lines = [f"{found['model']}, {found['case']}: others took {found['others']:.1%} of the cores{marked}"]
    for row in found["rows"]:
        lines.append(
            f"  {row['runner']:16} {row['ms']:9.2f} ms {row['ratio']:6.2f} x torch fp32 {row['gflops']:8.1f} GFLOP/s"
            f"   error {row['error']:.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--formats", nargs="+", default=["nf4", "int4", "int8"])
    parser.add_argument("--compute", nargs="+", default=["exact", "bf16", "int8"], choices=("exact", "bf16", "int8"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.small:
        options.rounds, options.layers = 1, 1
    os.environ["QC_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    facts: dict[str, Any] = {
        "what": "models", "torch": torch.__version__, "isa": host_isa(), "threads": options.threads,
        "rounds": options.rounds, "cells": [],
    }  # fmt: skip
    for model in models(options):
        runners = runners_of(model, options)
        for name, given, operations in model.cases:
            found = cell(runners, given, operations, options.rounds, options.tries)
            facts["cells"].append({"model": model.name, "case": name, **found})
            print(text(facts["cells"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
