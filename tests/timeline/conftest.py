"""A block with independent branches, compiled for one simulated GPU and for the CPU; its files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc


class Branches(nn.Module):
    """Three projections of one norm, which meet; a table that depends on nothing of it; a large product at the end."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        wave = torch.sin(t[:, None] * torch.arange(64, device=t.device)).cumsum(-1)
        q, k, v = self.query(y).cumsum(-1), self.key(y).cumsum(-1), self.value(y).cumsum(-1)
        return self.out(torch.softmax(q * k, -1) * v + wave[:, None])


def arguments(b: int, s: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, 64, generator=generator), torch.rand(b, generator=generator)


@cache
def compiled(device: str) -> qc.Program:
    torch.manual_seed(0)
    model = Branches().eval()
    b, s = ("b", 1, 4), ("s", 1, 32)
    return qc.qcompile(
        model, arguments(2, 7), quant=qc.QuantConfig("nf4", separate=("*",)),  # merged, there is one branch
        dynamic_shapes=({0: b, 1: s}, {0: b}), device=device,
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 32)})],
    )  # fmt: skip


@pytest.fixture(scope="session")
def branches() -> qc.Program:
    return compiled("sim:0")


@pytest.fixture(scope="session")
def on_the_cpu() -> qc.Program:
    return compiled("cpu")


@pytest.fixture(scope="session")
def inputs() -> Callable[..., Any]:
    return arguments


@pytest.fixture(scope="session")
def saved(branches: qc.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timeline") / "branches.qca"
    branches.save(path)
    return path
