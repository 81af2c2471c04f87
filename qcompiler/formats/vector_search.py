"""The search of i-quants: for each vector of weights the point of a codebook with the least squared error.

A superblock has an fp16 scale d, each `sub` of its elements a level, and a vector the point p of the codebook.  An
element is ``d * steps[level] * points[p]``.  With s = d * steps[level], a vector's error is

    sum of w * (x - s * p)²  =  s² * A - 2 s * B + constant,    A[p] = sum of w * p²,   B[p] = sum of w * x * p

so that A and B, computed once, give the best point for any scale, by comparing all points.  Scales start from the
largest weight of a sub-block, and take turns with the points (least squares of one with the other fixed), first for
each sub-block alone, then for d and the levels of the superblock together; the state with the least error is kept.
Every sum is made of fp32 operations in a fixed order, so results do not depend on how a matrix is cut into tiles.

This is not ggml's search, which looks only at points near the rounded vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32
from qcompiler.formats.ggml import quiet

Numbers = npt.NDArray[np.intp]
Bytes = npt.NDArray[np.uint8]

TRIALS = (0.5, 0.75, 1.0, 1.25)
"""First scales of a sub-block, in units of (largest weight) / (largest number of the codebook). Twelve, from 0.4 to
1.5, lower the squared error of Gaussian weights by 1.3 % with iq3_s, 0.8 % with iq3_xxs, and less than 0.2 % with the
others."""

ROUNDS = 2
"""Turns of scales and points, of a sub-block and of a superblock. Four lower that error by about 0.2 % at most."""

SIZE = 1 << 17
"""Numbers of each kind (vectors times points) that are held at a time: half a MiB of fp32."""


@dataclass(frozen=True, eq=False)
class Sought:
    """`variants` are arrays of points (count, size), one of which each sub-block chooses; `steps` are ascending."""

    variants: tuple[Float32, ...]
    sub: int
    steps: Float32

    @functools.cached_property
    def halves(self) -> tuple[tuple[_Half, _Half], ...]:
        """The points of each variant in two halves: the numbers that occur in each, and which of them a point has."""
        middle = self.variants[0].shape[1] // 2
        return tuple((_Half.of(v[:, :middle]), _Half.of(v[:, middle:])) for v in self.variants)

    @property
    def size(self) -> int:
        """Elements of a vector."""
        return int(self.variants[0].shape[1])

    @property
    def between(self) -> Float32:
        """Ratios up to which a level is the nearest one."""
        return (self.steps[1:] + self.steps[:-1]) / np.float32(2)

    @property
    def largest(self) -> np.float32:
        return np.float32(max(np.abs(v).max() for v in self.variants))


@dataclass(frozen=True, eq=False)
class _Half:
    """A half of each point: `which` numbers the distinct `rows`."""

    rows: Float32
    which: Numbers

    @staticmethod
    def of(points: Float32) -> _Half:
        rows, which = np.unique(points, axis=0, return_inverse=True)
        return _Half(np.ascontiguousarray(rows), which.reshape(-1))


@dataclass(frozen=True, eq=False)
class Target:
    """What is encoded: `values` and `weights` of squared errors, both (superblocks, elements)."""

    values: Float32
    weights: Float32


@dataclass(frozen=True, eq=False)
class Found:
    """The fp16 `scale` (superblocks, 1), `levels` and `variants` (superblocks, sub-blocks) as uint8, and the number of
    each vector's point (superblocks, vectors)."""

    scale: npt.NDArray[np.float16]
    levels: Bytes
    variants: Bytes
    points: Numbers


def signs_and_sizes(values: Float32, weights: Float32, *, even: bool) -> tuple[Bytes, Float32]:
    """(1 where the sign is minus, values times that sign), both (blocks, elements).

    With `even`, each eight signs have an even number of minuses: where they have not, that of the element with the
    least weight * |value| changes, whose size is then negative.
    """
    signs = np.signbit(values).astype(np.uint8)
    sizes = np.abs(values)
    if even:
        odd = np.bitwise_xor.reduce(signs.reshape(-1, 8), axis=1) == 1
        least = (weights * sizes).reshape(-1, 8).argmin(axis=1)
        rows, places = np.flatnonzero(odd), least[odd]
        signs.reshape(-1, 8)[rows, places] ^= 1
        sizes.reshape(-1, 8)[rows, places] *= np.float32(-1)
    return signs, sizes


def search(sought: Sought, target: Target, stored: Callable[[Float32], npt.NDArray[np.float16]]) -> Found:
    """The best scales, levels and points. `stored` rounds the scales (superblocks,) to fp16 (superblocks, 1), and
    raises for one that fp16 cannot hold."""
    count, elements = target.values.shape
    together = max(1, SIZE // (elements // sought.size * sum(len(v) for v in sought.variants)))
    parts = [
        _Superblocks(sought, target.values[first : first + together], target.weights[first : first + together]).found()
        for first in range(0, count, together)
    ]
    scale = stored(np.concatenate([part.scale for part in parts]))
    levels, variants, points = (np.concatenate([getattr(p.state, n) for p in parts]) for n in _State.CHOICES)
    return Found(scale, levels.astype(np.uint8), variants.astype(np.uint8), points.reshape(count, -1))


@dataclass(frozen=True, eq=False)
class _State:
    """Choices for each sub-block (superblocks, sub-blocks): what they gain over all zeros, sums of A and B over its
    vectors, and its level, variant and points (…, vectors)."""

    CHOICES: ClassVar[tuple[str, ...]] = ("levels", "variants", "points")

    gain: Float32
    a: Float32
    b: Float32
    levels: Numbers
    variants: Numbers
    points: Numbers

    def best_of(self, other: _State, better: npt.NDArray[np.bool_]) -> _State:
        """`other` where it is better, this state elsewhere."""
        chosen = {}
        for name in (f.name for f in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            chosen[name] = np.where(better.reshape(better.shape + (1,) * (mine.ndim - 2)), others, mine)
        return _State(**chosen)

    def scales(self) -> Float32:
        """The scale of each sub-block with the least error for its points; 0 if none is positive."""
        with quiet():
            return np.where((self.a > 0) & (self.b > 0), self.b / self.a, np.float32(0))


@dataclass(frozen=True, eq=False)
class _Part:
    scale: Float32
    state: _State


class _Superblocks:
    """The search in some superblocks at a time, (superblocks, elements)."""

    def __init__(self, sought: Sought, values: Float32, weights: Float32) -> None:
        self.sought, self.count = sought, len(values)
        self.shape = (self.count, values.shape[1] // sought.sub, sought.sub // sought.size)
        x, w = (part.reshape(-1, sought.size) for part in (values, weights))
        self.squares = [_of_points(halves, w, square=True) for halves in sought.halves]
        self.products = [_of_points(halves, w * x * np.float32(2), square=False) for halves in sought.halves]
        self.room = np.empty_like(self.squares[0])
        self.peaks = np.abs(values).reshape(self.count, -1, sought.sub).max(axis=2) / sought.largest

    def found(self) -> _Part:
        alone = self._alone()
        scale = self._first_scale(alone.scales())
        state: _State | None = None
        with quiet():
            for _ in range(ROUNDS):
                levels = self._levels((alone if state is None else state).scales(), scale)
                tried = self._at(scale, levels)
                step = self.sought.steps[tried.levels]
                numerator, denominator = in_order(step * tried.b), in_order(step * step * tried.a)
                if state is None:
                    state, best = tried, scale
                else:
                    better = in_order(tried.gain) > in_order(state.gain)
                    state = state.best_of(tried, np.broadcast_to(better[:, None], tried.gain.shape))
                    best = np.where(better, scale, best)
                fitting = (numerator > 0) & (denominator > 0)
                scale = _half(np.where(fitting, numerator / denominator, best))
            assert state is not None
            for move in (-1, 1):
                tried = self._at(best, np.clip(state.levels + move, 0, len(self.sought.steps) - 1))
                state = state.best_of(tried, tried.gain > state.gain)
        return _Part(best, state)

    def _alone(self) -> _State:
        """The best scale of each sub-block, were it stored exactly."""
        state = self._choose(self.peaks * np.float32(TRIALS[0]))
        for trial in TRIALS[1:]:
            tried = self._choose(self.peaks * np.float32(trial))
            state = state.best_of(tried, _reached(tried) > _reached(state))
        for _ in range(ROUNDS):
            tried = self._choose(state.scales())
            state = state.best_of(tried, _reached(tried) > _reached(state))
        return state

    def _first_scale(self, scales: Float32) -> Float32:
        """A superblock's scale with which the highest level is that of the largest scale."""
        return _half(scales.max(axis=1) / self.sought.steps[-1])

    def _levels(self, scales: Float32, scale: Float32) -> Numbers:
        """The level nearest to each scale; 0 in a superblock of scale 0."""
        ratios = np.where(scale[:, None] > 0, scales / scale[:, None], np.float32(0))
        return np.searchsorted(self.sought.between, ratios)

    def _at(self, scale: Float32, levels: Numbers) -> _State:
        return self._choose(scale[:, None] * self.sought.steps[levels], levels)

    def _choose(self, scales: Float32, levels: Numbers | None = None) -> _State:
        """The best points at these scales (superblocks, sub-blocks), in the best variant."""
        best: _State | None = None
        levels = np.zeros(scales.shape, np.intp) if levels is None else levels
        of_vectors = np.repeat(scales.reshape(-1), self.shape[2])[:, None]
        for variant, (squares, products) in enumerate(zip(self.squares, self.products, strict=True)):
            errors = np.multiply(squares, of_vectors, out=self.room)
            points = np.subtract(products, errors, out=errors).argmax(axis=1)
            rows = np.arange(len(points))
            a, b = (in_order(of[rows, points].reshape(self.shape)) for of in (squares, products))
            b *= np.float32(0.5)
            gain = scales * (np.float32(2) * b - scales * a)
            found = _State(gain, a, b, levels, np.full(scales.shape, variant), points.reshape(self.shape))
            best = found if best is None else best.best_of(found, found.gain > best.gain)
        assert best is not None
        return best


def _of_points(halves: tuple[_Half, _Half], factors: Float32, *, square: bool) -> Float32:
    """The sum of `factors` (vectors, size) times the numbers of each point, or their squares: (vectors, points)."""
    parts, first = [], 0
    for half in halves:
        size = half.rows.shape[1]
        numbers = half.rows * half.rows if square else half.rows
        sums = factors[:, first, None] * numbers[None, :, 0]
        for j in range(1, size):
            sums += factors[:, first + j, None] * numbers[None, :, j]
        parts.append(sums.take(half.which, axis=1))
        first += size
    total = parts[0]
    total += parts[1]
    return total


def in_order(values: Float32) -> Float32:
    """The sum over the last axis: ((a + b) + c) + …, each rounded to fp32."""
    total = values[..., 0].copy()
    for i in range(1, values.shape[-1]):
        total += values[..., i]
    return total


def _reached(state: _State) -> Float32:
    """What a sub-block gains with the best scale for its points."""
    return state.scales() * state.b


def _half(values: Float32) -> Float32:
    """Rounded to fp16; infinite beyond its range, which the caller refuses in the end."""
    return values.astype(np.float16).astype(np.float32)
