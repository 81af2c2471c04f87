"""GPTQ: codes whose errors cancel in the layer's outputs, by the second moments of its inputs.

    nearest   code[j] = nearest(w[j])                                      every column for itself
    GPTQ      code[j] = nearest(w[j]); e = (w[j] - value) / U[j, j]         columns in turn, and the columns that follow
              w[j + 1:] -= e * U[j, j + 1:]                                make up for the error

U is the upper Cholesky factor of the inverse of H = X^T X + damping (K, K), so that the sum of squared errors of the
outputs, trace((W - Q) H (W - Q)^T), falls.  Columns are taken in the order of their second moments, largest first
("act-order").  Scales and zero points stay those of the format's own encoder, so the order needs no index in the file,
and every format whose codes can be chosen one by one is served (levels.py).

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023 (arXiv 2210.17323); damping and act-order as in its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate import trellis_gptq
from qcompiler.calibrate.levels import Codes, Float64, Levels, why_no_levels, with_codes
from qcompiler.errors import CalibrationError
from qcompiler.formats import Format, PackedTensor

Float32 = npt.NDArray[np.float32]

DAMPING = 0.01
"""A share of the mean second moment that is added to each: it bounds how far a column may make up for others."""
LARGEST_DAMPING = 1.0
ROWS = 4096
"""Rows that are solved at a time."""
BLOCK = 128
"""Columns whose errors are collected before all columns behind them are corrected, in one product of matrices."""


@dataclass(frozen=True)
class Solved:
    """The matrix with its codes, and the share that the squared error is of the outputs' squares, before and after.

    `rounded` (rows, K) holds what the codes are the nearest ones of: the weights, moved by the errors made up for.
    """

    packed: PackedTensor
    rounded: Float32
    nearest_error: float
    error: float


def why_not(fmt: Format, cols: int) -> str:
    """Why the codes of a matrix with so many columns cannot be chosen: "" if they can."""
    return "" if fmt.declaration.trellis is not None else why_no_levels(fmt, cols)


def solve(weights: Float32, nearest: PackedTensor, moments: Float64) -> Solved:
    """Chooses the codes of `nearest`, which holds the matrix `weights` (rows, K), by `moments`.

    `moments` is X^T X (K, K) of the layer's inputs.  A column whose inputs were all zero keeps its nearest codes, and
    so does a row whose error would not fall.  Rows do not depend on each other: `ROWS` of them are in memory as fp64 at
    a time.  CalibrationError for moments without a factor at any damping.
    """
    live = np.flatnonzero(np.diag(moments) > 0)
    if not live.size:
        return Solved(nearest, weights, 0.0, 0.0)
    if nearest.format.declaration.trellis is not None:
        return _solve_paths(weights, nearest, moments)
    order = live[np.argsort(-np.diag(moments)[live], kind="stable")]
    factor, codes, rounded = _factor(moments, order), codes_of(nearest), weights.astype(np.float32)
    total = before = after = 0.0
    for first in range(0, nearest.rows, ROWS):
        rows = slice(first, min(first + ROWS, nearest.rows))
        wanted = weights[rows].astype(np.float64)
        values = nearest.format.decode_rows(nearest, rows.start, rows.stop).astype(np.float64)
        old = _squares(wanted - values, moments)
        levels = Levels.of(nearest, rows.start, rows.stop).columns(order)
        chosen, values[:, order], moved = _sweep(wanted[:, order], levels, factor)
        new = _squares(wanted - values, moments)
        better = new < old
        codes[rows][np.ix_(better, order)] = chosen[better]
        rounded[rows][np.ix_(better, order)] = moved[better]
        total += float(_squares(wanted, moments).sum())
        before += float(old.sum())
        after += float(np.where(better, new, old).sum())
    if not total:
        return Solved(nearest, weights, 0.0, 0.0)
    return Solved(with_codes(nearest, codes), rounded, before / total, after / total)


def _solve_paths(weights: Float32, nearest: PackedTensor, moments: Float64) -> Solved:
    """The same for codes of a trellis, which are chosen by the sequence (trellis_gptq.py)."""
    order = trellis_gptq.order_of(moments)
    factor, codes = _factor(moments, order), codes_of(nearest)
    total = before = after = 0.0
    for first in range(0, nearest.rows, ROWS):
        rows = slice(first, min(first + ROWS, nearest.rows))
        wanted = weights[rows].astype(np.float64)
        old = _squares(wanted - nearest.format.decode_rows(nearest, rows.start, rows.stop), moments)
        chosen, values = trellis_gptq.sweep(wanted, nearest, rows, order, factor)
        new = _squares(wanted - values, moments)
        better = new < old
        codes[rows][better] = chosen[better]
        total += float(_squares(wanted, moments).sum())
        before += float(old.sum())
        after += float(np.where(better, new, old).sum())
    if not total:
        return Solved(nearest, weights, 0.0, 0.0)
    return Solved(with_codes(nearest, codes), weights, before / total, after / total)


def _sweep(wanted: Float64, levels: Levels, factor: Float64) -> tuple[Codes, Float64, Float64]:
    """Codes, values and what was rounded (rows, K), for columns in order.

    Works on the transposed matrix: a column is contiguous.
    """
    rest = np.ascontiguousarray(wanted.T)
    count, rows = rest.shape
    codes, values = np.empty((count, rows), np.uint8), np.empty((count, rows))
    for first in range(0, count, BLOCK):
        stop = min(first + BLOCK, count)
        errors = np.empty((stop - first, rows))
        for column in range(first, stop):
            codes[column], values[column] = levels.nearest(rest[column], column)
            error = (rest[column] - values[column]) / factor[column, column]
            rest[column + 1 : stop] -= factor[column, column + 1 : stop, None] * error
            errors[column - first] = error
        rest[stop:] -= factor[first:stop, stop:].T @ errors
    return np.ascontiguousarray(codes.T), values.T, rest.T


def _factor(moments: Float64, order: npt.NDArray[np.intp]) -> Float64:
    """The upper Cholesky factor of the inverse of the damped moments of these columns."""
    damped = moments[np.ix_(order, order)]
    mean, share = float(np.mean(np.diag(damped))), DAMPING
    while True:
        try:
            return _upper(damped + share * mean * np.eye(len(order)))
        except np.linalg.LinAlgError:
            share *= 10
            if share > LARGEST_DAMPING:
                raise CalibrationError(
                    "the second moments of its inputs have no Cholesky factor, even damped by their mean; give more or "
                    "other inputs to `calibrate`"
                ) from None


def _upper(moments: Float64) -> Float64:
    """U with U^T U = inverse(moments): the inverse of the lower factor of the moments in reversed order, reversed.

    For the matrix of reversed order L L^T, inverse = L^-T L^-1, and reversing turns the lower L^-1 into an upper one.
    """
    lower = np.linalg.cholesky(moments[::-1, ::-1])
    return np.ascontiguousarray(np.linalg.inv(lower)[::-1, ::-1])


def _squares(rows: Float64, moments: Float64) -> Float64:
    """The sum of squares of each row's outputs: the diagonal of rows @ moments @ rows^T."""
    return np.asarray(np.einsum("nk,nk->n", rows @ moments, rows))


def codes_of(packed: PackedTensor) -> Codes:
    """The codes (rows, cols), as unsigned bytes, in an array of their own."""
    fmt = packed.format
    found = np.ascontiguousarray(fmt.entries(packed, fmt.declaration.codes.name))
    return found.view(np.uint8).reshape(-1)[: packed.rows * packed.cols].reshape(packed.rows, packed.cols).copy()


__all__ = ["DAMPING", "Solved", "codes_of", "solve", "why_not"]
