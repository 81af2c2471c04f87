"""Sizes that are multiples of a symbol: `4 * Dim("h")` is what a network that halves its image twice can take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import qcompiler as qc
from qcompiler.errors import ArgumentShapeError


class TwoScales(nn.Module):
    """Down by four, up again, joined with what it was on the way; then rows of four as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.second = nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.last = nn.Conv2d(16, 8, 3, padding=1)
        self.mix = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.relu(self.first(x))
        up = nn.functional.interpolate(torch.relu(self.second(half)), scale_factor=2.0, mode="nearest")
        return self.last(torch.cat([up, half], 1)) + up, self.mix(x.reshape(x.shape[0], -1, 4))


@pytest.fixture(scope="module")
def program() -> Any:
    torch.manual_seed(0)
    b, h, w = Dim("b", min=1, max=4), Dim("h", min=1, max=8), Dim("w", min=1, max=6)
    return qc.qcompile(
        TwoScales().eval(), (torch.randn(2, 3, 16, 12),), dynamic_shapes=({0: b, 2: 4 * h, 3: 4 * w},),
        verify_each="numerics",
    )  # fmt: skip


def test_every_multiple_in_the_range_runs(program: Any) -> None:
    assert program.plan.entries[0].inputs[0].shape == ("b", 3, "4*h", "4*w")
    for size in ((1, 3, 4, 4), (4, 3, 32, 24), (3, 3, 20, 8)):
        x = torch.randn(size)
        for got, wanted in zip(program(x), program.oracle(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 3, 6, 4), r"argument 'x' has shape \(1, 3, 6, 4\).* dimension 2 is 6, which is not 4\*h for any whole"),
        ((1, 3, 4, 28), r"dimension 3 \(4\*w\) is 28, and w must lie in 1…6"),
        ((1, 3, 0, 4), r"dimension 2 \(4\*h\) is 0, and h must lie in 1…8"),
    ],
)
def test_other_sizes_are_refused_before_anything_runs(program: Any, size: tuple[int, ...], message: str) -> None:
    with pytest.raises(ArgumentShapeError, match=message):
        program(torch.zeros(size))
