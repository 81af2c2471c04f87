"""Attention over windows of an image, and over joined heads with a mask for each image, at every batch.

The forms are those of Swin (a bias for each head, then a mask for each window, with the windows parted from the batch)
and of decoders that use `torch.bmm` (heads joined with the batch, parted to add the mask of each image).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc

WINDOWS, HEADS, TOKENS, WIDTH = 4, 2, 9, 16


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        b, s, _ = x.shape
        return list(self.qkv(x).reshape(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4))

    def joined(self, y: torch.Tensor) -> torch.Tensor:
        b, _, s, _ = y.shape
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(b, s, WIDTH))
        return result


class Windows(Heads):
    """x (b * WINDOWS, TOKENS, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.register_buffer("mask", torch.where(torch.rand(WINDOWS, TOKENS, TOKENS) < 0.3, -100.0, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x.reshape(-1, TOKENS, WIDTH))
        scores = q * 0.25 @ k.transpose(-2, -1) + self.bias.unsqueeze(0)
        scores = scores.view(-1, WINDOWS, HEADS, TOKENS, TOKENS) + self.mask.unsqueeze(1).unsqueeze(0)
        weights = scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1)
        return self.joined(weights @ v).reshape(x.shape)


class Joined(Heads):
    """x (b, TOKENS, WIDTH), mask (b, 1, TOKENS, TOKENS)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(-1, TOKENS, WIDTH // HEADS) for part in self.heads(x))
        scores = torch.bmm(q * 0.25, k.transpose(1, 2)).view(-1, HEADS, TOKENS, TOKENS) + mask
        weights = scores.view(-1, TOKENS, TOKENS).softmax(-1)
        return self.joined(torch.bmm(weights, v).view(-1, HEADS, TOKENS, WIDTH // HEADS))


def inputs(form: str, batch: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(batch)
    if form == "windows":
        return (torch.randn(batch, WINDOWS * TOKENS, WIDTH),)
    mask = torch.where(torch.rand(batch, 1, TOKENS, TOKENS) < 0.3, torch.finfo(torch.float32).min, 0.0)
    return torch.randn(batch, TOKENS, WIDTH), mask


@pytest.mark.parametrize("batch", ["dynamic", *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("form", ["windows", "joined"])
def test_attention_of_windows_and_of_joined_heads(form: str, batch: int | str) -> None:
    torch.manual_seed(0)
    model = (Windows() if form == "windows" else Joined()).eval()
    example = inputs(form, 2 if batch == "dynamic" else int(batch))
    dims = {name: {0: ("b", 1, 8)} for name in ("x", "mask")[: len(example)]} if batch == "dynamic" else None
    program = qc.qcompile(model, example, dynamic_shapes=dims)
    assert "qc.attention" in program.ir("raise-idioms")
    for n in (1, 2, 3, 8) if batch == "dynamic" else (int(batch),):
        args = inputs(form, n)
        with torch.no_grad():
            wanted = model(*args).numpy()
        got = program(*args).numpy()
        assert np.abs(got - wanted).max() <= 2e-6 * np.abs(wanted).max()
