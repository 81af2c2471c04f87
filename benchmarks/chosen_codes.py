"""What codes chosen by data (algorithm="gptq") are worth: the repository's language model, in formats of 2 to 8 bits.

    python benchmarks/chosen_codes.py                 prints a table
    python benchmarks/chosen_codes.py --write         and writes it into docs/quantisation.md

Calibration takes windows from the last half of the held-out text, and the KL divergence from the fp32 model is measured
on its first quarter; neither is text that the model was trained on.  Each window gives one mean; the error given is the
standard error of the share over windows, by the jackknife.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
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
from page_marks import between  # noqa: E402

import qcompiler as qc  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
FORMATS = (
    "int4:group=128", "int3:group=128", "int2:group=128", "int4", "nf4", "mxfp4", "q4_0", "q4_K", "q3_K", "q2_K",
    "iq4_xs", "q6_K", "int8",
)  # fmt: skip
INPUTS = 64
"""Windows of 512 bytes for calibration."""
BATCH = 8

Windows = list[torch.Tensor]


@dataclass
class Row:
    """The divergence in bits with nearest and with chosen codes, and the share of the first that is closed."""

    text: str
    bits: float
    nearest: float
    chosen: float
    closed: float
    error: float
    seconds: float


def calibration(count: int = INPUTS) -> Windows:
    """Windows at random places of the last half of the held-out text, in batches."""
    text = np.frombuffer((tiny_llama.FOLDER / "held_out.txt").read_bytes(), np.uint8)
    text = text[len(text) // 2 :]
    starts = np.random.default_rng(0).integers(0, len(text) - tiny_llama.LENGTH, count)
    rows = torch.from_numpy(np.stack([text[s : s + tiny_llama.LENGTH] for s in starts])).long()
    return list(rows.split(BATCH))


def judge() -> tuple[tiny_llama.NextByte, torch.Tensor, list[torch.Tensor]]:
    """The fp32 model, the windows that it is compared on, and its log2 probabilities for them."""
    model, windows = tiny_llama.load_model(), tiny_llama.held_out(tiny_llama.MEASURED_BYTES)
    return model, windows, [base.float() for base, _ in tiny_llama.log_probabilities(model, windows)]


def divergences(program: Any, windows: torch.Tensor, reference: list[torch.Tensor]) -> np.ndarray:
    """The mean KL of each window, in bits."""
    found = []
    for (ours, _), base in zip(tiny_llama.log_probabilities(program, windows), reference, strict=True):
        each = (base.double().exp2() * (base.double() - ours)).sum(-1)
        found.append(each.reshape(-1, tiny_llama.LENGTH).mean(1).numpy())
    return np.concatenate(found)


def row(text: str, inputs: Windows, judged: tuple[Any, torch.Tensor, list[torch.Tensor]]) -> Row:
    """One format, with nearest and with chosen codes."""
    model, windows, reference = judged
    shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
    found, seconds, bits = [], 0.0, 0.0
    for algorithm, data in (("nearest", None), ("gptq", inputs)):
        quant = qc.QuantConfig("float", linear=text, embedding="int8", algorithm=algorithm)
        began = time.perf_counter()
        program = qc.qcompile(
            model, (torch.zeros(3, 37, dtype=torch.int64),), quant=quant, dynamic_shapes=shapes, calibrate=data,
            device="cpu",
        )  # fmt: skip
        seconds, bits = time.perf_counter() - began, program.ledger.bits_per_weight()
        found.append(divergences(program, windows, reference))
    nearest, chosen = found
    count = len(nearest)
    left = 1 - (chosen.sum() - chosen) / (nearest.sum() - nearest)  # without one window each
    error = math.sqrt((count - 1) / count * float(((left - left.mean()) ** 2).sum()))
    closed = 1 - float(chosen.mean() / nearest.mean())
    return Row(text, bits, float(nearest.mean()), float(chosen.mean()), closed, error, seconds)


COLUMNS = ("linears", "bits per weight", "KL, nearest codes", "KL, gptq", "closed")


def cells(each: Row) -> list[str]:
    share = f"{100 * each.closed:.1f} ± {100 * each.error:.1f} %"
    return [each.text, f"{each.bits:.3f}", f"{each.nearest:.2e}", f"{each.chosen:.2e}", share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="windows for calibration")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("formats", nargs="*", default=FORMATS)
    options = parser.parse_args()
    inputs, judged = calibration(options.inputs), judge()
    table, found = Table(*COLUMNS, "seconds"), []
    for text in options.formats:
        found.append(row(text, inputs, judged))
        table.add_row(*cells(found[-1]), f"{found[-1].seconds:.0f}")
        print(*cells(found[-1]), f"{found[-1].seconds:.0f} s", sep="  ", file=sys.stderr, flush=True)
    Console().print(table)
    if options.write:
        lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += [f"| {' | '.join(cells(each))} |" for each in found]
        begin, end = "<!-- chosen codes -->", "<!-- end of chosen codes -->"
        PAGE.write_text(between(PAGE.read_text(), begin, end, "\n".join(lines), str(PAGE)))


if __name__ == "__main__":
    main()
