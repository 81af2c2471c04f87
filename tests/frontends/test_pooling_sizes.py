"""Pooling of dynamic sizes: with `ceil_mode` as without, at every size of the range, in every number of dimensions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qcompiler as qc
from qcompiler.errors import NarrowedDimError
from qcompiler.frontends.torch.capture.pooling import _size, _torchs_size


def test_the_size_without_a_guard_is_torchs_at_every_size() -> None:
    """Whatever the rule claims: all small kernels, strides, paddings and dilations."""
    covered = 0
    for kernel, stride, dilation, size in itertools.product(range(1, 6), range(1, 7), (1, 2, 3), range(1, 40)):
        for before in range(kernel // 2 + 1):
            reach = dilation * (kernel - 1) + 1
            if size + 2 * before < reach or stride > reach - before:
                continue
            found = _size(_Symbolic(size), kernel, before, before, stride, dilation, True)
            assert int(found) == _torchs_size(size, kernel, before, before, stride, dilation, True)
            covered += 1
    assert covered > 2000


class _Symbolic(torch.SymInt):
    """A size that reads as a dynamic one, and forbids to be asked about its value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: int) -> _Symbolic:
        return _Symbolic(self.value + other)

    def __sub__(self, other: int) -> _Symbolic:
        return _Symbolic(self.value - other)

    def __floordiv__(self, other: int) -> _Symbolic:
        return _Symbolic(self.value // other)

    def __int__(self) -> int:
        return self.value

    def __ge__(self, other: object) -> bool:
        raise AssertionError("a guard")


class Pools(nn.Module):
    """Every pooling with `ceil_mode`, over one image."""

    def forward(self, x: torch.Tensor) -> Any:
        line = x[:, :, 0]
        return (
            F.max_pool2d(x, 3, 2, ceil_mode=True), F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False),
            F.max_pool1d(line, 3, 2, ceil_mode=True), F.max_pool1d(line, 2), F.avg_pool1d(line, 3, 2, ceil_mode=True),
            F.max_pool1d(line, 3, 2, 1, ceil_mode=True, return_indices=True)[1],
            F.max_pool3d(x[:, None], (1, 3, 2), (1, 2, 2), ceil_mode=True),
        )  # fmt: skip


def test_ceil_mode_compiles_with_dynamic_sizes_and_is_right_at_each() -> None:
    x = torch.randn(2, 3, 11, 13)
    made = qc.qcompile(Pools(), (x,), dynamic_shapes=({2: ("h", 4, 24), 3: ("w", 4, 24)},))
    for h, w in ((4, 5), (5, 4), (7, 8), (8, 9), (12, 7), (24, 23)):
        image = torch.randn(2, 3, h, w)
        for found, expected in zip(made(image), Pools()(image), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Gaps(nn.Module):
    """Windows with gaps between them: whether the last one begins in the padding depends on the size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 1, 3, ceil_mode=True)


def test_a_pooling_whose_windows_depend_on_the_size_names_its_line() -> None:
    with pytest.raises(NarrowedDimError, match=r"narrows .*Narrowed by .*test_pooling_sizes.py.*F.max_pool2d\(x, 1, 3"):
        qc.qcompile(Gaps(), (torch.randn(2, 3, 11, 13),), dynamic_shapes=({2: ("h", 4, 24)},))
