"""Quantised programs on the CPU beside IREE, which compiles the text of `to_mlir`, in one interleaved run.

    pip install 'qcompiler[iree]'
    python benchmarks/iree_cpu.py [--rounds 31] [--threads 2] [--flags=--iree-opt-level=O3 …] [--json FILE]

For MiniLM in int8 and the repository's own Llama (one block of it, and the whole) in int8, int4 and q4_K: the median of
our program, that of IREE's, the median of their ratios round by round, and the largest difference of their results.
IREE holds the weights as resources of its module.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import MissingDependencyError

ROOT = Path(__file__).resolve().parents[1]
HOST = ("--iree-llvmcpu-target-cpu=host", "--iree-llvmcpu-stack-allocation-limit=131072")
"""This CPU. IREE's own limit of 32 KiB of stack refuses its tiles of some reductions of batches."""
FAST = ("--iree-opt-level=O3", "--iree-opt-data-tiling", "--iree-llvmcpu-enable-ukernels=all")
"""Flags by which IREE runs these programs faster than by its own defaults."""


def iree() -> tuple[Any, Any]:
    """IREE's compiler and runtime. MissingDependencyError says how to install them."""
    try:
        return importlib.import_module("iree.compiler"), importlib.import_module("iree.runtime")
    except ImportError as error:
        raise MissingDependencyError(
            "IREE is needed for this; install it with: pip install 'qcompiler[iree]' (that is iree-base-compiler and "
            "iree-base-runtime)"
        ) from error


def run_with_iree(text: str, flags: Sequence[str] = (), threads: int | None = None) -> Callable[..., list[Any]]:
    """Compiles MLIR text for this CPU; the result takes NumPy arrays and returns those of @main."""
    compiler, runtime = iree()
    binary = compiler.compile_str(text, target_backends=["llvm-cpu"], extra_args=[*HOST, *flags])
    if threads is not None:
        runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
    config = runtime.Config("local-task")
    context = runtime.SystemContext(config=config)
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, binary))
    main = context.modules.module["main"]

    def run(*arguments: Any) -> list[Any]:
        results = main(*arguments)
        return [each.to_host() for each in (results if isinstance(results, tuple | list) else (results,))]

    return run


class Block(nn.Module):
    """One block of the tiny Llama: (1, tokens, width) hidden states to such."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.layer, self.rotary = llama.model.layers[0], llama.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])[None]
        result = self.layer(x, position_embeddings=self.rotary(x, places), attention_mask=None)
        return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True)
class Job:
    """A model, its inputs, and its format."""

    name: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    quant: str


def example(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def minilm(quant: str = "int8", shape: tuple[int, int] = (1, 32)) -> Job:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(1000, 30000, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    return Job(f"MiniLM {shape[0]} x {shape[1]}", example("minilm").load_encoder(), inputs, quant)


def block(quant: str, tokens: int = 32) -> Job:
    torch.manual_seed(0)
    model = example("tiny_llama").load_model().llama
    return Job(f"Llama block, {tokens} tokens", Block(model).eval(), {"x": torch.randn(1, tokens, 256)}, quant)


def whole(quant: str, tokens: int = 32) -> Job:
    torch.manual_seed(0)
    inputs = {"tokens": torch.randint(0, 256, (1, tokens))}
    return Job(f"Llama, {tokens} tokens", example("tiny_llama").load_model(), inputs, quant)


@dataclass(frozen=True)
class Row:
    """Milliseconds; `ratio` is IREE's time by ours."""

    name: str
    quant: str
    ours: float
    theirs: float
    ratio: float
    difference: float


def measured(job: Job, rounds: int, flags: Sequence[str], threads: int) -> Row:
    program = qc.qcompile(job.model, kwargs=job.inputs, quant=job.quant)
    module = program.to_mlir("linalg")
    peer = run_with_iree(module.text, flags, threads)
    arrays = [value.numpy() for value in job.inputs.values()]
    arguments = module.arguments(*arrays)
    ours = np.asarray(program(**job.inputs))
    difference = float(np.abs(peer(*arguments)[0] - ours).max() / np.abs(ours).max())
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 3):
        for kept, call in zip(times, (lambda: program(**job.inputs), lambda: peer(*arguments)), strict=True):
            began = time.perf_counter()
            call()
            if number >= 3:
                kept.append((time.perf_counter() - began) * 1e3)
    ratios = [theirs / mine for mine, theirs in zip(*times, strict=True)]
    return Row(job.name, job.quant, median(times[0]), median(times[1]), median(ratios), difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flags", nargs="*", default=list(FAST), help=f"of iree-compile; default {' '.join(FAST)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    jobs = [minilm(), minilm(shape=(8, 128))]
    jobs += [make(quant, n) for make, n in ((block, 1), (block, 32), (whole, 32)) for quant in ("int8", "int4", "q4_K")]
    print(f"| {'model':22} | format | ours, ms | IREE, ms | IREE / ours | difference |\n|---|---|---|---|---|---|")
    rows = []
    for job in jobs:
        row = measured(job, options.rounds, options.flags, options.threads)
        rows.append(vars(row))
        print(
            f"| {row.name:22} | {row.quant:6} | {row.ours:8.2f} | {row.theirs:8.2f} | {row.ratio:11.2f} "
            f"| {row.difference:.1e} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
