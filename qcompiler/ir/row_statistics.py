"""What statistics of rows in parts mean, in NumPy: see qcompiler/plan/row_statistics.py.

parts_of(rows, "layer")                      (…, width): what a linear gives beside its rows
mean_and_square(parts, "layer", columns)     the mean of each row, and the mean square of the distances from it
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.plan.row_statistics import GROUP, groups, numbers

Array = npt.NDArray[Any]


def counts_of(columns: int) -> Array:
    """The number of elements in each group."""
    return np.minimum(GROUP, columns - GROUP * np.arange(groups(columns))).astype(np.float32)


def parts_of(rows: Array, kind: str) -> Array:
    """The parts of rows, as fp32 numbers."""
    *lead, columns = rows.shape
    cut = np.zeros((*lead, groups(columns) * GROUP), np.float32)
    cut[..., :columns] = rows
    cut = cut.reshape(*lead, groups(columns), GROUP)
    if kind == "rms":
        squares: Array = np.square(cut).sum(-1, dtype=np.float32)
        return squares
    counts = counts_of(columns)
    mean = cut.sum(-1, dtype=np.float32) / counts
    inside = np.arange(GROUP) < counts[:, None]
    square = np.square(np.where(inside, cut - mean[..., None], np.float32(0))).sum(-1, dtype=np.float32)
    return np.stack([mean, square], -1).reshape(*lead, groups(columns) * numbers(kind))


def mean_and_square(parts: Array, kind: str, columns: int) -> tuple[Array, Array]:
    """Both as (…, 1) in fp32; the mean is 0 for "rms", whose squares are those of the elements."""
    if kind == "rms":
        total = parts.sum(-1, keepdims=True, dtype=np.float32)
        return np.zeros_like(total), total / np.float32(columns)
    counts, pairs = counts_of(columns), parts.reshape(*parts.shape[:-1], groups(columns), 2)
    means, squares = pairs[..., 0], pairs[..., 1]
    mean = (counts * means).sum(-1, keepdims=True, dtype=np.float32) / np.float32(columns)
    total = (squares + counts * np.square(means - mean)).sum(-1, keepdims=True, dtype=np.float32)
    return mean, total / np.float32(columns)
