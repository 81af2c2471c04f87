"""A position before the first of a cache is refused as one behind the last is; it wrote the last slot.

index_put, for which torch counts negative indices from the end, does so.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import IndexOutOfRangeError

SLOTS = 8


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", torch.zeros(1, SLOTS, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.slots.index_copy_(1, at, x)
        return self.slots.sum(-1)


class Put(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x, (at,), y)


X = torch.ones(1, 2, 4)


def positions(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("stepwise", [False, True])
def test_positions_outside_of_a_cache_are_refused_on_the_cpu(stepwise: bool) -> None:
    program = qc.qcompile(Cache(), (X, positions(0, 1)))
    run = program.session(stepwise=stepwise)
    want = run(X, positions(6, 7)).clone()
    for bad in ((-1, 0), (0, -SLOTS), (SLOTS, 0), (0, -SLOTS - 1)):
        with pytest.raises(IndexError):
            Cache()(X, positions(*bad))  # torch, too
        with pytest.raises(IndexOutOfRangeError, match=rf"outside 0…{SLOTS - 1}"):
            run(X * 9, positions(*bad))
        assert torch.equal(run(X, positions(6, 7)), want), "nothing was written"


def test_positions_outside_of_a_cache_write_nothing_on_a_gpu() -> None:
    program = qc.qcompile(Cache(), (X, positions(0, 1)), device="sim:0")
    want = program(X, positions(6, 7)).clone()
    for bad in ((-1, -2), (-SLOTS, SLOTS), (SLOTS, -SLOTS - 1)):
        assert torch.equal(program(X * 9, positions(*bad)), want)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_index_put_counts_negative_indices_from_the_end_as_torch_does(device: str) -> None:
    x, y = torch.randn(6, 3), torch.randn(2, 3)
    program = qc.qcompile(Put(), (x, positions(0, 1), y), device=device)
    for at in ((0, 5), (-1, 2), (-6, -2)):
        assert torch.equal(program(x, positions(*at), y), Put()(x, positions(*at), y)), at
