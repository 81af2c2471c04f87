"""The repository's own language model in every format: the loss by quantisation, measured on held-out text.

    python examples/tiny_llama.py                    # prints the table
    python examples/tiny_llama.py --write            # and writes docs/quality.md
    python examples/tiny_llama.py --write iq1_m      # the rows of one format; the others stay

Each row is a compiled program (CPU).  Its next-byte distributions over the held-out text are compared with those of the
fp32 model in eager torch: bits per byte, the divergence KL(fp32 || quantised), and how often both have the same most
likely byte.  The other columns are the errors of the format on Gaussian numbers, on MiniLM's matrices and on this
model's own.  The rows are made from the formats' declarations: every format, each of its parameters varied, and the
formats of three bits and less that are meant to be encoded with an importance once more with one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
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
from qcompiler.config import resolve_format
from qcompiler.errors import FormatShapeError
from qcompiler.runtime.encoder import encode

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "models" / "tiny_llama"
PAGE = HERE.parent / "docs" / "quality.md"
LENGTH = 512  # bytes in a window: what the model was trained with
BATCH = 16

Logits = Callable[[torch.Tensor], torch.Tensor]
Matrices = list[np.ndarray]

MEASURED_BYTES = 64 * 1024
"""Bytes of the held-out text, by default: all formats use the same windows, so a quarter of the text is enough."""
IMPORTANCE = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
"""Formats with a second row, encoded with the importance of `calibration`: llama.cpp refuses most without one."""
CALIBRATION = 32
"""Inputs of LENGTH bytes from which the importance comes."""
MODULES = ("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "pathlib", "subprocess", "tarfile", "typing")
"""Modules of the standard library, which the model was trained on: the text of `calibration`."""
SAME_NUMBERS = ("scale", "exponent", "divisor")
"""Parameters for foreign files, which the table leaves out: the type of stored scales, the rounding of exponents. A
search for scales has a row."""


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


def calibration(count: int) -> list[torch.Tensor]:
    """Texts of (1, LENGTH) bytes from modules that are not held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(
        b"".join((folder / f"{name}.py").read_bytes() for name in MODULES if (folder / f"{name}.py").exists()), np.uint8
    )
    starts = np.linspace(0, len(text) - LENGTH - 1, count).astype(int)
    return [torch.from_numpy(text[start : start + LENGTH].copy()).long()[None] for start in starts]


@dataclass
class Quality:
    """Means over all predicted bytes: bits per byte, KL in bits against the reference, and top-1 agreement."""

    bits_per_byte: float
    divergence: float
    agreement: float


def log_probabilities(model: Logits, windows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """((n, 256) log2 probabilities, (n,) the actual bytes) for each batch of windows."""
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
    """None for float; then every format with defaults, and with each parameter varied alone (a range by its ends)."""
    texts: list[str | None] = [None]
    for name, kind in qc.formats.FORMATS.items():
        texts.append(name)
        for each in kind.parameters:
            others = [value for value in each.choices if value != each.default]
            if each.name in SAME_NUMBERS:
                others = [value for value in others if value == "search"]
            ends = others if len(others) <= 4 else [others[0], others[-1]]
            texts += [f"{name}:{each.name}={value}" for value in ends]
    return texts


# --- errors of single matrices ---------------------------------------------------------------------------------------


@functools.cache
def gaussian() -> Matrices:
    """A matrix of 1024 x 1024 Gaussian numbers."""
    return [np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)]


@functools.cache
def minilm() -> Matrices:
    """The matrices of all-MiniLM-L6-v2's linears, from the package that the demo uses."""
    sys.path.insert(0, str(HERE))
    import minilm as demo

    return linears(demo.load_encoder())


@functools.cache
def own() -> Matrices:
    """The matrices of this model's linears, without the tied output matrix."""
    return linears(load_model().llama.model)


def linears(model: nn.Module) -> Matrices:
    return [each.weight.detach().numpy() for each in model.modules() if isinstance(each, nn.Linear)]


def error(text: str | None, matrices: Matrices) -> float | None:
    """||W - decoded|| / ||W|| over all matrices that the format accepts; None if it accepts fewer than half of them."""
    if text is None:
        return 0.0
    fmt, lost, whole, taken = resolve_format(text), 0.0, 0.0, 0
    for each in matrices:
        try:
            fmt.check_shape(*each.shape)
        except FormatShapeError:
            continue
        taken += 1
        wide = each.astype(np.float64)
        lost += float(((fmt.decode(encode(fmt, each)) - wide) ** 2).sum())
        whole += float((wide**2).sum())
    return math.sqrt(lost / whole) if 2 * taken >= len(matrices) else None


# --- the language model ----------------------------------------------------------------------------------------------


def compiled(model: NextByte, text: str | None, calibrate: list[torch.Tensor] | None = None) -> qc.Program:
    """The model with its linears in the format, with the importance of `calibrate`; the embedding, which is also the
    output matrix, in int8 per row."""
    quant = None if text is None else qc.QuantConfig("float", linear=text, embedding="int8")
    shapes = {"tokens": {0: ("batch", 1, BATCH), 1: ("length", 1, LENGTH)}}
    example = torch.zeros(3, 37, dtype=torch.int64)
    return qc.qcompile(model, (example,), quant=quant, dynamic_shapes=shapes, device="cpu", calibrate=calibrate)


@dataclass
class Row:
    """A format: its recipe, bits per weight of the whole model, relative errors of matrices, the model's loss."""

    name: str
    bits_per_weight: float
    errors: tuple[float | None, float | None, float | None]
    quality: Quality


def rows(windows: torch.Tensor, texts: Sequence[str | None]) -> list[Row]:
    """A row for each recipe, and another one with an importance where it pays; the reference comes first."""
    model = load_model()
    reference = [
        base.float() for base, _ in track(log_probabilities(model, windows), "torch fp32", len(windows) // BATCH)
    ]
    result = [Row("fp32 (eager torch)", 32.0, (0.0, 0.0, 0.0), measure(model, reference, windows))]
    for text in track(texts, "formats"):
        program = compiled(model, text)
        errors = (error(text, gaussian()), error(text, minilm()), error(text, own()))
        quality = measure(program, reference, windows)
        result.append(Row(text or "float (compiled)", program.ledger.bits_per_weight(), errors, quality))
        if text in IMPORTANCE:
            result.append(with_importance(model, text, reference, windows))
    return result


def with_importance(model: NextByte, text: str, reference: list[torch.Tensor], windows: torch.Tensor) -> Row:
    program = compiled(model, text, calibration(CALIBRATION))
    quality = measure(program, reference, windows)
    return Row(f"{text}, importance", program.ledger.bits_per_weight(), (None, None, None), quality)


def cells(row: Row, base: float) -> list[str]:
    """A row of the table as text; `base` are the reference's bits per byte."""
    above = round((row.quality.bits_per_byte / base - 1) * 100, 2) + 0.0  # never -0.00
    return [
        row.name,
        f"{row.bits_per_weight:.3f}",
        *("-" if each is None else f"{each * 100:.3f} %" for each in row.errors),
        f"{row.quality.bits_per_byte:.4f}",
        f"{above:+.2f} %",
        f"{max(row.quality.divergence, 0.0):.1e}",
        f"{row.quality.agreement * 100:.2f} %",
    ]


COLUMNS = (
    "linears",
    "bits per weight",
    "Gaussian",
    "MiniLM",
    "this model",
    "bits per byte",
    "above fp32",
    "KL",
    "top-1",
)


def markdown(found: list[Row], windows: torch.Tensor) -> str:
    """docs/quality.md."""
    history = json.loads((FOLDER / "loss.json").read_text())
    base = found[0].quality.bits_per_byte
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
        "- *Gaussian*, *MiniLM*, *this model*: the relative root mean square error, of one matrix of normal numbers, "
        "of all linears of all-MiniLM-L6-v2, and of this model's. A dash means that the format can store fewer than "
        "half of the matrices, since its blocks do not divide their rows, or that the row has an importance.",
        f"- *importance*: encoded with the mean square of each column's inputs, from {CALIBRATION} inputs of {LENGTH} "
        "bytes of modules that the model was trained on.",
        "- *bits per byte*: the mean of -log2 p(next byte); lower is better.",
        "- *KL*: the mean divergence of the quantised next-byte distribution from the fp32 one, in bits.",
        "- *top-1*: how often both give the same most likely byte.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
        *(f"| {' | '.join(cells(row, base))} |" for row in found),
    ]
    return "\n".join([*lines, ""])


def with_rows(page: str, found: list[Row]) -> str:
    """The page with these rows, each in the place of the row of its name or behind the last row of its format."""
    lines, base = page.splitlines(), found[0].quality.bits_per_byte
    for row in found[1:]:
        names = [line.split("|")[1].strip() if line.startswith("| ") else "" for line in lines]
        text = f"| {' | '.join(cells(row, base))} |"
        if row.name in names:
            lines[names.index(row.name)] = text
        else:
            last = max(i for i, name in enumerate(names) if name.partition(",")[0] == row.name.partition(",")[0])
            lines.insert(last + 1, text)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=MEASURED_BYTES, help="of the held-out text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("formats", nargs="*", help="only these")
    options = parser.parse_args()
    if unknown := set(options.formats) - set(recipes()):
        parser.error(f"the table has no {', '.join(sorted(unknown))}")
    windows = held_out(options.bytes)
    found = rows(windows, options.formats or recipes())
    table = Table(*COLUMNS)
    for row in found:
        table.add_row(*cells(row, found[0].quality.bits_per_byte))
    Console().print(table)
    if options.write:
        PAGE.write_text(with_rows(PAGE.read_text(), found) if options.formats else markdown(found, windows))
        print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
