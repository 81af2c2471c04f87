"""Whole models on the CPU beside torch, OpenVINO and onnxruntime, in one interleaved run.

    python benchmarks/model_cpu.py --json FILE
    python benchmarks/model_cpu.py --models vit --formats nf4 --compute exact --peers openvino --rounds 5
    python benchmarks/model_cpu.py --small                       # narrow models, one round: that everything runs

    minilm    all-MiniLM-L6-v2 with its weights, 1 x 32 and 32 x 128 tokens
    vit       ViT-B/16's widths, `--layers` layers with random weights, an image of 224 x 224 (197 tokens)
    llama     hidden 2048, FFN 5632, 32 heads, 4 of them for keys and values, `--layers` layers with random weights,
              1 and 128 tokens without a cache; lm_cpu.py measures generation
    unet      the first block of Stable Diffusion 1.5's UNet with random weights: residual blocks and attention to 77
              tokens of text, 320 channels, two latent images of 32 x 32

"nf4" computes in fp32, "nf4 bf16" and "int8 int8" multiply in these (docs/quantisation.md).  Ours is one program for
all sizes of a model.  Peers get a program of torch.export for the very sizes of each case: OpenVINO and onnxruntime in
processes of their own (cpupeers/models_*.py; `make bench-peers` installs them), torch.compile and torchao in this one
(`--no-compiled` leaves them out).  What is missing is named with the reason.

Each cell has medians, the median of the ratios to torch fp32 round by round, the rate of the matrix products over the
whole time, and the error of the result relative to torch fp32 (with random weights it says little about quality).  A
cell during which other processes took the cores is measured again, as in matmul_cpu.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpubench import peers, quiet
from cpubench.turns import about
from minilm_cpu import load_example, matmul_flops
from torch import nn

import qcompiler as qc
from qcompiler.config import resolve_format
from qcompiler.formats.integer_product import integer_product
from qcompiler.runtime.isa import host_isa

PAUSE = 0.05
"""Seconds before a turn, as in lm_cpu.py."""

NAMES = ("minilm", "vit", "llama", "unet")


COMPILED = ("torch bf16 compiled", "torchao int8 a8")
"""What torch.compile makes, for each size anew; the second with weights and rows of 8 bits by torchao."""


class First(nn.Module):
    """The first result of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor, **others: torch.Tensor) -> Any:
        return self.model(given, **others)[0]


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


def unet(*, small: bool) -> Model:
    from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D
    from torch.utils.flop_counter import FlopCounterMode

    channels, side, text, heads, groups = (32, 8, 16, 4, 8) if small else (320, 32, 768, 8, 32)
    block = CrossAttnDownBlock2D(
        channels, channels, 4 * channels, num_layers=2, num_attention_heads=heads, cross_attention_dim=text,
        resnet_groups=groups,
    )  # fmt: skip
    module = First(block).eval()
    images, words = 2, 77
    given = {
        "given": torch.randn(images, channels, side, side),
        "temb": torch.randn(images, 4 * channels),
        "encoder_hidden_states": torch.randn(images, words, text),
    }
    in_products = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), in_products, FlopCounterMode(display=False) as counter:
        module(**given)
    case = (f"{images} latent images of {side} x {side}", given, float(counter.get_total_flops()))
    return Model("unet", module, lambda quant: qc.qcompile(module, kwargs=given, quant=quant), [case])


def models(options: argparse.Namespace) -> Iterator[Model]:
    made: dict[str, Callable[[], Model]] = {
        "minilm": lambda: minilm(small=options.small),
        "vit": lambda: vit(options.layers, small=options.small),
        "llama": lambda: llama(options.layers, small=options.small),
        "unet": lambda: unet(small=options.small),
    }
    for name in options.models:
        torch.manual_seed(0)
        yield made[name]()


Turn = Callable[[], float]
"""Seconds of one call, after one that is not timed."""


def turn_of(call: Callable[[], Any]) -> Turn:
    def turn() -> float:
        call()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return turn


def first_of(result: Any) -> torch.Tensor:
    """The tensor that models give, alone, in a tuple or under a name."""
    if isinstance(result, torch.Tensor):
        return result.float()
    return first_of(next(iter(result.values())) if isinstance(result, dict) else result[0])


def ours_of(model: Model, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """Formats without a product of integers are left out where that is asked for."""
    found: dict[str, Callable[..., Any]] = {}
    for text in options.formats:
        for compute in options.compute:
            if compute != "int8" or not isinstance(integer_product(resolve_format(text)), str):
                name = text if compute == "exact" else f"{text} {compute}"
                found[name] = model.compiled(qc.QuantConfig(text, compute=compute, promise_bits=None))
    return found


def torch_of(model: Model, compiled: bool) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """torch in fp32 comes first."""
    narrow = copy.deepcopy(model.module).to(torch.bfloat16)

    def in_bf16(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **given: run(**{n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()})

    found: dict[str, Callable[..., Any]] = {"torch fp32": model.module, "torch bf16": in_bf16(narrow)}
    if not compiled:
        return found, dict.fromkeys(COMPILED, "left out by --no-compiled")
    found[COMPILED[0]] = in_bf16(torch.compile(narrow, dynamic=False))
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        return found, {COMPILED[1]: f"torchao is not installed here: {error}"}
    smaller = copy.deepcopy(model.module).to(torch.bfloat16)
    quantize_(smaller, Int8DynamicActivationInt8WeightConfig())
    found[COMPILED[1]] = in_bf16(torch.compile(smaller, dynamic=False))
    return found, {}


def loaded(
    peer: peers.Peer, module: nn.Module, given: Mapping[str, torch.Tensor], folder: Path
) -> tuple[dict[str, tuple[Turn, torch.Tensor]], dict[str, str]]:
    """({engine: (its turn, its first result)}, {engine: why it has none}) for a case."""
    program, inputs, result = folder / "program.pt2", folder / "inputs.npz", folder / "result.npy"
    torch.export.save(torch.export.export(module, (), dict(given)), program)
    np.savez(inputs, **{name: x.numpy() for name, x in given.items()})
    found: dict[str, tuple[Turn, torch.Tensor]] = {}
    missing: dict[str, str] = {}
    with suppress(peers.PeerError):  # a process that has ended says so below, for each engine
        peer.ask("drop")
    for engine in peer.engines:
        try:
            turn = peer.model(engine, program, inputs, result)
            found[engine] = turn, torch.from_numpy(np.load(result))
        except peers.PeerError as error:
            missing[engine] = str(error)
    if peer.ended:  # none of them has a turn any more
        return {}, dict.fromkeys(peer.engines, peer.ended)
    return found, missing


def in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round; every round begins with another one."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            time.sleep(PAUSE)
            found[name].append(turns[name]())
    return found


@torch.no_grad()
def cell(
    runners: Mapping[str, Callable[..., Any]], others: Sequence[peers.Peer], module: nn.Module,
    given: dict[str, torch.Tensor], operations: float, options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    turns: dict[str, Turn] = {}
    results: dict[str, torch.Tensor] = {}
    missing: dict[str, str] = {}
    for name, run in runners.items():
        try:
            results[name] = first_of(run(**given))
            turns[name] = turn_of(lambda run=run: run(**given))
        except Exception as error:  # what a project cannot do is part of the table
            if name not in COMPILED:
                raise
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    with tempfile.TemporaryDirectory() as folder:
        for peer in others:
            found, absent = loaded(peer, module, given, Path(folder))
            missing |= absent
            for name, (turn, result) in found.items():
                turns[name], results[name] = turn, result
    expected = results["torch fp32"]
    running = [peer for peer in others if not peer.ended]
    watch = quiet.Watch(lambda: time.process_time() + sum(peer.processor_seconds() for peer in running))

    def measure() -> tuple[dict[str, list[float]], quiet.Noise]:
        stop = watch.start()
        return in_turns(turns, options.rounds), stop()

    times, noise, count = quiet.until_quiet(measure, options.tries)
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
    return {
        "rows": rows, "missing": missing, "others": noise.share, "tries": count, "disturbed": noise.disturbed,
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    marked = ", DISTURBED" if found["disturbed"] else ""
    lines = [f"{found['model']}, {found['case']}: others took {found['others']:.1%} of the cores{marked}"]
    for row in found["rows"]:
        lines.append(
            f"  {row['runner']:24} {row['ms']:9.2f} ms {row['ratio']:6.2f} x torch fp32 {row['gflops']:8.1f} GFLOP/s"
            f"   error {row['error']:.1e}"
        )
    return "\n".join(lines + [f"  missing: {name}: {why}" for name, why in found["missing"].items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--formats", nargs="+", default=["nf4", "int4", "int8"])
    parser.add_argument("--compute", nargs="+", default=["exact", "bf16", "int8"], choices=("exact", "bf16", "int8"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=list(peers.OF_MODELS), choices=peers.OF_MODELS)
    parser.add_argument("--peers-python", default=peers.default_python(), help="of the environment that has the peers")
    parser.add_argument("--no-compiled", action="store_true", help="without what torch.compile makes")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.small:
        options.rounds, options.layers = 1, 1
    os.environ["QC_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    others, missing = peers.start(options.peers, options.peers_python, options.threads, "models")
    facts: dict[str, Any] = {
        "what": "models", "about": about(), "torch": torch.__version__, "isa": host_isa(), "threads": options.threads,
        "rounds": options.rounds, "versions": {peer.project: peer.version for peer in others}, "missing": missing,
        "cells": [],
    }  # fmt: skip
    for model in models(options):
        theirs, absent = torch_of(model, compiled=not options.no_compiled)
        runners = theirs | ours_of(model, options)
        for name, given, operations in model.cases:
            torch.compiler.reset()
            found = cell(runners, others, model.module, given, operations, options)
            found["missing"] |= absent
            facts["cells"].append({"model": model.name, "case": name, **found})
            print(text(facts["cells"][-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for project, why in missing.items():
        print(f"missing: {project}: {why}")
    for peer in others:
        peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
