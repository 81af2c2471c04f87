"""Complex numbers become real arithmetic; conditions of torch's own that hold for every size add no guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import qcompiler as qc
from qcompiler.errors import QCompilerError
from qcompiler.frontends.torch.capture.settled_conditions import without_known_choices


class Rotated(nn.Module):
    """Pairs of numbers turned by angles, as DeepSeek V2 and Llama 4 do it."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            turns = torch.polar(torch.ones_like(angles), angles) * 2.0
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns.to(x.device)[:, None, :]).flatten(2)


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


class Direct(nn.Module):
    """Results that are parts themselves, of values whose parts are slices."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = torch.complex(x[:, :4], x[:, 4:]).flatten()
        return torch.view_as_real(c.conj().resolve_conj()), c.real


def test_parts_may_be_results() -> None:
    x = torch.randn(3, 8)
    for ours, theirs in zip(qc.qcompile(Direct(), (x,))(x), Direct()(x), strict=True):
        torch.testing.assert_close(ours, theirs)


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


@pytest.mark.parametrize("length", [1, 5, 8])
def test_sizes_from_one_on_are_not_narrowed_by_a_question_of_torch(length: int) -> None:
    """torch asks whether the rows of all experts are contiguous, in terms of min(64, 64 * s)."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64
    )
    model = Llama4TextMoe(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    sizes = {"hidden_states": {1: torch.export.Dim("s", min=1, max=8)}}
    program = qc.qcompile(model, (torch.randn(1, 5, 64),), dynamic_shapes=sizes)
    x = torch.randn(1, length, 64)
    torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


class Before(nn.Module):
    """Each column beside the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) + x


def test_a_part_that_may_have_one_column_or_none_excludes_no_size() -> None:
    """torch asks whether a part lies in memory without gaps, which depends on whether it has one column."""
    model, x = Before(), torch.randn(2, 8, 5)
    program = qc.qcompile(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("s", min=1, max=8)}})
    for size in range(1, 9):
        part = x[:, :size].contiguous()
        assert torch.equal(program(part), model(part)), size
