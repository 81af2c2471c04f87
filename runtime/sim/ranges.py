"""The exact bytes that a kernel's operand covers, for values of the symbols."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import ITEMSIZE, Operand

MAX_PIECES = 4096
"""An operand with more pieces than this is described by its hull."""


@dataclass(frozen=True)
class Extent:
    """Byte ranges relative to an operand's address, sorted and disjoint; only the hull if there are too many."""

    pieces: tuple[tuple[int, int], ...]
    is_exact: bool = True

    @property
    def hull(self) -> tuple[int, int]:
        return (self.pieces[0][0], self.pieces[-1][1]) if self.pieces else (0, 0)


def extent_of(operand: Operand, symbols: Mapping[str, int]) -> Extent:
    """The bytes of an operand. FormatError for a packed operand that its layout cannot hold."""
    shape = [_value(size, symbols) for size in operand.shape]
    if min(shape, default=1) <= 0:
        return Extent(())
    if operand.format is not None or operand.layout not in (None, "canonical"):
        fmt = None if operand.format is None else formats.get(operand.format.name, **operand.format.params)
        layout = layouts.get(operand.layout or "canonical")
        return Extent(((0, layout.nbytes(fmt, operand.dtype, shape[0], shape[1])),))
    strides = [_value(stride, symbols) for stride in operand.strides]
    return _strided(shape, strides, ITEMSIZE[operand.dtype])


def _value(size: Dim, symbols: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else dim(size).evaluate(symbols)


def _strided(shape: list[int], strides: list[int], itemsize: int) -> Extent:
    axes = [(size, stride * itemsize) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    low = sum((size - 1) * step for size, step in axes if step < 0)
    run = itemsize  # bytes in a row, grown by every axis that continues it
    outer: list[tuple[int, int]] = []
    for size, step in sorted(((size, abs(step)) for size, step in axes), key=lambda axis: axis[1]):
        if step <= run and not outer:
            run += (size - 1) * step
        else:
            outer.append((size, step))
    if math.prod(size for size, _ in outer) > MAX_PIECES:
        return Extent(((low, low + run + sum((size - 1) * step for size, step in outer)),), is_exact=False)
    starts = np.zeros(1, np.int64)
    for size, step in outer:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    starts = np.unique(starts) + low
    ends = starts + run
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > np.maximum.accumulate(ends)[:-1])))
    last = np.concatenate((first[1:], [len(starts)])) - 1
    return Extent(tuple(zip(starts[first].tolist(), ends[last].tolist(), strict=True)))
