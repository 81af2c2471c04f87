"""Some rows of an encoded matrix, whose scales and codes are chosen by the error of the linear's outputs.

    error    E = W - values;  G = E H: the sum of E * G is the squared error of the outputs
    scales   of a group, which has the values  part_1 * scale_1 + part_2 * scale_2:
             step = S^-1 p  with  S = <part_i, part_k H>,  p = <part_i, G>       least squares beside the other groups
    code     of column j:  nearest(value + G[j] / H[j, j])                      the best one beside the other columns

H is X^T X with the damping of GPTQ: without it, columns of quiet inputs would be free to make up for those of loud ones
by any values whatever.  G follows every change, and no step raises the error: scales are rounded as they are stored,
move by half of themselves at most, and stay where that gains nothing.  A format has two parts where a group has two
scales in floating point (q4_K's `d` and `dmin`).  Scales that are codes themselves stay, as do those that serve several
rows.

Codes column by column, from GPTQ's on: Behdin et al., "QuantEase: Optimization-based Quantization for Language Models"
(arXiv 2309.01885).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate.float_scales import float_fields, stored, why_fixed
from qcompiler.calibrate.levels import Codes, Float64, Levels
from qcompiler.formats import PackedTensor
from qcompiler.formats.declaration import Field

BLOCK = 128
"""Columns whose changes are collected before G follows them, in one product of matrices."""
RIDGE = 1e-9
"""Of the largest of a group's squares: keeps a scale that nothing decides as it is."""
FURTHEST = 0.5
"""Of a scale: how far one step moves it at most, so that it keeps its sign."""
CLOSE = 1e-5
"""Of the largest value: how far a sum of terms may be from what the format decodes to."""


class Rows:
    """The rows [first, stop) of a matrix.  Columns come first: `wanted`, `codes`, `values` and G are (K, rows).

    `targets` (K, rows) holds what the codes are the nearest ones of.
    """

    def __init__(
        self,
        weights: npt.NDArray[np.float32],
        packed: PackedTensor,
        codes: Codes,
        moments: Float64,
        first: int,
        stop: int,
    ) -> None:
        """`weights` is the whole matrix (rows, K), `packed` and `codes` stand for it; `moments` is H (K, K)."""
        self.moments = moments
        self.wanted = np.ascontiguousarray(weights[first:stop].T, dtype=np.float64)
        self.codes = np.ascontiguousarray(codes[first:stop].T)
        self.targets = self.wanted.copy()
        self._whole, self._terms = _terms(packed, first, stop)
        self._of_code = np.zeros(256)
        self._of_code[self._whole.codes] = self._whole.of_code
        self.values = _at(self._whole, self._of_code[self.codes])
        self._g = moments @ (self.wanted - self.values)

    @property
    def levels(self) -> Levels:
        """The levels of all elements, columns first, with the scales that the rows have now."""
        if not self._terms:
            return self._whole
        slope, offset = _sum(self._terms)
        return replace(self._whole, slope=slope, offset=offset)

    @property
    def scales(self) -> dict[Field, npt.NDArray[np.float32]]:
        """The scales that can be chosen (rows, entries of a row), as they are stored."""
        return {term.field: np.ascontiguousarray(term.entries.T) for term in self._terms}

    @property
    def errors(self) -> Float64:
        """The squared error of each row's outputs (rows,)."""
        return np.asarray(np.einsum("kn,kn->n", self.wanted - self.values, self._g))

    def take(self, codes: Codes, values: Float64, targets: Float64) -> None:
        """Takes other codes for the rows whose error is less with them."""
        g = self.moments @ (self.wanted - values)
        better = np.einsum("kn,kn->n", self.wanted - values, g) < self.errors
        for mine, other in ((self.codes, codes), (self.values, values), (self.targets, targets), (self._g, g)):
            mine[:, better] = other[:, better]

    def fit_scales(self) -> None:
        """The scales of each group in turn."""
        by_size: dict[int, list[_Term]] = {}
        for term in self._terms:
            by_size.setdefault(term.size, []).append(term)
        for size, terms in by_size.items():
            for number in range(len(self.codes) // size):
                self._fit(terms, number, slice(number * size, (number + 1) * size))

    def _fit(self, terms: Sequence[_Term], number: int, columns: slice) -> None:
        """The scales of one group, those of all `terms` at once."""
        own, g = np.ascontiguousarray(self.moments[columns, columns]), self._g[columns]
        of_code = self._of_code[self.codes[columns]]
        parts = [term.values(columns, of_code) for term in terms]
        weighed = [own @ part for part in parts]
        squares = np.array([[np.einsum("kn,kn->n", a, b) for b in parts] for a in weighed]).transpose(2, 0, 1)
        pulls = np.stack([np.einsum("kn,kn->n", part, g) for part in parts], 1)
        largest = np.einsum("nii->ni", squares).max(1)
        ridge = np.where(largest > 0, RIDGE * largest, 1.0)[:, None, None] * np.eye(len(terms))
        best = np.linalg.solve(squares + ridge, pulls[..., None])[..., 0]
        old = [term.entries[number].astype(np.float64) for term in terms]
        new = [term.near(number, best[:, i]) for i, term in enumerate(terms)]
        steps = np.stack([mine - before for mine, before in zip(new, old, strict=True)], 1)
        gain = 2 * (steps * pulls).sum(1) - np.einsum("ni,nij,nj->n", steps, squares, steps)
        steps[~(gain > 0)] = 0
        change = np.zeros_like(g)
        for i, (term, part) in enumerate(zip(terms, parts, strict=True)):
            term.entries[number] = np.where(gain > 0, new[i], old[i])
            change += part * steps[:, i]
        self.values[columns] += change
        self._g -= self.moments[:, columns] @ change

    def fit_codes(self) -> None:
        """The code of each column in turn."""
        levels, moments, diagonal = self.levels, self.moments, np.diag(self.moments)
        for first in range(0, len(diagonal), BLOCK):
            stop = min(first + BLOCK, len(diagonal))
            near, moved = self._g[first:stop].copy(), np.empty((stop - first, self._g.shape[1]))
            for i, j in enumerate(range(first, stop)):
                self.targets[j] = self.values[j] + near[i] / diagonal[j]
                self.codes[j], values = levels.nearest(self.targets[j], j)
                moved[i] = values - self.values[j]
                self.values[j] = values
                near[i + 1 :] -= moments[j + 1 : stop, j, None] * moved[i]
            self._g -= moments[:, first:stop] @ moved


class _Term:
    """A floating-point field: what each element is multiplied with, (K, rows), and the stored scales (entries, rows).

    `size` columns share a scale.
    """

    def __init__(self, field: Field, levels: Levels, entries: npt.NDArray[np.float32], size: int):
        self.field, self.entries, self.size = field, entries, size
        self._slope, self._offset = levels.slope, levels.offset

    def scaled(self) -> tuple[Float64, Float64]:
        """Its part of the slope and of the offset of each element."""
        each = np.repeat(self.entries.astype(np.float64), self.size, axis=0)
        return self._slope * each, self._offset * each

    def values(self, columns: slice, of_code: Float64) -> Float64:
        """What these columns have for a scale of 1."""
        return np.asarray(self._slope[columns] * of_code + self._offset[columns])

    def near(self, number: int, step: Float64) -> Float64:
        """Scales (rows,) that move by `step`, or as far as one moves, as they are stored."""
        old = self.entries[number].astype(np.float64)
        furthest = FURTHEST * np.abs(old)
        return stored(self.field, old + np.clip(step, -furthest, furthest), old).astype(np.float64)


def _terms(packed: PackedTensor, first: int, stop: int) -> tuple[Levels, list[_Term]]:
    """The levels of some rows, columns first, and the terms that they are a sum of: none if no scale can be chosen."""
    fmt, cols = packed.format, packed.cols
    whole = Levels.of(packed, first, stop).columns()
    fields = [] if why_fixed(fmt, cols) else float_fields(fmt)
    sizes = [_size(field, cols) for field in fields]
    if not fields or not all(sizes):
        return whole, []
    terms = []
    for field, size in zip(fields, sizes, strict=True):
        entries = np.ascontiguousarray(fmt.entries(packed, field.name)).reshape(packed.rows, cols // size)
        own = np.ascontiguousarray(entries[first:stop].T.astype(np.float32))
        terms.append(_Term(field, Levels.of(packed, first, stop, field.name).columns(), own, size))
    # which fields have terms is the format's affair, not that of these rows: noise of the sums may not decide
    (slope, offset), most = _sum(terms), np.abs(whole.of_code).max()
    off = np.abs(slope - whole.slope) * most + np.abs(offset - whole.offset)
    largest = np.abs(whole.slope) * most + np.abs(whole.offset)
    return whole, terms if (off <= CLOSE * largest.max(initial=0)).all() else []


def _sum(terms: Sequence[_Term]) -> tuple[Float64, Float64]:
    """The slope and the offset that terms have together."""
    slopes, offsets = zip(*(term.scaled() for term in terms), strict=True)
    return np.sum(slopes, axis=0), np.sum(offsets, axis=0)


def _size(field: Field, cols: int) -> int:
    """Columns that share an entry of a field; 0 if an entry serves several rows."""
    covers = {"row": cols, "tensor": 0}[field.covers] if isinstance(field.covers, str) else field.covers
    return covers if covers and cols % covers == 0 else 0


def _at(levels: Levels, of_code: Float64) -> Float64:
    return np.asarray(levels.slope * of_code + levels.offset)


__all__ = ["Rows"]
