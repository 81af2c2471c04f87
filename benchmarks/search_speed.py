"""What `qc.search` says that the linears of a recipe take, beside what a compiled program of it takes.

    python benchmarks/search_speed.py               prints a table
    python benchmarks/search_speed.py --write       and writes it into docs/quantisation.md
    python benchmarks/search_speed.py --models tiny --threads 1

Two models: the repository's language model (4.8 M weights, which lie in a cache) and a Llama of random weights, hidden
1024.  A search with a budget of speed times each linear by itself; two points of its front are compiled, and
`Program.profile` times the launches of a call with one token.  "linears" are the launches with a matrix product that
reads a weight.  They also compute what the passes have fused into them, which a search leaves out.  Of several
profiles, each launch's least median counts, since other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import tiny_llama  # noqa: E402
from page_marks import rows_between  # noqa: E402

import qcompiler as qc  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
BEGIN, END = "<!-- predicted speed -->", "<!-- end of predicted speed -->"
COLUMNS = ("model", "recipe", "threads", "predicted, µs", "measured, µs", "measured / predicted", "share of the call")
CANDIDATES = ("int4", "q4_K", "q6_K", "int8")
BUDGETS = ("4.6 bits", "6.5 bits")
SPEED = "4 x int4"
"""A limit that no recipe of these candidates reaches: the times are wanted, not a choice by them."""
SHAPES = {"tokens": {0: ("batch", 1, 2), 1: ("length", 1, 64)}}
PROFILES, ROUNDS = 7, 30
LINEARS = ("linear", "linears")
"""Kinds of launches; "linears" are of several formats in one.  A product of attention's has no weight."""


def random_llama() -> nn.Module:
    """Hidden 1024, two layers, 4,096 tokens: 31 M weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return tiny_llama.NextByte(LlamaForCausalLM(config)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {"tiny": tiny_llama.load_model, "random": random_llama}
NAMES = {"tiny": "tiny Llama", "random": "random Llama, hidden 1024"}


@dataclass
class Row:
    """Microseconds of the linears of one call, and of all launches."""

    model: str
    recipe: str
    threads: int
    predicted: float
    measured: float
    whole: float

    def cells(self) -> list[str]:
        return [
            self.model, self.recipe, str(self.threads), f"{self.predicted:.0f}", f"{self.measured:.0f}",
            f"{self.measured / self.predicted:.2f}", f"{self.measured / self.whole:.0%}",
        ]  # fmt: skip


def rows(name: str, threads: int, workdir: Path | None) -> list[Row]:
    model = MODELS[name]()
    example, one = (torch.zeros(2, 37, dtype=torch.int64),), torch.zeros(1, 1, dtype=torch.int64)
    data = [torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(1))]  # costs are not compared here
    found = []
    result = qc.search(
        model, data, BUDGETS[0], CANDIDATES, args=example, dynamic_shapes=SHAPES, sensitivity="output", speed=SPEED,
        num_threads=threads, workdir=workdir,
    )  # fmt: skip
    for budget in BUDGETS:
        point = result.point(budget)
        assert point.ns is not None
        program = qc.qcompile(model, example, quant=point.recipe, dynamic_shapes=SHAPES, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            program.save(path := Path(folder) / "model.qca")
            linears, whole = measured(qc.load(path, num_threads=threads), one)
        found.append(Row(NAMES[name], point.summary, threads, point.ns / 1e3, linears, whole))
        print(*found[-1].cells(), sep="  ", file=sys.stderr, flush=True)
    return found


def measured(program: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Microseconds of the launches with a matrix product that reads a weight, and of all launches."""
    profiles = [program.profile(tokens.numpy(), rounds=ROUNDS) for _ in range(PROFILES)]
    launches = list(zip(*(found.steps for found in profiles), strict=True))
    best = [(same[0].kind, min(step.us for step in same)) for same in launches]
    return sum(us for kind, us in best if kind in LINEARS), sum(us for _, us in best)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workdir", type=Path, help="a folder that keeps the costs of formats for another run")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args(arguments)
    table = Table(*COLUMNS)
    for name in options.models:
        cells = [each.cells() for each in rows(name, options.threads, options.workdir)]
        for each in cells:
            table.add_row(*each)
        if options.write:
            PAGE.write_text(rows_between(PAGE.read_text(), BEGIN, END, COLUMNS, cells, str(PAGE), keys=3))
    Console().print(table)


if __name__ == "__main__":
    main()
