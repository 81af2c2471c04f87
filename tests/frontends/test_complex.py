"""Complex numbers become real arithmetic; conditions of torch's own that hold for every size add no guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges

import qcompiler as qc
from qcompiler.errors import QCompilerError
from qcompiler.frontends.torch.capture.settled_conditions import without_known_choices


class Rotated(nn.Module):
    """Pairs of numbers turned by angles, as DeepSeek V2 and Llama 4 do it."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            turns = torch.polar(torch.ones_like(angles), angles) * 2.0
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[:, None, :]).flatten(2)


class Mixed(nn.Module):
    """Sums, conjugates and parts."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.complex(x[:, 0, :4], x[:, 1, :4])
        b = torch.polar(angles.abs(), angles).transpose(0, 1).transpose(0, 1)
        c = (a + b.conj()) * x[:, 2, :4] - a
        return torch.view_as_real(c)[..., 0], c.imag


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("model", [Rotated(), Mixed()], ids=["rotated", "mixed"])
def test_complex_arithmetic_gives_what_torch_gives(model: nn.Module, batch: int) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(batch, 5, 8), torch.randn(batch, 4)
    program = qc.qcompile(model, (x, angles))
    found, expected = program(x, angles), model(x, angles)
    for ours, theirs in zip(*map(pytree.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)  # two products and a sum in fp32
    assert "complex<" not in program.ir("import")


class Unsupported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real


def test_an_operator_on_complex_values_without_real_parts_is_named() -> None:
    with pytest.raises(QCompilerError, match="fft"):
        qc.qcompile(Unsupported(), (torch.randn(2, 8),))


@pytest.mark.parametrize(("low", "high", "known"), [(1, 8, True), (2, 1024, True), (0, 8, True), (-3, 8, False)])
def test_a_minimum_is_replaced_only_where_it_is_known_for_the_whole_range(low: int, high: int, known: bool) -> None:
    size = sympy.Symbol("s", integer=True)
    ranges: dict[Any, Any] = {size: ValueRanges(low, high)}
    least, most = Min(256 * size, 256 * size + 256), Max(-size, 5)
    assert (without_known_choices(least, ranges) == 256 * size) is True
    assert (without_known_choices(most, ranges) == 5) is True
    crossing = Min(2 * size, size + 2)  # size 2 is where they meet
    assert without_known_choices(crossing, ranges) == (crossing if low < 2 < high else size + 2)
    assert (without_known_choices(Min(size, 0), ranges) == 0) is known


class Stacked(nn.Module):
    """A column of a row for each expert: torch asks whether it is contiguous, in terms of the smaller of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 16)
        scores = torch.softmax(rows[:, :4], -1)
        repeated = rows.repeat(4, 1) * scores.transpose(0, 1).reshape(-1, 1)
        return torch.bmm(repeated.view(4, -1, 16), self.weight).sum(0)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_sizes_from_one_on_are_not_narrowed_by_a_question_of_torch(length: int) -> None:
    torch.manual_seed(0)
    model = Stacked().eval()
    program = qc.qcompile(
        model, (torch.randn(1, 5, 16),), dynamic_shapes={"x": {1: torch.export.Dim("s", min=1, max=8)}}
    )
    x = torch.randn(1, length, 16)
    torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)
