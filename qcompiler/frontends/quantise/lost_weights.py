"""Counts weights that became zero because their block's scale did: their values are too small for fp16 scales.

A format may round a small weight to zero beside a large one; that is intended.  But if all weights of a block are
small, the scale itself is rounded: an fp16 scale below 2^-25 becomes zero, and with it every weight of the block,
invisibly in the codes.  Models do have blocks of such weights (a pruned expert, a layer behind a tiny learned factor).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Format, PackedTensor

TINY = 2.0**-11
"""A block whose largest value is at least this keeps its scale in every format. The coarsest scale is q6_K's fp16 scale
of scales: the largest value divided by 32 * 127, which is at least 2^-24 for values from 2^-12 on."""

WARN_FROM = 0.01
"""Share of a parameter's non-zero weights that may become zero without a warning."""

_STEP = 1 << 20


def lost_share(fmt: Format, matrix: npt.NDArray[np.generic], packed: PackedTensor) -> float:
    """The share of the non-zero weights that decode to zero in blocks with small values only.

    Takes one pass over the values; decodes only if a block is that small.
    """
    flat, cols = matrix.reshape(-1), matrix.shape[1]
    block = min(fmt.declare().block_size(cols), flat.size)
    step = block * max(1, _STEP // block)
    tiny: list[npt.NDArray[np.bool_]] = []
    nonzero = 0
    for start in range(0, flat.size, step):
        values = np.abs(flat[start : start + step].astype(np.float32, copy=False))
        nonzero += int(np.count_nonzero(values))
        largest = np.maximum.reduceat(values, np.arange(0, values.size, block))
        tiny.append((largest > 0) & (largest < TINY))
    small = np.concatenate(tiny) if tiny else np.zeros(0, np.bool_)
    if not small.any():
        return 0.0
    lost, rows = 0, max(1, _STEP // cols)
    for first in range(0, matrix.shape[0], rows):
        stop = min(first + rows, matrix.shape[0])
        inside = small[np.arange(first * cols, stop * cols) // block].reshape(-1, cols)
        if inside.any():
            gone = (fmt.decode_rows(packed, first, stop) == 0) & (matrix[first:stop].astype(np.float32) != 0)
            lost += int(np.count_nonzero(gone & inside))
    return lost / nonzero


def describe(share: float) -> str:
    """The ledger's text."""
    return f"{share:.2%} of its non-zero weights became zero: too small for the format's scales"
