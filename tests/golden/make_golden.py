"""Writes the golden files of this version: `python tests/golden/make_golden.py`. README.md in this folder says when.

<version>-format<N>-target.qca      a small model for the CPU, weights in the target's layout, with a native build
<version>-format<N>-canonical.qca   the same with canonical weights and no build
<version>-format<N>-cuda.qca        the same for GPUs, without a cubin (runs on sim:0)
<version>-format<N>.npz             inputs of four calls, and what eager torch makes of them with the stored weights
<version>-format<N>.schema.json     the schema of program.json, as this version reads and writes it

An existing file is never overwritten: a golden is a promise to those who have files of that version.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn

import qcompiler as qc
from qcompiler.config import QuantConfig
from qcompiler.runtime import ProgramImage, save_image
from qcompiler.runtime.program_file import FORMAT_VERSION, Header

FOLDER = Path(__file__).resolve().parent
NAME = f"{qc.__version__}-format{FORMAT_VERSION}"
SIZES = ((2, 5), (3, 11), (1, 1), (2, 16))
"""Batch and length of the calls, in order: the state runs through them."""

VOCABULARY, HIDDEN, HEADS, FFN = 61, 64, 4, 96
QUANT = QuantConfig(
    "nf4",
    rules={
        "q": "int4:group=32",
        "k": "int8",
        "v": "int4:group=64",
        "down": "int4:group=32,symmetric=False",
        "head": None,
    },
    promise_bits=20.0,
)


class Decoder(nn.Module):
    """One block of a language model: embedding, RMSNorm, rotary positions, causal attention, SwiGLU; and two states."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.before, self.after = nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=index == 2) for index in range(4))
        self.gate, self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.linspace(-1.0, 1.0, HIDDEN))

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        b, s = ids.shape
        x = self.embedding(ids) + shift[:, :, None]
        h = self.before(x)
        q, k, v = (part(h).view(b, s, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(rotated(q, s), rotated(k, s), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, HIDDEN))
        h = self.after(x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        logits = self.head(x) + self.mean.sum()
        self.count += 1
        self.mean.mul_(0.5).add_(0.5 * x.mean((0, 1)))
        return {
            "logits": logits, "best": logits.argmax(-1), "softmax": x.softmax(-1)[:, -1], "count": self.count * 1,
            "running": x.cumsum(1)[:, :, :4],
        }  # fmt: skip


def rotated(x: torch.Tensor, length: int) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, length, width)."""
    half = x.shape[-1] // 2
    angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(half) * 0.5)
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * torch.cat((angles.cos(),) * 2, -1) + turned * torch.cat((angles.sin(),) * 2, -1)


def inputs() -> list[dict[str, np.ndarray]]:
    """The arguments of each call, by NumPy's PCG64 with a fixed seed."""
    random = np.random.default_rng(20)
    return [
        {"ids": random.integers(0, VOCABULARY, size), "shift": random.standard_normal(size).astype(np.float32)}
        for size in SIZES
    ]


def compiled(device: str, targets: list[str] | None) -> qc.Program:
    torch.manual_seed(11)
    model = Decoder().eval()
    example = {name: torch.from_numpy(value) for name, value in inputs()[1].items()}
    dims = {0: ("b", 1, 4), 1: ("s", 1, 16)}
    return qc.qcompile(
        model, kwargs=example, quant=QUANT, dynamic_shapes={"ids": dims, "shift": dims}, device=device, targets=targets,
        buckets=[("main", {})],
    )  # fmt: skip


def calls(program: qc.Program) -> dict[str, np.ndarray]:
    """Inputs and expected results of all calls as `in.<call>.<name>` and `out.<call>.<name>`."""
    arrays: dict[str, np.ndarray] = {}
    for number, arguments in enumerate(inputs()):
        with torch.no_grad():
            results = program.oracle(**{name: torch.from_numpy(value) for name, value in arguments.items()})
        arrays |= {f"in.{number}.{name}": value for name, value in arguments.items()}
        arrays |= {f"out.{number}.{name}": value.numpy().copy() for name, value in results.items()}
    return arrays


def schema() -> str:
    """The schema of program.json as text."""
    return json.dumps(msgspec.json.schema(Header), indent=1, sort_keys=True) + "\n"


def write(folder: Path) -> list[Path]:
    """Writes all files. FileExistsError if one is there."""
    names = ("-target.qca", "-canonical.qca", "-cuda.qca", ".npz", ".schema.json")
    paths = [folder / f"{NAME}{name}" for name in names]
    if there := [path.name for path in paths if path.exists()]:
        raise FileExistsError(f"{', '.join(there)}: a golden of a release is never overwritten (see README.md)")
    target, canonical, cuda, arrays, text = paths
    program = compiled("cpu", ["x86-64"])
    image = with_few_texts(program.run.image)
    save_image(image.with_native(program.run.native), target)
    save_image(image, canonical, layout="canonical")
    save_image(with_few_texts(compiled("sim:0", ["sm_80"]).image), cuda)
    np.savez_compressed(arrays, **calls(program))
    text.write_text(schema())
    return paths


def with_few_texts(image: ProgramImage) -> ProgramImage:
    """The image with the first and the last stage's text: twenty stages would be most of a small file."""
    names = sorted(name for name in image.texts if name.startswith("ir/"))
    return replace(image, texts={name: image.texts[name] for name in (names[0], names[-1])})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    try:
        paths = write(options.folder)
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
