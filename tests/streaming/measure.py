"""A process of its own that compiles a model and reports how much anonymous memory that took, as JSON lines.

    measure.py FOLDER KIND SOURCE LAYERS WIDTH WORKDIR     KIND: linear, turned, conv     SOURCE: shards, module

Growth is RssAnon of /proc/self/status (no pages of files), sampled every 2 ms, over what it is once the model is there
and a small program was compiled and run.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from anonymous_memory import Peak, anonymous
from safetensors.torch import save_file
from torch import nn

import qcompiler as qc
from qcompiler.config import QuantConfig


class Net(nn.Module):
    """Layers of one shape: linears, products `x @ W` (stored transposed), or convolutions with batch norms (folded)."""

    def __init__(self, kind: str, layers: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        elif kind == "turned":
            self.layers = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(layers))
        else:
            made = (nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in range(layers))
            self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "conv":
            x = x[:, :, None, None]
        for layer in self.layers:
            x = torch.relu(x @ layer) if self.kind == "turned" else torch.relu(layer(x))
        return x


def filled(kind: str, layers: int, width: int) -> Net:
    torch.manual_seed(0)
    model = Net(kind, layers, width).eval()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.02, 0.02)
    return model


def write(folder: Path, model: Net) -> None:
    state = model.state_dict()
    for number, first in enumerate(range(0, len(state), 4)):
        save_file({name: state[name] for name in list(state)[first : first + 4]}, folder / f"{number:05}.safetensors")


def main(folder: Path, kind: str, source: str, layers: int, width: int, workdir: str) -> None:
    sizes = {"x": {0: ("b", 1, 4)}}
    for quant in (QuantConfig("nf4", promise_bits=None), None):
        small = filled(kind, 2, 64)
        qc.qcompile(small, (torch.randn(3, 64),), quant=quant, dynamic_shapes=sizes)(torch.randn(3, 64))
        if source == "shards":
            with qc.empty_weights():
                model = Net(kind, layers, width).eval()
        else:
            model = filled(kind, layers, width)
        gc.collect()
        before = anonymous()
        peak = Peak()
        peak.start()
        program = qc.qcompile(
            model, (torch.randn(3, width),), quant=quant, dynamic_shapes=sizes,
            weights=folder if source == "shards" else None, workdir=workdir or None,
        )  # fmt: skip
        program(torch.randn(2, width))
        program.save(folder / "saved.qca")
        program.save(folder / "saved.qca", layout="canonical")
        facts = {
            "quant": None if quant is None else "nf4",
            "growth": peak.stop() - before,
            "model": sum(p.numel() * p.element_size() for p in model.parameters()),
            "largest": max(p.numel() * p.element_size() for p in model.parameters()),
            "packed": program.image.weights.nbytes,
        }
        print(json.dumps(facts), flush=True)
        del program, model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
