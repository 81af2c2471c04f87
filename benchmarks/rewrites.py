"""What rewrites of the float graph are worth (smoothing, AWQ's scales, equalisation, rotation), and corrected biases.

    python benchmarks/rewrites.py                   prints the tables
    python benchmarks/rewrites.py --write           and writes them into docs/quantisation.md
    python benchmarks/rewrites.py --only encoder    one of the two tables: "encoder" or "language model"

The repository's language model and its *outlier twin*, which computes the same floats: 20 channels of the gain of each
norm times 50, the columns that read them divided by 50.  KL in bits from the fp32 model, over the first quarter of the
held-out text; calibration takes windows from its last half.  MiniLM has its true weights; the cosine of its embeddings
against fp32 is the mean over the sentences of the demo, and calibration takes other sentences of that file.

The quantised graphs run in eager torch, as `qc.search` judges recipes.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
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
    "int3:group=128": {"linear": "int3:group=128"},
    "nf4": {"linear": "nf4"},
    "W8A8": {"linear": "int8", "activations": "int8"},
}
REWRITES: dict[str, dict[str, Any]] = {
    "none": {}, "smooth=0.5": {"smooth": 0.5}, 'algorithm="awq"': {"algorithm": "awq"},
    "equalise": {"equalise": True}, "rotate": {"rotate": True}, "rotate, gptq": {"rotate": True, "algorithm": "gptq"},
    "correct_bias": {"correct_bias": True}, "gptq": {"algorithm": "gptq"},
}  # fmt: skip
ENCODER_STORAGE = {**STORAGE, "int4:group=128": {"linear": "int4"}, "int3:group=128": {"linear": "int3"}}


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


def language_model(windows_for_calibration: int) -> list[list[str]]:
    """A row for each storage and rewrite: KL of the model, of its twin, and their ratios to the model's own."""
    model, windows, reference = judge()
    inputs = calibration(windows_for_calibration)
    shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
    example = (torch.zeros(3, 37, dtype=torch.int64),)
    both = [export_model(each, example, {}, shapes) for each in (model, outlier_twin(model))]
    rows = []
    for name, storage in STORAGE.items():
        base = 0.0
        for text, rewrite in REWRITES.items():
            found = [divergences(oracle(e, storage, rewrite, inputs), windows, reference) for e in both]
            means = [float(each.mean()) for each in found]
            errors = [float(each.std(ddof=1)) / len(each) ** 0.5 for each in found]
            base = base or means[0]
            cells = [f"{mean:.2e} ± {error:.0e}" for mean, error in zip(means, errors, strict=True)]
            rows.append([name, text, *cells, *(f"{mean / base:.2f}" for mean in means)])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def encoder() -> list[list[str]]:
    """A row for each rewrite: MiniLM's mean cosine with each storage, or why it does not apply."""
    model, batches = minilm.load_encoder(), minilm.load_batches()
    held, measured = batches[::4], [each for at, each in enumerate(batches) if at % 4]
    reference = minilm.embed(model, measured)
    shape = {0: ("b", 1, minilm.MAX_BATCH), 1: ("s", 1, minilm.MAX_LENGTH)}
    example = {name: torch.ones(3, 11, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    exported = export_model(model, (), example, dict.fromkeys(example, shape))
    rows = []
    for text, rewrite in REWRITES.items():
        cells = []
        for storage in ENCODER_STORAGE.values():
            try:
                module = oracle(exported, storage, rewrite, held, tied=False)
                cells.append(f"{float(np.mean(minilm.cosines(minilm.embed(module, measured), reference))):.4f}")
            except RecipeError as error:
                cells.append("refused: post-norm" if "residual stream" in str(error) else "refused")
        rows.append([text, *cells])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    return rows


TABLES = {
    "rewritten language model": ["linears", "rewrite", "KL", "KL, twin", "share of none", "share, twin"],
    "rewritten encoder": ["rewrite", "int4", "int3", "nf4", "W8A8"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=32, help="windows for calibration")
    parser.add_argument("--only", choices=("language model", "encoder"), help="one of the two tables")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args()
    makers = {"language model": lambda: language_model(options.inputs), "encoder": encoder}
    for what in [options.only] if options.only else makers:
        mark, rows = f"rewritten {what}", makers[what]()
        columns = TABLES[mark]
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        if options.write:
            lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
            text = between(PAGE.read_text(), f"<!-- {mark} -->", f"<!-- end of {mark} -->", "\n".join(lines), str(PAGE))
            PAGE.write_text(text)


if __name__ == "__main__":
    main()
