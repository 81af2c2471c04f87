"""MiniLM on the CPU beside torch, in one interleaved run.

    python benchmarks/minilm_cpu.py [--formats nf4 int8 int4 float] [--compute exact bf16 int8] [--rounds 21]
        [--json FILE]

For batches of 1 x 32 and 32 x 128 tokens: the median of each program, its ratio to torch fp32 eager (pairwise, round by
round), and the rate of its matrix products.  Compare ratios: machines differ and are noisy.  `--compute` names
the arithmetic of the linears (docs/quantisation.md); everything else is fp32.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import qcompiler as qc

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, FFN = 6, 384, 1536


def load_example() -> Any:
    """examples/minilm.py as a module."""
    spec = importlib.util.spec_from_file_location("minilm_example", ROOT / "examples" / "minilm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def matmul_flops(batch: int, length: int) -> int:
    """Operations of the linears and of attention; a multiply-add counts twice."""
    tokens = batch * length
    linears = 2 * tokens * LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN)
    attention = 4 * batch * length * length * HIDDEN * LAYERS
    return linears + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["nf4", "int8", "int4", "float"])
    parser.add_argument("--compute", nargs="+", default=["exact"], choices=("exact", "bf16", "int8"))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    example = load_example()
    model = example.load_encoder()
    runners: dict[str, Callable[..., Any]] = {"torch fp32": model}
    runners["torch bf16"] = copy.deepcopy(model).to(torch.bfloat16)
    for name in options.formats:
        for compute in options.compute:
            if compute == "exact" or name != "float":
                quant = None if name == "float" else qc.QuantConfig(name, compute=compute)
                which = name if compute == "exact" else f"{name} {compute}"
                runners[f"qcompiler {which}"] = example.compile_encoder(model, quant, None)
    results = []
    for shape in example.SHAPES:
        batch = {"input_ids": torch.randint(1000, 30000, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
        calls = {name: (lambda run=run, batch=batch: run(**batch)) for name, run in runners.items()}
        times = example.interleaved(calls, options.rounds)
        print(f"\n{shape[0]} x {shape[1]} tokens, {options.rounds} rounds, {torch.get_num_threads()} threads")
        for name, values in times.items():
            ratio = median(a / b for a, b in zip(values, times["torch fp32"], strict=True))
            rate = matmul_flops(*shape) / median(values) / 1e9
            print(f"  {name:18} {median(values) * 1e3:9.2f} ms   {ratio:5.2f} x torch fp32   {rate:7.1f} GFLOP/s")
            seconds = {"median_s": round(median(values), 6), "least_s": round(min(values), 6), "rounds": len(values)}
            results.append({"shape": shape, "runner": name, **seconds, "ratio_to_torch_fp32": round(ratio, 3)})
    if options.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
