"""Tokens per second of a language model on a GPU: ours, and transformers in bf16 with its step in a CUDA graph.

    python benchmarks/lm_gpu.py --json FILE                       # the 0.84 B Llama of lm_cpu.py, two minutes
    python benchmarks/lm_gpu.py --small --device sim:0            # a tiny one on the simulated GPU, to try it
    python benchmarks/lm_gpu.py --compile sm_90a                  # fills the cache of cubins; needs no GPU

The weights are lm_cpu.py's: random, in a .gguf file of each format, which `from_gguf` reads as a model in bf16 (with
`--exact` as one in fp32, whose products run on the CUDA cores).  Keys and values are bf16; transformers has a static
cache of `max_seq_len` rows.

    decode    tokens per second of all sequences together behind a prompt of so many tokens, each token drawn on the
              device and read by the host before the next step begins
    prompt    tokens per second of a prompt read into an empty cache, to the first new token on the host
    step      microseconds between two tokens; `of_copy` is the time to read weights and cache once at the bandwidth of
              a copy (bytes read and written), as a share of it

Figures are medians over the steps of `--rounds` rounds.  The JSON has each launch of a step with its time by events,
which adds the launch's own cost: it ranks kernels, and does not add up to the step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_cpu import FORMATS, SMALL, Shape, Transformers, write_model

import qcompiler as qc
from qcompiler.lm import bench
from qcompiler.plan.kinds.sample import WORDS

COPY_BYTES = 2 << 30


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * COPY_BYTES / statistics.median(times[2:])


# --- ours ------------------------------------------------------------------------------------------------------------


def compiled(chosen: argparse.Namespace, kind: str, shape: Shape, length: int, folder: Path) -> qc.CausalLM:
    file = folder / f"{kind}.gguf"
    if not file.exists():
        write_model(file, kind, shape, length)
    model = qc.from_gguf(file, dtype=torch.float32 if chosen.exact else torch.bfloat16)
    return qc.compile_causal_lm(
        model, max_seq_len=length, max_batch=max(chosen.batches), kv_cache="bf16", device=chosen.device,
        targets=[chosen.compile] if chosen.compile else None,
    )  # fmt: skip


def launches(lm: qc.CausalLM, context: int, batch: int) -> list[dict[str, Any]]:
    """The kernels of a decode step, the slowest first."""
    at = np.full((batch, 1), context, np.int64)
    rows = at + np.arange(batch)[:, None] * lm.record.rows
    given = {"ids": np.full((batch, 1), 5), "positions": at, "rows": rows, "wanted": np.arange(batch)}
    profile = lm.run.profile(**given, how=np.full((batch, WORDS), -1, np.int64), rounds=15)
    found = [{"kind": each.kind, "kernel": each.kernel, "us": round(each.us, 2)} for each in profile.steps]
    return sorted(found, key=lambda each: -float(each["us"]))


# --- transformers ----------------------------------------------------------------------------------------------------


class Graphed(Transformers):
    """A decode step of `LlamaForCausalLM` in bf16 as one CUDA graph, with a static cache; prompts run eagerly."""

    name = "transformers bf16"

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__(shape, length)
        self.model.to("cuda")
        self.length = length

    def measure(self, prompt: int, generate: int, batch: int, rounds: int) -> dict[str, float]:
        from transformers import StaticCache

        cache = StaticCache(self.model.config, max_cache_len=self.length)
        ids = torch.full((batch, prompt), 5, device="cuda")
        new = torch.full((batch, 1), 100, device="cuda")
        at = torch.full((1, 1), prompt, device="cuda")

        @torch.no_grad()
        def call(tokens: Any, positions: Any) -> Any:
            return self.model(
                tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, position_ids=positions
            ).logits.argmax(-1)

        def begin() -> float:
            cache.reset()
            torch.cuda.synchronize()
            start = time.perf_counter()
            new.copy_(call(ids, torch.arange(prompt, device="cuda")[None]))
            new.cpu()
            return time.perf_counter() - start

        begin()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(new, at)
        torch.cuda.synchronize()
        begin()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            new.copy_(call(new, at))
            at.add_(1)
        prompts, steps = [], []
        for _ in range(rounds):
            prompts.append(begin())
            at.fill_(prompt)
            for _ in range(generate - 1):
                start = time.perf_counter()
                graph.replay()
                new.cpu()
                steps.append(time.perf_counter() - start)
        return {"prompt_seconds": statistics.median(prompts), "step_seconds": statistics.median(steps)}


# --- cells -----------------------------------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape, length = (SMALL, 160) if chosen.small else (Shape(), 4096 + 512)
    prompts = [8, 64] if chosen.small else chosen.prompts
    generate, rounds = (4, 1) if chosen.small else (chosen.generate, chosen.rounds)
    is_gpu = chosen.device.startswith("cuda")
    facts: dict[str, Any] = {"device": chosen.device, "shape": vars(shape), "cells": [], "launches": {}, "missing": {}}
    facts["copy"] = copy_bandwidth() if is_gpu else None

    def cells(name: str, weights: int, one: Callable[[int, int], dict[str, float]]) -> None:
        for batch in chosen.batches:
            for prompt in prompts:
                found: dict[str, Any] = {"name": name, "prompt": prompt, "batch": batch, **one(prompt, batch)}
                step = found["step_seconds"]
                found["decode"], found["prefill"] = batch / step, batch * prompt / found["prompt_seconds"]
                cache = (prompt + generate // 2) * batch * shape.layers * 2 * shape.kv_heads * shape.head * 2
                if facts["copy"]:
                    found["of_copy"] = (weights + cache) / facts["copy"] / step
                facts["cells"].append(found)
                print(row(found), flush=True)
                save()

    def save() -> None:
        if chosen.json:
            chosen.json.write_text(json.dumps(facts, indent=1) + "\n")

    for kind in chosen.formats:
        began = time.perf_counter()
        lm = compiled(chosen, kind, shape, length, folder)
        print(f"{kind}: compiled in {time.perf_counter() - began:.1f} s", flush=True)

        def ours(prompt: int, batch: int, lm: qc.CausalLM = lm) -> dict[str, float]:
            speed = bench.measure(lm, prompt, generate, batch, rounds)
            assert speed.step_seconds is not None
            return {"prompt_seconds": speed.seconds_to_first, "step_seconds": speed.step_seconds}

        cells(f"ours {kind}", shape.weight_bytes(kind), ours)
        for batch, prompt in itertools.product(chosen.batches, prompts):
            facts["launches"][f"{kind} at {prompt}, batch {batch}"] = launches(lm, prompt, batch)
        save()
    if is_gpu and not chosen.no_transformers:
        matrices = sum(rows * cols for name, rows, cols in shape.matrices() if name != "token_embd.weight")
        try:
            peer = Graphed(shape, length)
            cells(peer.name, 2 * matrices, lambda prompt, batch: peer.measure(prompt, generate, batch, rounds))
        except Exception as error:  # another project's: its figures are missing, ours are not
            facts["missing"]["transformers bf16"] = f"{type(error).__name__}: {error}"[:500]
    save()
    return facts


def slowest(found: list[dict[str, Any]]) -> str:
    """The kernels that take most of a step, together with their number."""
    groups: dict[str, list[float]] = {}
    for each in found:
        groups.setdefault(each["kernel"] or each["kind"], []).append(each["us"])
    ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return ", ".join(f"{name} {len(times)} x {statistics.mean(times):.1f}" for name, times in ranked[:8])


def row(cell: dict[str, Any]) -> str:
    of = f"{cell['of_copy']:.0%}" if "of_copy" in cell else ""
    return (
        f"| {cell['name']} | {cell['prompt']} | {cell['batch']} | {cell['decode']:.0f} | "
        f"{1e6 * cell['step_seconds']:.0f} | {of} | {cell['prefill']:.0f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["q4_K", "q4_0"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 512, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--generate", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", metavar="ARCH", help="compile the programs for an architecture and exit")
    parser.add_argument("--exact", action="store_true", help="activations and arithmetic in fp32")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny model and one round")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.compile:
            shape, length = (SMALL, 160) if chosen.small else (Shape(), 4096 + 512)
            for kind in chosen.formats:
                compiled(chosen, kind, shape, length, Path(folder)).save(Path(folder) / "model.qca")
            return 0
        facts = measure(chosen, Path(folder))
    print("| | prompt | batch | decode, tokens/s | step, us | of copy | prompt, tokens/s |")
    for cell in facts["cells"]:
        print(row(cell))
    for name, reason in facts["missing"].items():
        print(f"missing: {name}: {reason}")
    for name, found in facts["launches"].items():
        print(f"{name}: {len(found)} launches, the slowest kernels (all their launches, us): {slowest(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
