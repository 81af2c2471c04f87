"""Linears in fp32 by tiles of AMX (fp32_tiles.h): which weights they take, and what scratch they need."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from qcompiler import formats
from qcompiler.formats import Format
from qcompiler.formats.integer_product import line_of
from qcompiler.kernels.decoding import ends_inside_groups, shared_columns
from qcompiler.plan.kernel import Operand

_SPANS = (0, 32, 64, 128)
"""Columns of a scale: whole tiles, of which a block of columns has whole ones; 0: all."""

_ROWS, _BLOCK, _PANELS, _MOST = 16, 128, 16, 512
"""fp32_tiles.h's QFT_ROWS, QFT_BLOCK, QFT_PANELS, and most rows at a time."""


def multiplies(weight: Operand, isa: str) -> bool:
    """Whether a linear of fp32 factors with this weight, which lies in panels, has a form by tiles."""
    if isa != "x86-64-v4" or weight.format is None or weight.dtype == "bf16":
        return False
    k = int(weight.shape[1])
    return _fits(formats.get(weight.format.name, **weight.format.params), k)


def _fits(fmt: Format, k: int) -> bool:
    """Whether values of codes are numbers of bf16, and rows of `k` columns have whole tiles and whole scales."""
    declaration, span = fmt.declaration, shared_columns(fmt)
    if k % 32 or span not in _SPANS or ends_inside_groups(fmt, k) or (span and k % span):
        return False
    line = line_of(declaration)
    if declaration.trellis is not None or line is None or not 2 <= declaration.codes.bits <= 8:
        return False
    if span == 0 and line[1] is not None:  # no other kernel in fp32 sums codes apart from the offset of a whole row
        return False
    values = declaration.code_values
    return np.array_equal(values.astype(ml_dtypes.bfloat16), values, equal_nan=True)


def scratch(k: int, m: int) -> int:
    """fp32_tiles.h's qft_scratch: tiles of sums, words, sums, a row; rows of x in pieces and the sums of columns."""
    padded = -(-k // 32) * 32
    most = -(-m // _ROWS) * _ROWS if 0 < m < _MOST else _MOST
    fit = (6 << 20) // (6 * padded) // _ROWS * _ROWS if k > 0 else most
    chunk = min(max(fit, _ROWS), most)
    work = 4 * 1024 + _PANELS * _BLOCK * 32 + 4 * (chunk * (_PANELS + 1) * 16 + padded + 32)
    return work + chunk * (6 * padded + 4 * (k // 32 + 1))
