"""The searches for scales of ggml's formats, for many blocks at a time, bit for bit.

A search finds the scale (and the minimum) with the least error for a block of n weights.  It tries a handful of
scales, rounds the weights to codes with each, and solves for the scale that fits these codes best by weighted least
squares.  These are ggml's searches (make_qx_quants, make_q3_quants, make_qkx2_quants, make_qkx3_quants, make_qp_quants
and the search of iq4_nl in ggml-quants.c), with the same trials, the same fp32 operations and the same order of sums,
so the same candidate wins.

Weights come transposed, (n, blocks): sums over a block run over the first axis, one row after another, which is the
order of a loop over the block's elements.  Codes are whole numbers in fp32, (n, blocks); scales are (blocks,).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32

SMALLEST = np.float32(1e-15)
"""Blocks whose largest magnitude is below this count as zero (ggml's GROUP_MAX_EPS)."""

# 1.5 * 2^23: added to a number below 2^22, it leaves the nearest integer in the low bits.
_ROUNDING = np.float32(12582912.0)
_LARGEST_ROUNDED = np.float32(4194303.0)
_ZERO, _ONE = np.float32(0), np.float32(1)


def ordered_sum(values: Float32) -> Float32:
    """Sums over the first axis of (n, blocks) in order: ((a + b) + c) + …, each rounded to fp32."""
    if values.shape[1] == 1:  # NumPy would sum a single column pairwise
        last: Float32 = np.add.accumulate(values[:, 0])[-1:]
        return last
    sums: Float32 = np.add.reduce(values, axis=0)
    return sums


def over(numerator: float | np.float32, values: Float32) -> Float32:
    """numerator / values in fp32."""
    result: Float32 = np.divide(np.float32(numerator), values)
    return result


def transposed(blocks: Float32, size: int) -> Float32:
    """(blocks, elements) cut into parts of `size`: (size, blocks * parts)."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def nearest(values: Float32) -> Float32:
    """The nearest integers, halves to even.

    Beyond 2^22 and for NaN the result is that of ggml's nearest_int without assertions, which adds 1.5 * 2^23 and reads
    the low bits of the sum.  Only searches over blocks of denormals get here, and their result does not matter.
    """
    if values.size == 0 or (values.max() <= _LARGEST_ROUNDED and values.min() >= -_LARGEST_ROUNDED):
        return np.rint(values)
    bits = (values + _ROUNDING).view(np.int32)
    return ((bits & 0x7FFFFF) - 0x400000).astype(np.float32)


def signed_extreme(x: Float32) -> Float32:
    """The element of largest magnitude of each block, the first of several."""
    which = np.abs(x).argmax(axis=0)
    extreme: Float32 = np.take_along_axis(x, which[None], axis=0)[0]
    return extreme + _ZERO  # ggml starts from +0, and -0 does not exceed it


def first_minimum(x: Float32) -> Float32:
    """The smallest element of each block; of 0 and -0 the first one."""
    smallest: Float32 = np.take_along_axis(x, x.argmin(axis=0)[None], axis=0)[0]
    return smallest


# --- a scale ---------------------------------------------------------------------------------------------------------


def search_scale(x: Float32, weights: Float32, half: int) -> tuple[Float32, Float32]:
    """A scale and codes 0…2 * half - 1 with their zero at `half`, with the least squared error under `weights`
    (n, blocks).

    Tries -(half + t / 10) / extreme for t of -9…9 as inverse scales.  A block of zeros has scale 0 and codes 0.
    """
    extreme = signed_extreme(x)
    zero = np.abs(extreme) < SMALLEST
    extreme = np.where(zero, _ONE, extreme)
    wx = weights * x
    codes, products = np.empty_like(x), np.empty_like(x)
    scale, best = np.zeros_like(extreme), np.zeros_like(extreme)
    kept = np.empty_like(x)
    for trial in (0, *range(-9, 0), *range(1, 10)):
        numerator = np.float32(half) + np.float32(0.1) * np.float32(trial)
        np.multiply(x, over(-numerator, extreme), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -half, half - 1, out=codes)
        sum_lx = ordered_sum(np.multiply(wx, codes, out=products))
        np.multiply(weights, codes, out=products)
        sum_l2 = ordered_sum(np.multiply(products, codes, out=products))
        found = _ratio(sum_lx, sum_l2)
        if trial == 0:
            scale, best = found, found * sum_lx
            kept[:] = codes
            continue
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        np.copyto(kept, codes, where=better)
        np.copyto(scale, found, where=better)
        np.copyto(best, found * sum_lx, where=better)
    scale[zero] = 0
    kept += np.float32(half)
    kept[:, zero] = 0
    return scale, kept


def descend_scale(x: Float32, half: int) -> tuple[Float32, Float32]:
    """Like `search_scale` with squared weights as weights, by coordinate descent from the scale of the extreme.

    Each code in turn moves to its best value given the others, if that lowers the error; at most five rounds.
    """
    extreme = signed_extreme(x)
    zero = np.abs(extreme) < SMALLEST
    weights = x * x
    wx = weights * x
    codes = np.clip(np.rint(over(-half, np.where(zero, _ONE, extreme)) * x), -half, half - 1)
    state = _Fit(wx, weights, codes)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest_lx, rest_l2 = state.without(i)
            moved = np.clip(nearest(_quotient(x[i] * rest_l2, rest_lx, rest_lx > 0)), -half, half - 1)
            changed |= state.move(i, moved, rest_lx, rest_l2, rest_lx > 0)
        if not changed:
            break
    scale = np.where(state.sum_l2 > 0, _ratio(state.sum_lx, state.sum_l2), _ZERO)
    scale[zero] = 0
    codes += np.float32(half)
    codes[:, zero] = 0
    return scale, codes


def search_levels(x: Float32, weights: Float32, largest: int) -> tuple[Float32, Float32]:
    """A scale and codes 0…largest of nonnegative numbers (scales of sub-blocks): `search_scale`, then the descent of
    `descend_scale`. Tries (largest + t / 10) / maximum for t of -4…4 as inverse scales."""
    maximum = np.maximum(x.max(axis=0), _ZERO)
    zero = maximum < SMALLEST
    maximum = np.where(zero, _ONE, maximum)
    inverse = over(largest, maximum)
    best = _level_error(x, weights, inverse, largest)
    for trial in (-4, -3, -2, -1, 1, 2, 3, 4):
        tried = over(np.float32(0.1) * np.float32(trial) + np.float32(largest), maximum)
        error = _level_error(x, weights, tried, largest)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(inverse, tried, where=better)
    codes = np.minimum(nearest(inverse * x), np.float32(largest))
    state = _Fit(weights * x, weights, codes)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest_lx, rest_l2 = state.without(i)
            allowed = (rest_lx > 0) & (rest_l2 > 0)
            moved = np.minimum(nearest(_quotient(x[i] * rest_l2, rest_lx, allowed)), np.float32(largest))
            changed |= state.move(i, moved, rest_lx, rest_l2, allowed)
        if not changed:
            break
    scale = np.where(state.sum_l2 > 0, _ratio(state.sum_lx, state.sum_l2), _ZERO)
    scale[zero] = 0
    codes[:, zero] = 0
    return scale, codes


def _level_error(x: Float32, weights: Float32, inverse: Float32, largest: int) -> Float32:
    codes = np.minimum(nearest(inverse * x), np.float32(largest))
    off = x - over(1, inverse) * codes
    return ordered_sum(weights * off * off)


class _Fit:
    """The sums of a least-squares fit of a scale to codes, while single codes move.

    ``sum_lx / sum_l2`` is the scale; ``sum_lx ** 2 / sum_l2`` is the part of the weights' squares that the fit
    explains.
    """

    def __init__(self, wx: Float32, weights: Float32, codes: Float32) -> None:
        self.wx, self.weights, self.codes = wx, weights, codes
        self.sum_lx = ordered_sum(wx * codes)
        self.sum_l2 = ordered_sum(weights * codes * codes)

    def without(self, i: int) -> tuple[Float32, Float32]:
        """The sums without element i."""
        code = self.codes[i]
        return self.sum_lx - self.wx[i] * code, self.sum_l2 - self.weights[i] * code * code

    def move(self, i: int, code: Float32, rest_lx: Float32, rest_l2: Float32, allowed: npt.NDArray[np.bool_]) -> bool:
        """Gives element i that code where this is allowed and the fit improves. True if any code changed."""
        sum_lx = rest_lx + self.wx[i] * code
        sum_l2 = rest_l2 + self.weights[i] * code * code
        better = allowed & (code != self.codes[i]) & (sum_l2 > 0)
        better &= sum_lx * sum_lx * self.sum_l2 > self.sum_lx * self.sum_lx * sum_l2
        np.copyto(self.codes[i], code, where=better)
        np.copyto(self.sum_lx, sum_lx, where=better)
        np.copyto(self.sum_l2, sum_l2, where=better)
        return bool(better.any())


def _ratio(a: Float32, b: Float32) -> Float32:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _quotient(a: Float32, b: Float32, where: npt.NDArray[np.bool_]) -> Float32:
    return np.divide(a, b, out=np.zeros_like(a), where=where)


# --- a scale and a minimum -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """The inverse scales (largest + first + step * t) / range, for t of 0…count, that `search_affine` tries."""

    first: float
    step: float
    count: int
    absolute: bool = False
    """True measures absolute instead of squared errors."""


def search_affine(x: Float32, weights: Float32, largest: int, trials: Trials) -> tuple[Float32, Float32, Float32]:
    """Scale, minimum (<= 0, to be added) and codes 0…largest of least error under `weights` (n, blocks).

    Each trial computes the least-squares line through the codes that its scale gives; a later trial begins from the
    best minimum found so far.  A constant block that is not positive has scale 0, codes 0 and its value as the
    minimum.
    """
    highest, minimum = x.max(axis=0), first_minimum(x)
    minimum[minimum > 0] = 0
    flat = highest == minimum
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)
    inverse = over(largest, np.where(flat, _ONE, highest - minimum))
    scale = over(1, inverse)
    codes, scratch = np.empty_like(x), np.empty_like(x)
    kept = _affine_codes(x, minimum, inverse, largest, codes).copy()
    best = _affine_error(x, weights, codes, (scale, minimum), trials.absolute, scratch)
    constant = minimum.copy()
    for trial in range(trials.count + 1):
        numerator = np.float32(trials.first) + np.float32(trials.step) * np.float32(trial) + np.float32(largest)
        _affine_codes(x, minimum, over(numerator, np.where(flat, _ONE, highest - minimum)), largest, codes)
        line, solved = _least_squares(x, weights, codes, sum_w, sum_x, scratch)
        error = _affine_error(x, weights, codes, line, trials.absolute, scratch)
        better = solved & (error < best)
        np.copyto(kept, codes, where=better)
        np.copyto(best, error, where=better)
        np.copyto(scale, line[0], where=better)
        np.copyto(minimum, line[1], where=better)
    scale[flat] = 0
    kept[:, flat] = 0
    minimum[flat] = constant[flat]
    return scale, minimum, kept


def plain_range(x: Float32, largest: int) -> tuple[Float32, Float32, Float32]:
    """Scale, minimum and codes of blocks (n, blocks) that are not constant, from their range extended to zero."""
    minimum = first_minimum(x)
    minimum[minimum > 0] = 0
    inverse = over(largest, x.max(axis=0) - minimum)
    return over(1, inverse), minimum, _affine_codes(x, minimum, inverse, largest, np.empty_like(x))


def _affine_codes(x: Float32, minimum: Float32, inverse: Float32, largest: int, out: Float32) -> Float32:
    """nearest(inverse * (x - minimum)) within 0…largest."""
    np.subtract(x, minimum, out=out)
    np.multiply(out, inverse, out=out)
    if np.isfinite(inverse).all() and out.size and out.max() <= _LARGEST_ROUNDED and out.min() >= -_LARGEST_ROUNDED:
        np.rint(out, out=out)
    else:
        out[:] = nearest(out)
    return np.clip(out, 0, largest, out=out)


def _affine_error(
    x: Float32, weights: Float32, codes: Float32, line: tuple[Float32, Float32], absolute: bool, scratch: Float32
) -> Float32:
    np.multiply(codes, line[0], out=scratch)
    np.add(scratch, line[1], out=scratch)
    np.subtract(scratch, x, out=scratch)
    if absolute:
        np.abs(scratch, out=scratch)
    else:
        np.multiply(scratch, scratch, out=scratch)
    return ordered_sum(np.multiply(weights, scratch, out=scratch))


def _least_squares(
    x: Float32, weights: Float32, codes: Float32, sum_w: Float32, sum_x: Float32, scratch: Float32
) -> tuple[tuple[Float32, Float32], npt.NDArray[np.bool_]]:
    """The line (scale, minimum <= 0) through (code, weight) of each block, and a mask of blocks that have one."""
    weighted = np.multiply(weights, codes)
    sum_l = ordered_sum(weighted)
    sum_l2 = ordered_sum(np.multiply(weighted, codes, out=scratch))
    sum_xl = ordered_sum(np.multiply(weighted, x, out=scratch))
    determinant = sum_w * sum_l2 - sum_l * sum_l
    solved = determinant > 0
    scale = _quotient(sum_w * sum_xl - sum_x * sum_l, determinant, solved)
    minimum = _quotient(sum_l2 * sum_x - sum_l * sum_xl, determinant, solved)
    above = minimum > 0
    np.copyto(scale, _ratio(sum_xl, sum_l2), where=above)
    minimum[above] = 0
    return (scale, minimum), solved


# --- a scale for a table ---------------------------------------------------------------------------------------------


class TableSearch:
    """The search for the scale of iq4_nl's table: `values` are ascending integers within -127…127.

    Ties between two values go to the upper one.
    """

    def __init__(self, values: tuple[int, ...]) -> None:
        self.lowest = values[0]
        # Midpoints are multiples of 1/2, so floor(2 w) says between which two of them w lies.
        doubled = np.arange(2 * values[0], 2 * values[-1] + 1)
        self._first, self._last = np.float32(doubled[0]), np.float32(doubled[-1])
        middles = np.array([low + high for low, high in itertools.pairwise(values)])
        self._codes = (doubled[:, None] >= middles).sum(axis=1).astype(np.uint8)
        self._values = np.array(values, np.float32)[self._codes]

    def _places(self, x: Float32, inverse: Float32) -> npt.NDArray[np.intp]:
        scaled = x * inverse
        scaled += scaled
        np.floor(scaled, out=scaled)
        # fmin also replaces NaN (from a scale that is effectively 0) by the last value.
        np.fmin(scaled, self._last, out=scaled)
        np.fmax(scaled, self._first, out=scaled)
        scaled -= self._first
        return scaled.astype(np.intp)

    def codes(self, x: Float32, inverse: Float32) -> npt.NDArray[np.uint8]:
        """The codes of the values nearest to x * inverse."""
        found: npt.NDArray[np.uint8] = self._codes.take(self._places(x, inverse))
        return found

    def scale(self, x: Float32, weights: Float32, trials: int) -> Float32:
        """The scale of least squared error; tries (lowest + t) / extreme for t of -trials…trials. 0 for zeros."""
        extreme = signed_extreme(x)
        zero = np.abs(extreme) < SMALLEST
        extreme = np.where(zero, _ONE, extreme)
        lowest = np.float32(self.lowest)
        scale, best = self._fit(x, weights, over(1, -extreme / lowest))[:2]
        for trial in range(-trials, trials + 1):
            found, explained, sum_qx, sum_q2 = self._fit(x, weights, over(lowest + np.float32(trial), extreme))
            better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
            np.copyto(scale, found, where=better)
            np.copyto(best, explained, where=better)
        scale[zero] = 0
        return scale

    def _fit(self, x: Float32, weights: Float32, inverse: Float32) -> tuple[Float32, Float32, Float32, Float32]:
        values = self._values.take(self._places(x, inverse))
        weighted = weights * values
        sum_qx, sum_q2 = ordered_sum(weighted * x), ordered_sum(weighted * values)
        scale = np.where(sum_q2 > 0, _ratio(sum_qx, sum_q2), _ZERO)
        return scale, scale * sum_qx, sum_qx, sum_q2
