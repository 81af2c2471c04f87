"""AWQ's clipping: a factor for each scale, chosen by the squared error of the linear's outputs.

    start    the encoder's scales and nearest codes;  E = W - values (rows, K),  H = X^T X (K, K)
    group    for each factor: codes = nearest with scale * factor, which clips what lies beyond the last code
             error of a row = e H e^T, with e = E but for this group; the factor with the least error is taken

Groups are taken in order, and each is judged beside the errors that the other groups have at that time.  So the error
of a row never rises, where the authors of AWQ judge each group alone, by its own part of the outputs.  Integers without
zero points have one code more on one side of 0: a negative factor moves it to the other side.  Zero points stay, and so
does the format: its scales are other numbers.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024 (arXiv
2306.00978), and the search of clipping in its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qcompiler.calibrate.free_scales import Float32, FreeScales, assemble, scales_of
from qcompiler.calibrate.levels import Codes, Float64
from qcompiler.formats import PackedTensor

FACTORS = tuple(float(each) for each in np.linspace(1, 0.5, 11))
"""Of the encoder's scale: 0.5 clips half of the range, which is as far as the authors' code goes."""
ROWS = 1024
"""Rows whose factors are searched at a time: it bounds the memory."""


@dataclass(frozen=True)
class Clipped:
    """The matrix with its scales, the share of them that is smaller than the encoder's, and the share that the squared
    error is of the outputs' squares, before and after."""

    packed: PackedTensor
    share: float
    nearest_error: float
    error: float


def clip(weights: Float32, nearest: PackedTensor, moments: Float64) -> Clipped:
    """Chooses the scales of `nearest`, the usual encoding of `weights` (rows, K), by `moments`, X^T X (K, K).

    The format has scales that can be chosen (`why_no_scales`).  A group whose inputs were all zero keeps its scale.
    """
    fmt, (rows, cols) = nearest.format, weights.shape
    scheme = FreeScales.of(fmt, cols)
    scales, zeros = scales_of(nearest)
    groups = cols // scheme.size
    scales, zeros = scales.reshape(rows, groups), zeros.reshape(rows, groups)
    codes = np.empty((rows, cols), np.uint8)
    start, total, before, after = scales.copy(), 0.0, 0.0, 0.0
    for first in range(0, rows, ROWS):
        part = slice(first, first + ROWS)
        search = _Search(scheme, weights[part].astype(np.float32, copy=False), scales[part], zeros[part], moments)
        total += float(_squares(weights[part].astype(np.float64), moments).sum())
        before += float(_squares(search.errors, moments).sum())
        for group in range(groups):
            search.improve(group)
        after += float(_squares(search.errors, moments).sum())
        codes[part] = search.codes
    share = float((np.abs(scales) < np.abs(start)).mean())
    made = assemble(fmt, rows, cols, codes, scales.reshape(-1), zeros.reshape(-1))
    return Clipped(made, share, *((before / total, after / total) if total else (0.0, 0.0)))


class _Search:
    """Rows of the matrix with the best `scales` (rows, groups) so far, which it changes, and their errors."""

    def __init__(self, scheme: FreeScales, weights: Float32, scales: Float32, zeros: Float32, moments: Float64) -> None:
        self.scheme, self.weights, self.moments = scheme, weights, moments
        self.scales, self.zeros, self.start = scales, zeros, scales.copy()
        self.codes = np.empty(weights.shape, np.uint8)
        self.errors = np.empty(weights.shape)
        for group in range(scales.shape[1]):
            columns = self._columns(group)
            self.codes[:, columns], self.errors[:, columns] = self._rounded(group, scales[:, group])
        self.products = self.errors @ moments

    def _columns(self, group: int) -> slice:
        return slice(group * self.scheme.size, (group + 1) * self.scheme.size)

    def _rounded(self, group: int, scales: Float32) -> tuple[Codes, Float64]:
        """Codes and errors (rows, size) of a group with these scales (rows,)."""
        wanted, zeros = self.weights[:, self._columns(group)], self.zeros[:, group]
        places = self.scheme.nearest(wanted, scales, zeros)
        values = (self.scheme.of_code[places] - zeros[:, None]) * scales[:, None]
        return self.scheme.codes[places], wanted.astype(np.float64) - values

    def improve(self, group: int) -> None:
        """Takes the factor of a group that makes the error of each row least; the present scale where none is."""
        columns = self._columns(group)
        own = np.ascontiguousarray(self.moments[columns, columns])
        if not own.any():
            return
        old = self.errors[:, columns].copy()
        others = self.products[:, columns] - old @ own
        best = _cost(old, own, others)
        scales, codes, errors = self.scales[:, group].copy(), self.codes[:, columns].copy(), old.copy()
        for factor in factors_of(self.scheme):
            tried = self.scheme.storable(self.start[:, group] * np.float32(factor))
            tried_codes, tried_errors = self._rounded(group, tried)
            cost = _cost(tried_errors, own, others)
            better = cost < best
            best[better], scales[better] = cost[better], tried[better]
            codes[better], errors[better] = tried_codes[better], tried_errors[better]
        self.scales[:, group], self.codes[:, columns], self.errors[:, columns] = scales, codes, errors
        self.products += (errors - old) @ self.moments[columns]


def factors_of(scheme: FreeScales) -> tuple[float, ...]:
    """The factors that are tried for a group's scale."""
    turned = tuple(-each for each in FACTORS) if scheme.whole and not scheme.zeros else ()
    return FACTORS + turned


def _cost(errors: Float64, own: Float64, others: Float64) -> Float64:
    """What the errors of one group (rows, size) add to the squared errors of the rows' outputs (rows,)."""
    return np.asarray(np.einsum("nk,nk->n", errors @ own + 2 * others, errors))


def _squares(rows: Float64, moments: Float64) -> Float64:
    """The sum of squares of each row's outputs: the diagonal of rows @ moments @ rows^T."""
    return np.asarray(np.einsum("nk,nk->n", rows @ moments, rows))


__all__ = ["FACTORS", "Clipped", "clip", "factors_of"]
