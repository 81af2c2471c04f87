"""GPT-2's linear, whose weight is (in, out), for tests of calibration."""

from __future__ import annotations

import torch
from torch import nn


class Conv1D(nn.Module):
    """`x @ weight + bias`, by addmm."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n) / 16), nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
