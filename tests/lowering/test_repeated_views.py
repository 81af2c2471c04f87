"""What repeats over the batch or over heads is read where it lies: by products, and by what picks along a dim."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.inspect.checks import recomputed_per_call

HEADS, WIDTH, SPAN = 3, 8, 5


class Relative(nn.Module):
    """Scores by relative positions, as a model writes it that joins heads with the batch: repeat, bmm, gather."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(HEADS, 2 * SPAN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        heads = x.view(batch, length, HEADS, WIDTH).transpose(1, 2)
        joined = heads.reshape(-1, length, WIDTH)
        scores = torch.bmm(joined, self.keys.repeat(batch, 1, 1).transpose(1, 2))
        steps = torch.arange(length)
        index = (steps[:, None] - steps[None, :] + SPAN).clamp(0, 2 * SPAN - 1)
        picked = torch.gather(scores, -1, index[None].expand(batch * HEADS, length, length))
        return picked.view(batch, HEADS, length, length)


@cache
def compiled(device: str) -> tuple[nn.Module, qc.Program]:
    torch.manual_seed(0)
    model = Relative().eval()
    example = torch.randn(2, 7, HEADS * WIDTH)
    sizes = {"x": {0: ("b", 1, 4), 1: ("s", 1, 12)}}
    return model, qc.qcompile(model, (example,), dynamic_shapes=sizes, device=device, verify_each="numerics")


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_neither_heads_nor_indices_are_copied(device: str) -> None:
    model, program = compiled(device)
    (entry,) = program.plan.entries
    assert len(entry.steps) == 2, "a product and a gather"
    assert recomputed_per_call(program.plan) == []
    for batch, length in ((1, 1), (3, 7), (4, 12), (2, 1), (1, 12)):
        x = torch.randn(batch, length, HEADS * WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


class Products(nn.Module):
    """Joined heads on either side, a transposed one, and a product whose operands lie as they are."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length = x.shape[:2]
        a = x.view(batch, length, HEADS, WIDTH).transpose(1, 2).reshape(-1, length, WIDTH)
        b = y.view(batch * HEADS, WIDTH, 6)
        return torch.bmm(a, b), torch.bmm(a, a.transpose(1, 2)), torch.bmm(b.transpose(1, 2), a.transpose(1, 2))


def test_products_of_joined_heads_read_them_strided() -> None:
    model = Products().eval()
    x, y = torch.randn(2, 5, HEADS * WIDTH), torch.randn(2, HEADS, WIDTH, 6)
    sizes = {"x": {0: ("b", 1, 4), 1: ("s", 1, 12)}, "y": {0: ("b", 1, 4)}}
    program = qc.qcompile(model, (x, y), dynamic_shapes=sizes, verify_each="numerics")
    assert program.ir("raise-idioms").count("= tensor.collapse_shape") >= 3, "their results are joined again"
    (entry,) = program.plan.entries
    assert len(entry.steps) == 3, "three products"
    for batch, length in ((1, 1), (4, 12), (2, 5)):
        x, y = torch.randn(batch, length, HEADS * WIDTH), torch.randn(batch, HEADS, WIDTH, 6)
        for ours, theirs in zip(program(x, y), model(x, y), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
