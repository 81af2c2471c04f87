"""Milliseconds for one token of a small Llama on the CPU, beside eager torch with a static cache of the same length.

    python benchmarks/decode_cpu.py [--length 4096] [--positions 16 1024 4000] [--quant nf4] [--json FILE]

The cache is `length` long; a token is decoded at each position.  With `last` as an operand of attention the work grows
with the position, not with the length: the column `attention` counts the cache bytes that a token reads.  Both sides
use the same number of threads and take turns; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import qcompiler as qc
from qcompiler.inspect.checks import copied_bytes

LAYERS, HEADS, KV_HEADS, DIM = 6, 8, 4, 32


def build(length: int, quant: str | None, threads: int) -> tuple[Any, Any, Any]:
    """(model, session, eager step)"""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HEADS * DIM, intermediate_size=768, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=length,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.cache_implementation = "static"
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=length)
    size = ("s", 1, 64)
    program = qc.qcompile(
        step,
        kwargs={"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 64)})],
        quant=quant,
    )
    assert copied_bytes(program.plan)["decode"] == {}, "a token copies a state"
    memory = StaticCache(config=config, max_cache_len=length)
    memory.early_initialization(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))

    def eager(ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for layer in memory.layers:
            layer.cumulative_length.copy_(position[0])
        with torch.no_grad():
            logits: torch.Tensor = model(ids, past_key_values=memory, use_cache=True).logits
        return logits

    return program, program.session(), eager


def median_ms(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--positions", type=int, nargs="+", default=[16, 1024, 4000])
    parser.add_argument("--quant", default=None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    program, session, eager = build(options.length, options.quant, options.threads)
    ids, rows = torch.tensor([[65]]), []
    print(f"{'position':>8} {'ours ms':>9} {'eager ms':>9} {'eager/ours':>10} {'attention':>12}")
    for at in options.positions:
        position = torch.tensor([at])
        ours = median_ms(lambda p=position: session(input_ids=ids, cache_position=p), options.rounds)
        theirs = median_ms(lambda p=position: eager(ids, p), options.rounds)
        read = (at + 1) * LAYERS * 2 * KV_HEADS * DIM * 4
        rows.append({"position": at, "ours_ms": ours, "eager_ms": theirs, "bytes_read": read})
        print(f"{at:>8} {ours:>9.3f} {theirs:>9.3f} {theirs / ours:>10.2f} {read:>12,}")
    if options.json:
        facts = {"length": options.length, "quant": options.quant, "isa": program.image.target.isa, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
