"""The repository's own language model, in every format: what quantising it costs, measured on text it has not read.

    python examples/tiny_llama.py                    # prints the table
    python examples/tiny_llama.py --write            # and writes docs/quality.md

Each row is a compiled program (CPU).  Its next-byte distributions over the held-out text are compared with those of the
fp32 model in eager torch: bits per byte, the divergence KL(fp32 || quantised), and how often both think the same byte
the most likely.  The rows are made from the formats' declarations: every format with every value of its parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import LlamaForCausalLM

import qcompiler as qc

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "models" / "tiny_llama"
PAGE = HERE.parent / "docs" / "quality.md"
LENGTH = 512  # bytes in a window: what the model was trained with
BATCH = 16

Logits = Callable[[torch.Tensor], torch.Tensor]


class NextByte(nn.Module):
    """(batch, length) bytes as int64 -> (batch, length, 256) logits of the byte that follows each."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.llama(tokens, use_cache=False).logits
        return logits


def load_model(folder: Path = FOLDER) -> NextByte:
    """The checkpoint in fp32."""
    return NextByte(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)).eval()


def held_out(nbytes: int | None = None) -> torch.Tensor:
    """(windows, LENGTH + 1) bytes of the committed held-out text, as int64; the windows touch but share no target."""
    text = np.frombuffer((FOLDER / "held_out.txt").read_bytes()[:nbytes], np.uint8)
    count = (len(text) - 1) // LENGTH
    rows = [text[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)]
    return torch.from_numpy(np.stack(rows)).long()


@dataclass
class Quality:
    """Means over all predicted bytes: bits per byte, KL in bits against the reference, and top-1 agreement."""

    bits_per_byte: float
    divergence: float
    agreement: float


def log_probabilities(model: Logits, windows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """((n, 256) log2 probabilities, (n,) the bytes that came) for each batch of windows."""
    for rows in windows.split(BATCH):
        with torch.no_grad():
            logits = model(rows[:, :-1].contiguous())
        yield logits.double().log_softmax(-1).flatten(0, 1) / math.log(2), rows[:, 1:].flatten()


def measure(model: Logits, reference: list[torch.Tensor], windows: torch.Tensor) -> Quality:
    """`reference` holds the reference's log2 probabilities for the same batches."""
    bits, divergence, agree, count = 0.0, 0.0, 0, 0
    for (ours, targets), base in zip(log_probabilities(model, windows), reference, strict=True):
        bits -= float(ours.gather(1, targets[:, None]).sum())
        divergence += float((base.double().exp2() * (base.double() - ours)).sum())
        agree += int((ours.argmax(1) == base.argmax(1)).sum())
        count += len(targets)
    return Quality(bits / count, divergence / count, agree / count)


def recipes() -> list[str | None]:
    """None for float, then every format with every combination of its parameters' values."""
    texts: list[str | None] = [None]
    for name, kind in qc.formats.FORMATS.items():
        names = [each.name for each in kind.parameters]
        for values in itertools.product(*(each.choices for each in kind.parameters)):
            settings = ",".join(f"{key}={value}" for key, value in zip(names, values, strict=True))
            texts.append(f"{name}:{settings}" if settings else name)
    return texts


def compiled(model: NextByte, text: str | None) -> qc.Program:
    """The model with its linears in the format; the embedding, which is also the output matrix, in int8 per row."""
    quant = None if text is None else qc.QuantConfig("float", linear=text, embedding="int8")
    shapes = {"tokens": {0: ("batch", 1, BATCH), 1: ("length", 1, LENGTH)}}
    example = torch.zeros(3, 37, dtype=torch.int64)
    return qc.qcompile(model, (example,), quant=quant, dynamic_shapes=shapes, device="cpu")


def rows(windows: torch.Tensor) -> list[tuple[str, float, Quality]]:
    """(format, bits per weight, quality) for each recipe; the reference stands first."""
    model = load_model()
    reference = [
        base.float() for base, _ in track(log_probabilities(model, windows), "torch fp32", len(windows) // BATCH)
    ]
    result = [("fp32 (eager torch)", 32.0, measure(model, reference, windows))]
    for text in track(recipes(), "formats"):
        program = compiled(model, text)
        quality = measure(program, reference, windows)
        result.append((text or "float (compiled)", program.ledger.bits_per_weight(), quality))
    return result


def markdown(found: list[tuple[str, float, Quality]], windows: torch.Tensor) -> str:
    """docs/quality.md."""
    history = json.loads((FOLDER / "loss.json").read_text())
    base = found[0][2].bits_per_byte
    lines = [
        "# What a format costs",
        "",
        "Written by `python examples/tiny_llama.py --write`.",
        "",
        f"The model is the byte-level Llama of [examples/models/tiny_llama](../examples/models/tiny_llama/README.md) "
        f"({history['parameters'] / 1e6:.1f} M parameters), the text {windows.shape[0] * LENGTH:,} bytes of Python "
        f"modules that it was not trained on, in windows of {LENGTH}. Each row is the compiled CPU program; it is "
        "compared with the fp32 model in eager torch.",
        "",
        "- *bits per weight*: all stored bits over the elements of all matrices, as in the ledger. Linears have the "
        "row's format; the embedding, which is the output matrix as well, is int8 per row.",
        "- *bits per byte*: the mean of -log2 p(next byte); lower is better.",
        "- *KL*: the mean divergence of the quantised next-byte distribution from the fp32 one, in bits.",
        "- *top-1*: how often both give the same most likely byte.",
        "",
        "| linears | bits per weight | bits per byte | above fp32 | KL | top-1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, bits, q in found:
        above = round((q.bits_per_byte / base - 1) * 100, 2) + 0.0  # never -0.00
        lines.append(
            f"| {name} | {bits:.3f} | {q.bits_per_byte:.4f} | {above:+.2f} % | {max(q.divergence, 0.0):.1e} | "
            f"{q.agreement * 100:.2f} % |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, help="of the held-out text (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args()
    windows = held_out(options.bytes)
    found = rows(windows)
    table = Table("linears", "bits per weight", "bits per byte", "KL (bits)", "top-1")
    for name, bits, q in found:
        table.add_row(
            name, f"{bits:.3f}", f"{q.bits_per_byte:.4f}", f"{q.divergence:.2e}", f"{q.agreement * 100:.2f} %"
        )
    Console().print(table)
    if options.write:
        PAGE.write_text(markdown(found, windows))
        print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
