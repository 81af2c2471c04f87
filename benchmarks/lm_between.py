"""A language model compiled by two revisions of this repository, in one process, in turns.

    .venv/bin/python benchmarks/lm_between.py --before 24b5b75a [--model gpt-oss] [--quant nf4] [--kv-cache fp16]
        [--compute bf16] [--contexts 1 512 4096] [--prompts 128 512] [--rounds 35] [--threads 2] [--json out.json]

The revision is installed beside the working tree, in a folder that is deleted. Each of the two compiles the same random
model in a process of its own and saves it; the runtime of the working tree runs both. Each round has one turn of each
program, in alternating order: one token at a context, or a prompt. The table gives medians of both, and the median of
their ratios within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cpubench.turns import ROOT, about, in_turns

import qcompiler as qc

WORDS = 8192
GPT_OSS = {
    "vocab_size": WORDS, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 128, "max_position_embeddings": 131072, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 131072,
}  # fmt: skip
MODELS = {"gpt-oss": ("GptOss", GPT_OSS), "llama": ("Llama", LLAMA)}


@dataclass
class Cell:
    """Seconds of both versions, and the median of their ratios."""

    work: str
    before: float
    after: float
    ratio: float


def make(name: str, quant: str, compute: Any, options: dict[str, Any], path: str) -> None:
    """Compiles a random model, and saves it: in a process of one of the two revisions."""
    import torch
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    recipe = qc.QuantConfig(quant, compute=compute)
    qc.compile_causal_lm(model, quant=recipe, device="cpu", **options).save(path)
    print(f"compiled by {Path(qc.__file__).parent}", flush=True)


def install(revision: str, folder: Path) -> Path:
    """A revision of this repository, as an import path."""
    source, site = folder / "source", folder / "site"
    subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(source), revision], check=True)
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(source)], check=True)
    return site


def compiled(given: argparse.Namespace, site: Path | None, path: Path) -> Any:
    """The model as the working tree compiles it, or the revision that is installed in `site`."""
    longest = max([*given.contexts, *given.prompts]) + given.rounds + 1
    told = given.model, given.quant, given.compute, {"kv_cache": given.kv_cache, "max_seq_len": longest}, str(path)
    paths = [*([str(site)] if site is not None else []), str(Path(__file__).parent)]
    code = f"import lm_between; lm_between.make(*{told!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment)
    return qc.load_causal_lm(path, num_threads=given.threads)


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    def turn(number: int) -> float:
        start = time.perf_counter()
        work(number)
        return time.perf_counter() - start

    return turn


def cells(models: Sequence[Any], given: argparse.Namespace) -> list[Cell]:
    ids, found = np.random.default_rng(0), list[Cell]()

    def report(cell: Cell) -> None:
        found.append(cell)
        took = f"{cell.before * 1e3:9.2f} -> {cell.after * 1e3:9.2f} ms"
        print(f"{cell.work:24s} {took}  {cell.ratio:5.2f} of the time", flush=True)

    for context in given.contexts:
        texts = [each.conversation() for each in models]
        for text in texts:
            text.read(np.random.default_rng(context).integers(3, WORDS, context).tolist())
        turns = [timed(lambda number, text=text: text.read([3 + number])) for text in texts]
        report(Cell(f"one token behind {context}", *in_turns(turns, given.rounds)))
    for length in given.prompts:
        prompt = ids.integers(3, WORDS, length).tolist()
        turns = [timed(lambda _, model=model, prompt=prompt: model.conversation().read(prompt)) for model in models]
        report(Cell(f"a prompt of {length}", *in_turns(turns, max(3, given.rounds // 5))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, help="a revision of this repository")
    parser.add_argument("--model", choices=list(MODELS), default="gpt-oss")
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--kv-cache", default="fp16")
    parser.add_argument("--compute", default=None, choices=("exact", "bf16", "int8"))
    parser.add_argument("--contexts", type=int, nargs="*", default=[1, 512, 4096])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=35)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = compiled(given, install(given.before, folder), folder / "before.qca")
        after = compiled(given, None, folder / "after.qca")
        found = cells([before, after], given)
    if given.json:
        what = about(**{name: value for name, value in vars(given).items() if name != "json"})
        given.json.write_text(json.dumps(what | {"cells": [asdict(cell) for cell in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
