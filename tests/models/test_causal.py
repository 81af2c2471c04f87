"""A Llama-like model that builds mask, positions and rope tables in `forward`: the program computes none per call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.inspect.checks import recomputed_per_call


def rotate(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (
            layer(h).unflatten(-1, (n, self.size)).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self.size**-0.5 + mask
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        h = self.after(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return result


class Llama(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(Block(width, heads, 2) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 97, bias=False)
        self.size = width // heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        positions = torch.arange(length)
        frequencies = 10000.0 ** (-torch.arange(0, self.size, 2).float() / self.size)
        angles = torch.cat([torch.outer(positions, frequencies)] * 2, -1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        result: torch.Tensor = self.head(self.norm(x))
        return result


@pytest.fixture(scope="module")
def program() -> qc.Program:
    torch.manual_seed(0)
    model = Llama().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    dims = {"ids": {0: ("b", 1, 4), 1: ("s", 1, 41)}}
    return qc.qcompile(model, (torch.randint(0, 97, (3, 7)),), quant="nf4", dynamic_shapes=dims)


def test_no_mask_rope_table_or_position_grid_is_computed_per_call(program: qc.Program) -> None:
    assert recomputed_per_call(program.plan) == []
    text = program.ir("fuse-elementwise")
    main = text[text.index("func.func @main") :].partition("func.func @init")[0]
    for name in ("math.cos", "math.sin", "math.powf", "math.exp2"):
        assert name not in main, name
    assert main.count("qc.attention") == 2 and "causal" in main


def test_the_check_sees_what_import_leaves(program: qc.Program) -> None:
    text = program.ir("import")
    assert "math.cos" in text and "math.sin" in text and "linalg.index" in text


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 13), (4, 41)])
def test_answers_are_the_oracles(program: qc.Program, batch: int, length: int) -> None:
    ids = torch.randint(0, 97, (batch, length))
    with torch.no_grad():
        wanted = program.oracle(ids)
    assert wanted.std() >= 1
    assert (program(ids) - wanted).norm() <= 1e-5 * wanted.norm()
