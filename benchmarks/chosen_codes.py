"""What `QuantConfig.algorithm` is worth: the repository's language model, in formats of 2 to 8 bits.

    python benchmarks/chosen_codes.py                                  prints a table
    python benchmarks/chosen_codes.py --write                          and writes it into docs/quantisation.md
    python benchmarks/chosen_codes.py --algorithms hqq,gptq int3 nf4   some of them only
    python benchmarks/chosen_codes.py --biases --write                 beside corrected biases (`correct_bias=True`)
    python benchmarks/chosen_codes.py --algorithms round+scales int3   with tuned scales (`tune_scales=True`)

`--write` puts the cells that were measured into the table, and keeps the others.  With `--workdir`, a run that was
stopped goes on with the codes and scales that it has, and `round+scales` with the codes of `round`.

The share of nearest codes' divergence that an algorithm closes is in its column.  Calibration takes windows from
the last half of the held-out text, and the KL divergence from the fp32 model is measured on its first quarter; neither
is text that the model was trained on.  Each window gives one mean; the error given is the standard error of the share
over windows, by the jackknife.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import tiny_llama  # noqa: E402
from page_marks import rows_between  # noqa: E402

import qcompiler as qc  # noqa: E402
from qcompiler.config import ALGORITHMS, BY_DATA  # noqa: E402
from qcompiler.errors import RecipeError  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
FORMATS = (
    "int4:group=128", "int3:group=128", "int2:group=128", "int2:group=128,symmetric=False", "int4", "nf4", "mxfp4",
    "q4_0", "q4_K", "q3_K", "q2_K", "iq4_xs", "q6_K", "int8",
)  # fmt: skip
INPUTS = 64
"""Windows of 512 bytes for calibration."""
BATCH = 2
"""Windows in an input: one of eight inputs is set aside where scales are tuned."""

BIASES = ("nearest+bias", "hqq", "hqq+bias", "gptq", "gptq+bias")
BIASED_FORMATS = ("int4:group=128", "int3:group=128", "nf4", "q4_K", "int8")
CHOSEN = tuple(each for each in ALGORITHMS if each != "nearest")

Windows = list[torch.Tensor]
Judged = tuple[Any, torch.Tensor, list[torch.Tensor]]


@dataclass
class Closed:
    """The divergence in bits with an algorithm, the share of nearest codes' that is closed, and its standard error."""

    divergence: float
    closed: float
    error: float
    seconds: float


@dataclass
class Row:
    """A format: its bits per weight, the divergence in bits with nearest codes, and what each algorithm closes.

    An algorithm that serves no weight of the format has None.
    """

    text: str
    bits: float
    nearest: float
    by: dict[str, Closed | None]


def calibration(count: int = INPUTS) -> Windows:
    """Windows at random places of the last half of the held-out text, in batches."""
    text = np.frombuffer((tiny_llama.FOLDER / "held_out.txt").read_bytes(), np.uint8)
    text = text[len(text) // 2 :]
    starts = np.random.default_rng(0).integers(0, len(text) - tiny_llama.LENGTH, count)
    rows = torch.from_numpy(np.stack([text[s : s + tiny_llama.LENGTH] for s in starts])).long()
    return list(rows.split(BATCH))


def judge(count: int | None = None) -> Judged:
    """The fp32 model, the windows that it is compared on (the first `count`), and its log2 probabilities for them."""
    model, windows = tiny_llama.load_model(), tiny_llama.held_out(tiny_llama.MEASURED_BYTES)[:count]
    return model, windows, [base.float() for base, _ in tiny_llama.log_probabilities(model, windows)]


def divergences(program: Any, windows: torch.Tensor, reference: list[torch.Tensor]) -> np.ndarray:
    """The mean KL of each window, in bits."""
    found = []
    for (ours, _), base in zip(tiny_llama.log_probabilities(program, windows), reference, strict=True):
        each = (base.double().exp2() * (base.double() - ours)).sum(-1)
        found.append(each.reshape(-1, tiny_llama.LENGTH).mean(1).numpy())
    return np.concatenate(found)


def row(
    text: str, inputs: Windows, judged: Judged, algorithms: Sequence[str] = ("gptq",), workdir: str | None = None
) -> Row:
    """One format, with nearest codes and with each of `algorithms`."""
    bits, nearest, _ = measured(text, "nearest", inputs, judged)
    by: dict[str, Closed | None] = {}
    for algorithm in algorithms:
        try:
            _, chosen, seconds = measured(text, algorithm, inputs, judged, workdir=workdir)
        except RecipeError:
            by[algorithm] = None
            continue
        left, error = ratio(chosen, nearest)
        by[algorithm] = Closed(float(chosen.mean()), 1 - left, error, seconds)
    return Row(text, bits, float(nearest.mean()), by)


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """The ratio of the means of two figures of each window, and its standard error over windows, by the jackknife."""
    count = len(above)
    without = (above.sum() - above) / (below.sum() - below)  # one window each
    error = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
    return float(above.mean() / below.mean()), error


def measured(
    text: str,
    algorithm: str,
    inputs: Windows,
    judged: Judged,
    embedding: str | None = "int8",
    workdir: str | None = None,
) -> tuple[float, np.ndarray, float]:
    """Bits per weight, the divergence of each window, and the seconds of the compile.

    With +bias behind an algorithm's name biases are corrected, with +scales scales are tuned. Linears have the format
    `text`.
    """
    model, windows, reference = judged
    shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
    algorithm, *more = algorithm.split("+")
    quant = qc.QuantConfig(
        "float", linear=text, embedding=embedding, algorithm=algorithm, correct_bias="bias" in more,
        tune_scales="scales" in more,
    )  # fmt: skip
    began = time.perf_counter()
    program = qc.qcompile(
        model, (torch.zeros(3, 37, dtype=torch.int64),), quant=quant, dynamic_shapes=shapes,
        calibrate=inputs if more or algorithm in BY_DATA else None, device="cpu", workdir=workdir,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return program.ledger.bits_per_weight(), divergences(program, windows, reference), seconds


def columns(algorithms: Sequence[str]) -> list[str]:
    return ["linears", "bits per weight", "KL, nearest codes", *(f"closed by {each}" for each in algorithms)]


def cells(each: Row) -> list[str]:
    shares = [
        "–" if found is None else f"{100 * found.closed:.1f} ± {100 * found.error:.1f} %" for found in each.by.values()
    ]
    return [each.text, f"{each.bits:.3f}", f"{each.nearest:.2e}", *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="windows for calibration")
    parser.add_argument("--algorithms", help="separated by commas")
    parser.add_argument("--biases", action="store_true", help="the table of corrected biases")
    parser.add_argument("--workdir", help="keep codes and scales here")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("formats", nargs="*")
    options = parser.parse_args()
    every, formats, what = CHOSEN, FORMATS, "chosen codes"
    if options.biases:
        every, formats, what = BIASES, BIASED_FORMATS, "corrected biases"
    algorithms = options.algorithms.split(",") if options.algorithms else every
    inputs, judged = calibration(options.inputs), judge()
    titles = columns(algorithms)
    table = Table(*titles, "seconds")
    for text in options.formats or formats:
        found = row(text, inputs, judged, algorithms, options.workdir)
        seconds = ", ".join(f"{each.seconds:.0f}" for each in found.by.values() if each is not None)
        table.add_row(*cells(found), seconds)
        print(*cells(found), f"{seconds} s", sep="  ", file=sys.stderr, flush=True)
        if options.write:  # after each format: a run that is stopped keeps what it has measured
            begin, end = f"<!-- {what} -->", f"<!-- end of {what} -->"
            PAGE.write_text(rows_between(PAGE.read_text(), begin, end, titles, [cells(found)], str(PAGE)))
    Console().print(table)


if __name__ == "__main__":
    main()
