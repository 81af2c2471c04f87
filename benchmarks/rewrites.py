"""What rewrites of the float graph are worth (smoothing, AWQ's scales, equalisation, rotation), and corrected biases.

    python benchmarks/rewrites.py                   prints the tables
    python benchmarks/rewrites.py --write           and writes them into docs/quantisation.md
    python benchmarks/rewrites.py --only encoder    one of the two tables: "encoder" or "language model"
    python benchmarks/rewrites.py --journal found.jsonl    measures what that file does not have, and appends to it
    python benchmarks/rewrites.py --journal found.jsonl --known --write    the tables of what that file has

The repository's language model and its *outlier twin*, which computes the same floats: 20 channels of the gain of each
norm times 50, the columns that read them divided by 50.  KL in bits from the fp32 model, over windows of 512 bytes that
are spread over the first quarter of the held-out text; calibration takes windows from its last half.  MiniLM has its
true weights; the cosine of its embeddings against fp32 is the mean over the sentences of the demo, and calibration
takes other sentences of that file.

The quantised graphs run in eager torch, as `qc.search` judges recipes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import minilm  # noqa: E402
import tiny_llama  # noqa: E402
from chosen_codes import calibration, divergences, judge  # noqa: E402
from page_marks import between  # noqa: E402

import qcompiler as qc  # noqa: E402
from qcompiler.errors import RecipeError  # noqa: E402
from qcompiler.frontends.quantise.calibrate import Calibration  # noqa: E402
from qcompiler.frontends.quantise.insert_qdq import insert_qdq  # noqa: E402
from qcompiler.frontends.torch.capture.export import Exported, export_model  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
CHANNELS, FACTOR = 20, 50.0
HEAD = {"*lm_head": "int8"}
"""The tied head is an embedding, too. A rotation unties it, and it keeps the embedding's format by this rule."""
STORAGE: dict[str, dict[str, Any]] = {
    "int4:group=128": {"linear": "int4:group=128"},
    "W4A8": {"linear": "int4:group=128", "activations": "int8"},
    "int3:group=128": {"linear": "int3:group=128"},
    "nf4": {"linear": "nf4"},
    "int8": {"linear": "int8"},
    "W8A8": {"linear": "int8", "activations": "int8"},
}
WHICH = ("own", "twin")
WEIGHTS_ONLY = {"W4A8": "int4:group=128", "W8A8": "int8"}
"""The storage with the same weights and inputs in floating point."""
REWRITES: dict[str, dict[str, Any]] = {
    "none": {}, "smooth=0.5": {"smooth": 0.5}, 'algorithm="awq"': {"algorithm": "awq"},
    "equalise": {"equalise": True}, "rotate": {"rotate": True}, "rotate_online": {"rotate_online": True},
    "correct_bias": {"correct_bias": True},
    "gptq": {"algorithm": "gptq"}, "rotate, gptq": {"rotate": True, "algorithm": "gptq"},
    "smooth=0.5, rotate_online": {"smooth": 0.5, "rotate_online": True},
    "rotate, rotate_online": {"rotate": True, "rotate_online": True},
}  # fmt: skip
TOGETHER = ("smooth=0.5, rotate_online", "rotate, rotate_online")
MEASURED = {
    "int4:group=128": tuple(REWRITES),
    "W4A8": ("none", "smooth=0.5", 'algorithm="awq"', "rotate", "rotate_online", "gptq", *TOGETHER),
    "int3:group=128": ("none", "smooth=0.5", 'algorithm="awq"', "rotate", "gptq", "rotate, gptq"),
    "nf4": ("none", 'algorithm="awq"', "rotate", "gptq"),
    "int8": ("none", "smooth=0.5", "rotate", "rotate_online", *TOGETHER),
    "W8A8": ("none", "smooth=0.5", "rotate", "rotate_online", *TOGETHER),
}
"""The rewrites that have a row for the language model."""
ENCODER_STORAGE = {
    **STORAGE, "int4:group=128": {"linear": "int4"}, "int3:group=128": {"linear": "int3"},
    "W4A8": {"linear": "int4", "activations": "int8"},
}  # fmt: skip


@dataclass
class Journal:
    """What has been measured, by name: a line of JSON each, in `path` if there is one."""

    path: Path | None
    known: dict[str, Any] = field(default_factory=dict)
    measures: bool = True

    @staticmethod
    def of(path: Path | None, *, measures: bool = True) -> Journal:
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        return Journal(path, dict(json.loads(line) for line in lines), measures)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What was measured, now or before; None for what is not known if nothing is measured."""
        if name not in self.known and self.measures:
            self.known[name] = make()
            print(name, self.known[name], file=sys.stderr, flush=True)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known.get(name)


def outlier_twin(model: tiny_llama.NextByte) -> tiny_llama.NextByte:
    """A copy that computes the same floats, with outliers in the activations in front of each layer's linears."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    layers: Any = twin.llama.model.layers
    with torch.no_grad():
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                channels = torch.randperm(norm.weight.numel(), generator=generator)[:CHANNELS]
                norm.weight[channels] *= FACTOR
                for reader in readers:
                    reader.weight[:, channels] /= FACTOR
    return twin


def oracle(
    exported: Exported, storage: dict[str, Any], rewrite: dict[str, Any], inputs: Sequence[Any], *, tied: bool = True
) -> Any:
    """The quantised graph in eager torch, from a copy of the exported one."""
    recipe = qc.QuantConfig("float", embedding="int8", rules=HEAD if tied else {}, **storage, **rewrite)
    data = Calibration(inputs) if rewrite else None
    return insert_qdq(copy.deepcopy(exported), recipe, calibration=data).module


@dataclass
class LanguageModel:
    """The repository's model and its twin; `inputs` windows to calibrate with, `windows` that are judged."""

    journal: Journal
    inputs: int
    windows: int

    @functools.cached_property
    def setting(self) -> tuple[dict[str, Exported], list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        model, windows, _ = judge()
        windows = windows[torch.linspace(0, len(windows) - 1, self.windows).round().long()]
        reference = [base.float() for base, _ in tiny_llama.log_probabilities(model, windows)]
        inputs = [row for rows in calibration(self.inputs) for row in rows.split(1)]
        shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
        example = (torch.zeros(3, 37, dtype=torch.int64),)
        both = {"own": model, "twin": outlier_twin(model)}
        return {n: export_model(m, example, {}, shapes) for n, m in both.items()}, inputs, windows, reference

    def measured(self, storage: str, rewrite: str, which: str) -> tuple[float, float] | None:
        """KL and its standard error over windows."""

        def make() -> tuple[float, float]:
            exported, inputs, windows, reference = self.setting
            graph = oracle(exported[which], STORAGE[storage], REWRITES[rewrite], inputs)
            found = divergences(graph, windows, reference)
            return float(found.mean()), float(found.std(ddof=1)) / len(found) ** 0.5

        found = self.journal.get(f"{storage} | {rewrite} | {which} | {self.inputs} {self.windows}", make)
        return None if found is None else tuple(found)

    def rows(self) -> list[list[str]]:
        """A row for each storage and rewrite: KL of the model, of its twin, and their ratios to the model's own.

        The last column compares quantised inputs with floats: the larger of the ratios of the model and of the twin.
        """
        made = [self._row(storage, rewrite) for storage in STORAGE for rewrite in MEASURED[storage]]
        return [row for row in made if row]

    def _row(self, storage: str, rewrite: str) -> list[str]:
        """Empty if one of the two was not measured."""
        base = self.measured(storage, "none", "own")
        found = [self.measured(storage, rewrite, which) for which in WHICH]
        known = [each for each in found if each is not None]
        if base is None or len(known) < len(found):
            return []
        cells = [f"{mean:.2e} ± {error:.0e}" for mean, error in known]
        cells += [f"{mean / base[0]:.2f}" for mean, _ in known]
        floats = WEIGHTS_ONLY.get(storage)
        wide = [self.measured(floats, rewrite, which) for which in WHICH] if floats else []
        ratios = [mean / each[0] for (mean, _), each in zip(known, wide, strict=False) if each is not None]
        return [storage, rewrite, *cells, f"{max(ratios):.2f}" if len(ratios) == len(WHICH) else ""]


class Encoder:
    """MiniLM, with every fourth batch of sentences to calibrate with and the others to be measured."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    @functools.cached_property
    def setting(self) -> tuple[Exported, list[Any], list[Any], np.ndarray]:
        model, batches = minilm.load_encoder(), minilm.load_batches()
        held, measured = batches[::4], [each for at, each in enumerate(batches) if at % 4]
        shape = {0: ("b", 1, minilm.MAX_BATCH), 1: ("s", 1, minilm.MAX_LENGTH)}
        example = {name: torch.ones(3, 11, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        exported = export_model(model, (), example, dict.fromkeys(example, shape))
        return exported, held, measured, minilm.embed(model, measured)

    def _cell(self, storage: str, rewrite: str) -> str:
        exported, held, measured, reference = self.setting
        try:
            module = oracle(exported, ENCODER_STORAGE[storage], REWRITES[rewrite], held, tied=False)
        except RecipeError as error:
            return "refused: post-norm" if "residual stream" in str(error) else "refused"
        return f"{float(np.mean(minilm.cosines(minilm.embed(module, measured), reference))):.5f}"

    def rows(self) -> list[list[str]]:
        """A row for each rewrite: the mean cosine with each storage, or why it does not apply."""
        found = []
        for rewrite in REWRITES:
            cells = [
                self.journal.get(f"encoder | {storage} | {rewrite}", functools.partial(self._cell, storage, rewrite))
                for storage in STORAGE
            ]
            if any(cells):
                found.append([rewrite, *(each or "not measured" for each in cells)])
        return found


TABLES = {
    "rewritten language model": [
        "linears", "rewrite", "KL", "KL, twin", "share of none", "share, twin", "of weights only",
    ],
    "rewritten encoder": ["rewrite", "int4", "W4A8", "int3", "nf4", "int8", "W8A8"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=16, help="windows for calibration")
    parser.add_argument("--windows", type=int, default=32, help="windows that are judged")
    parser.add_argument("--only", choices=("language model", "encoder"), help="one of the two tables")
    parser.add_argument("--journal", type=Path, help="a file of what has been measured")
    parser.add_argument("--known", action="store_true", help="measure nothing: the rows of the journal alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args()
    journal = Journal.of(options.journal, measures=not options.known)
    makers = {
        "language model": LanguageModel(journal, options.inputs, options.windows).rows,
        "encoder": Encoder(journal).rows,
    }
    for what in [options.only] if options.only else makers:
        mark, rows = f"rewritten {what}", makers[what]()
        show(mark, TABLES[mark], rows, write=options.write)


def show(mark: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, write: bool) -> None:
    """Prints a table, and with `write` puts it between its marks in the page."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if write:
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        text = between(PAGE.read_text(), f"<!-- {mark} -->", f"<!-- end of {mark} -->", "\n".join(lines), str(PAGE))
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
