"""Compile a model that does not fit into memory, from its safetensors.

    python examples/large_model.py plan  config.json                     sizes and plan; no weights are read
    python examples/large_model.py build config.json weights/ model.qca  values from a folder of shards
    python examples/large_model.py demo                                  a small Llama in shards, made for this demo

`config.json` is a Llama's, as on the Hugging Face hub.  `build` keeps packed weights in model.qca.work beside the
result, so a killed build can continue.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qcompiler as qc

SIZES = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 512)}}


class Logits(nn.Module):
    """Token ids to logits: programs return tensors, not caches."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def hollow(config: LlamaConfig) -> nn.Module:
    """The model without values, in the dtype of its checkpoint: this takes no memory."""
    with qc.empty_weights():
        model = Logits(config).eval()
    dtype = config.dtype or torch.float32
    return model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def compile_model(config: LlamaConfig, quant: str | None, **where: object) -> qc.Program:
    ids = torch.ones(2, 7, dtype=torch.long)
    return qc.qcompile(hollow(config), (ids,), quant=quant, dynamic_shapes=SIZES, **where)


def anonymous() -> int:
    """Bytes of this process's own memory (pages of files do not count)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The peak of memory between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._running = anonymous(), True

    def run(self) -> None:
        while self._running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.005)

    def stop(self) -> int:
        self._running = False
        self.join()
        return self.peak


def plan(config: LlamaConfig, quant: str | None) -> None:
    program = compile_model(config, quant, weights="none")
    print(program.ledger.totals())
    for arena in program.plan.arenas:
        print(f"{arena.kind:12} {arena.nbytes / 1e6:12,.1f} MB  {arena.name}")


def build(config: LlamaConfig, weights: Path, output: Path, quant: str | None) -> None:
    before, peak = anonymous(), Peak()
    peak.start()
    program = compile_model(config, quant, weights=weights, workdir=f"{output}.work")
    program.save(output)
    grown = peak.stop() - before
    print(program.ledger.totals())
    largest = max(row.bytes_before for row in program.ledger)
    print(f"anonymous memory: {grown / 1e6:.1f} MB beside the start; the largest tensor has {largest / 1e6:.1f} MB")


def demo(folder: Path, quant: str | None) -> None:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "weights", max_shard_size="10MB")
    plan(config, quant)
    build(config, folder / "weights", folder / "model.qca", quant)
    run = qc.load(folder / "model.qca")
    print(run(torch.arange(5)[None]).shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "build", "demo"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--quant", default="nf4")
    options = parser.parse_args()
    quant = None if options.quant == "none" else options.quant
    if options.command == "demo":
        with tempfile.TemporaryDirectory() as folder:
            demo(Path(folder), quant)
    elif options.command == "plan":
        plan(LlamaConfig.from_json_file(options.paths[0]), quant)
    else:
        build(LlamaConfig.from_json_file(options.paths[0]), options.paths[1], options.paths[2], quant)


if __name__ == "__main__":
    main()
