"""Convolutions compiled for the CPU and for a simulated GPU: packed weights, epilogues, sizes that are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc
from qcompiler.errors import PlanError
from qcompiler.runtime.plan_bodies import check_bodies


class Blocks(nn.Module):
    """One of each: padded, strided, one pixel, patches, groups, each channel, transposed, and what stands between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 5, 2, 2, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.same = nn.Conv2d(16, 16, 3, padding=1)
        self.strided = nn.Conv2d(16, 24, 1, stride=2)
        self.grouped = nn.Conv2d(24, 24, 3, padding=1, groups=3)
        self.each = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.scale = nn.GroupNorm(4, 24)
        self.up = nn.ConvTranspose2d(48, 16, 4, stride=2, padding=1)
        self.patches = nn.Conv2d(16, 8, 2, stride=2)
        self.line = nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.same(x) + x)
        y = functional.silu(self.scale(self.each(torch.relu(self.grouped(self.strided(x))))))
        return self.line(self.patches(x).flatten(2)), self.up(torch.cat([y, y * y], dim=1))


def images(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height))


def compiled(quant: str | None, device: str | None = None) -> qc.Program:
    recipe = qc.QuantConfig(quant, promise_bits=None) if quant else None
    dims = {"x": {0: ("b", 1, 4), 2: ("h", 16, 48), 3: ("w", 16, 48)}}
    return qc.qcompile(Blocks().eval(), (images(2, 32, 40),), quant=recipe, dynamic_shapes=dims, device=device)


def agrees(program: qc.Program, sizes: Sequence[tuple[int, int, int]]) -> None:
    for size in sizes:
        x = images(*size)
        with torch.no_grad():
            expected = program.oracle(x)
        for found, wanted in zip(program(x), expected, strict=True):
            assert found.shape == wanted.shape
            assert (found - wanted).norm() <= 1e-5 * wanted.norm(), size


@pytest.fixture(scope="module")
def program() -> qc.Program:
    return compiled("nf4")


def test_every_size_of_the_range_equals_the_oracle(program):
    agrees(program, [(1, 16, 16), (2, 19, 45), (4, 48, 27)])


def test_a_simulated_gpu_computes_the_same():
    agrees(compiled("int8", "sim:0"), [(1, 16, 19)])


def with_window(program: qc.Program, **changes: Any) -> Any:
    """The plan with another window in its first kernel that has one."""
    kernels = list(program.plan.kernels)
    place = next(i for i, spec in enumerate(kernels) if getattr(spec.body, "window", None) is not None)
    body = kernels[place].body
    window = msgspec.structs.replace(body.window, **changes)
    kernels[place] = msgspec.structs.replace(kernels[place], body=msgspec.structs.replace(body, window=window))
    return msgspec.structs.replace(program.plan, kernels=tuple(kernels))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kernel": (6, 5)}, "its windows are"),
        ({"kernel": (-5, -5)}, "all must be positive"),
        ({"size": ("h", "w + 1")}, "its windows are"),
        ({"image": ("b", "9*h", "w", 3)}, "of its operand 'x'"),
        ({"strides": (0, 1)}, "all must be positive"),
    ],
)
def test_windows_beyond_the_image_or_the_rows_are_refused(program, changes, text):
    check_bodies(program.plan)
    with pytest.raises(PlanError, match=text):
        check_bodies(with_window(program, **changes))
