"""GPTQ: codes whose errors cancel in the layer's outputs, by the second moments of its inputs.

    nearest   code[j] = nearest(w[j])                                      every column for itself
    GPTQ      code[j] = nearest(w[j]); e = (w[j] - value) / U[j, j]         columns in turn, and the columns that follow
              w[j + 1:] -= e * U[j, j + 1:]                                make up for the error

U is the upper Cholesky factor of the inverse of H = X^T X + damping (K, K), so that the sum of squared errors of the
outputs, trace((W - Q) H (W - Q)^T), falls.  Columns are taken in the order of their second moments, largest first
("act-order").  Every format whose codes can be chosen one by one is served (levels.py).

Scales are chosen, too, by turns with the codes (descent.py):

    start     scales that fit the weights (hqq.py) where they are free, elsewhere those of the format's own encoder
    sweep     GPTQ, then scales that fit its codes; both again
    descent   the code of each column anew, beside all others; the scales; the codes again

Zero points, and scales that are codes themselves, stay.  No group changes its columns, so the order needs no index in
the file.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023 (arXiv 2210.17323); damping and act-order as in its authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate import hqq, trellis_gptq
from qcompiler.calibrate.descent import Rows
from qcompiler.calibrate.float_scales import with_entries
from qcompiler.calibrate.free_scales import FreeScales, assemble, scales_of, why_no_scales
from qcompiler.calibrate.levels import Codes, Float64, why_no_levels, with_codes
from qcompiler.errors import CalibrationError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.declaration import Field

Float32 = npt.NDArray[np.float32]

DAMPING = 0.01
"""A share of the mean second moment that is added to each: it bounds how far a column may make up for others."""
LARGEST_DAMPING = 1.0
ROWS = 1024
"""Rows that are solved at a time."""
SWEEPS = 2
"""Sweeps of GPTQ: the second one has scales that fit the codes of the first."""
DESCENTS = 2
"""Times that each code is chosen anew beside all others.  A third one takes 1 % of the error."""
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
    """Chooses the codes of `nearest`, which holds the matrix `weights` (rows, K), and its scales, by `moments`.

    `moments` is X^T X (K, K) of the layer's inputs.  A column whose inputs were all zero gets its nearest codes; a row
    whose error does not fall stays as `nearest` has it.  Rows do not depend on each other: `ROWS` of them are in memory
    as fp64 at a time.  CalibrationError for moments without a factor at any damping.
    """
    if not (np.diag(moments) > 0).any():
        return Solved(nearest, weights, 0.0, 0.0)
    if nearest.format.declaration.trellis is not None:
        return _solve_paths(weights, nearest, moments)
    order = np.argsort(-np.diag(moments), kind="stable")
    damped, factor = _factor(moments, order)
    start = _fitted(weights, nearest)
    codes, start_codes, rounded = codes_of(nearest), codes_of(start), weights.astype(np.float32)
    scales, better = dict[Field, list[Float32]](), np.zeros(nearest.rows, np.bool_)
    total = before = after = 0.0
    for first in range(0, nearest.rows, ROWS):
        part = slice(first, min(first + ROWS, nearest.rows))
        rows = Rows(weights, start, start_codes, damped, part.start, part.stop)
        wanted = rows.wanted.T
        old = _squares(wanted - nearest.format.decode_rows(nearest, part.start, part.stop), moments)
        _choose(rows, order, factor)
        new = _squares(wanted - rows.values.T, moments)
        better[part] = taken = new < old
        codes[part][taken], rounded[part][taken] = rows.codes.T[taken], rows.targets.T[taken]
        for field, entries in rows.scales.items():
            scales.setdefault(field, []).append(entries)
        total += float(_squares(wanted, moments).sum())
        before += float(old.sum())
        after += float(np.where(taken, new, old).sum())
    if not total:
        return Solved(nearest, weights, 0.0, 0.0)
    packed = _with_scales(start, nearest, {field: np.concatenate(parts) for field, parts in scales.items()}, better)
    return Solved(with_codes(packed, codes), rounded, before / total, after / total)


def _fitted(weights: Float32, nearest: PackedTensor) -> PackedTensor:
    """The matrix with scales that fit the weights, where its format has such; as it is elsewhere."""
    if why_no_scales(nearest.format, nearest.cols):
        return nearest
    return hqq.solve(weights, nearest, hqq.SHIFTS)


def _with_scales(
    start: PackedTensor, nearest: PackedTensor, scales: Mapping[Field, Float32], better: npt.NDArray[np.bool_]
) -> PackedTensor:
    """`nearest` with the zero points of `start` and with `scales` (rows, entries) in the rows that are `better`."""
    fmt, packed = nearest.format, nearest
    if start is not nearest:
        repeated = np.repeat(better, nearest.cols // FreeScales.of(fmt, nearest.cols).size)
        of_both = zip(scales_of(start), scales_of(nearest), strict=True)
        own, zeros = (np.where(repeated, theirs, mine) for theirs, mine in of_both)
        packed = assemble(fmt, nearest.rows, nearest.cols, codes_of(nearest), own, zeros)
    found = {}
    for field, entries in scales.items():
        kept = np.ascontiguousarray(fmt.entries(nearest, field.name)).reshape(entries.shape).astype(np.float32)
        found[field] = np.where(better[:, None], entries, kept).reshape(-1)
    return with_entries(packed, found)


def _choose(rows: Rows, order: npt.NDArray[np.intp], factor: Float64) -> None:
    """Scales and codes of some rows; `factor` is U for the columns in `order`."""
    for _ in range(SWEEPS):
        rows.take(*_sweep(rows, order, factor))
        rows.fit_scales()
    rows.fit_codes()
    for _ in range(DESCENTS - 1):
        rows.fit_scales()
        rows.fit_codes()


def _solve_paths(weights: Float32, nearest: PackedTensor, moments: Float64) -> Solved:
    """The same for codes of a trellis, which are chosen by the sequence (trellis_gptq.py)."""
    order = trellis_gptq.order_of(moments)
    (_, factor), codes = _factor(moments, order), codes_of(nearest)
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


def _sweep(rows: Rows, order: npt.NDArray[np.intp], factor: Float64) -> tuple[Codes, Float64, Float64]:
    """Codes, values and what was rounded (K, rows): GPTQ for the columns in `order`, with the scales of now."""
    levels = rows.levels.at(order)
    codes, values, moved = rows.codes.copy(), rows.values.copy(), rows.wanted.copy()
    rest, count = rows.wanted[order], len(order)
    for first in range(0, count, BLOCK):
        stop = min(first + BLOCK, count)
        errors = np.empty((stop - first, rest.shape[1]))
        for column in range(first, stop):
            place = order[column]
            codes[place], values[place] = levels.nearest(rest[column], column)
            error = (rest[column] - values[place]) / factor[column, column]
            rest[column + 1 : stop] -= factor[column, column + 1 : stop, None] * error
            errors[column - first] = error
        rest[stop:] -= factor[first:stop, stop:].T @ errors
    moved[order] = rest
    return codes, values, moved


def _factor(moments: Float64, order: npt.NDArray[np.intp]) -> tuple[Float64, Float64]:
    """The damped moments, and the upper Cholesky factor of the inverse of those of the columns in `order`."""
    diagonal, share = np.diag(moments), DAMPING
    mean = float(np.mean(diagonal[diagonal > 0]))
    while True:
        damped = moments + share * mean * np.eye(len(moments))
        try:
            return damped, _upper(damped[np.ix_(order, order)])
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
