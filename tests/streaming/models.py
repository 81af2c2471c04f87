"""Small models, and what their programs store. Loaded by path: test folders are no packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.frontends.weights.weight_files import WeightFiles
from qcompiler.frontends.weights.weight_source import WeightSource


class Mixed(nn.Module):
    """One of each: a table, linears with and without bias, a tied head, `x @ W`, a norm, and an unused parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 64, dtype=dtype)
        self.first = nn.Linear(64, 128, dtype=dtype)
        self.norm = nn.LayerNorm(128, dtype=dtype)
        self.turned = nn.Parameter(torch.randn(128, 64, dtype=dtype) / 8)
        self.head = nn.Linear(64, 96, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(64, 8, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(self.table(ids))))
        return self.head(x @ self.turned)


IDS = (torch.arange(15).reshape(3, 5),)


def stored(result: ImportResult) -> dict[str, tuple[Any, ...]]:
    """Everything that a program stores, by key."""
    return {t.key: (t.dtype, t.shape, t.format, t.parameters, t.data.tobytes()) for t in result.weights}


def imported(
    model: nn.Module,
    args: tuple[Any, ...],
    quant: Any = None,
    weights: WeightSource | None = None,
    files: WeightFiles | None = None,
) -> ImportResult:
    return import_torch(model, args, {}, quant, None, weights=weights, files=files)


def saved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict as checkpoints hold it: of tied parameters the first only."""
    kept: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        kept.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in kept.values()}
