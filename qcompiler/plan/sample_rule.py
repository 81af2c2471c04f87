"""The definition of `sample` (plan/kinds/sample.py) in NumPy: what every kernel computes, to the token.

adjusted   logits, tallies and biases to scores
kept       scores to the tokens that may be drawn, and their weights
drawn      a number to one of them
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.plan.kinds.sample import (
    BROKEN,
    DRAW,
    FLAGS,
    FREQUENCY,
    GIVEN,
    LN2,
    MIN_P,
    NONE_ALLOWED,
    NOT_ASKED,
    PRESENCE,
    READS_BIAS,
    READS_TALLIES,
    REPETITION,
    ROW,
    SCALE,
    SHARE_BITS,
    TAYLOR,
    TOP_K,
    TOP_P,
    WEIGHT_BITS,
)

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.uint64]
Words = npt.NDArray[np.int64]

_ALL = 1 << SHARE_BITS
_END = WEIGHT_BITS + 1


def bits_of(value: float) -> int:
    """The bits of a number in fp32; the largest one for numbers beyond it."""
    largest = float(np.finfo(np.float32).max)
    return int(np.float32(min(max(value, -largest), largest)).view(np.uint32))


def number_of(word: int) -> np.float32:
    """The fp32 whose bits are the lower half of a word."""
    return np.uint32(int(word) & 0xFFFFFFFF).view(np.float32)


def sample(x: npt.NDArray[Any], how: Words, tallies: Floats, bias: Floats) -> Ids:
    """A token for each row of `how`, or a negative number that says why there is none."""
    found = np.full(len(how), NOT_ASKED, np.int64)
    for i, words in enumerate(how):
        if 0 <= words[ROW] < len(x):
            found[i] = drawn(adjusted(x[words[ROW]], words, tallies[i], bias[i]), words)
    return found


def adjusted(logits: npt.NDArray[Any], words: Words, tallies: Floats, bias: Floats) -> Floats:
    """The scores of one sequence."""
    scores = logits.astype(np.float32)
    with np.errstate(all="ignore"):
        if words[FLAGS] & READS_TALLIES:
            factor = number_of(words[REPETITION])
            there = np.where(scores > 0, scores / factor, scores * factor)
            scores = np.where(tallies != 0, there, scores)
            made = np.where(tallies >= GIVEN, tallies - np.float32(GIVEN), tallies)
            amount = number_of(words[PRESENCE]) + number_of(words[FREQUENCY]) * made
            scores = np.where(made != 0, scores - amount, scores)
        if words[FLAGS] & READS_BIAS:
            scores = np.where(np.isneginf(bias), bias, scores + bias)
        return scores + np.float32(0)  # -0 becomes 0


def drawn(scores: Floats, words: Words) -> int:
    """The token of one sequence."""
    if not (scores <= np.finfo(np.float32).max).all():
        return BROKEN
    best = int(scores.argmax())
    if np.isneginf(scores[best]):
        return NONE_ALLOWED
    if number_of(words[SCALE]) == 0:
        return best
    tokens, weights = kept(scores, words)
    ends = np.cumsum(weights)
    if not len(tokens):
        return best
    beyond = (int(words[DRAW]) & (2**64 - 1)) * int(ends[-1]) >> 64
    return int(tokens[np.searchsorted(ends, np.uint64(beyond), side="right")])


def kept(scores: Floats, words: Words) -> tuple[Ids, Weights]:
    """The tokens that may be drawn, in their own order, and their weights. The scores have a finite maximum."""
    weights = weights_of(scores, number_of(words[SCALE]))
    tokens = np.arange(len(scores))
    count = int(words[TOP_K])
    if 0 < count < len(scores):
        last = np.partition(scores, len(scores) - count)[len(scores) - count]
        above, equal = np.flatnonzero(scores > last), np.flatnonzero(scores == last)
        tokens = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    tokens = tokens[weights[tokens] > 0]
    share, total = max(int(words[TOP_P]), 0), int(weights[tokens].sum())
    if share < _ALL and total:
        order = tokens[np.argsort(-scores[tokens], kind="stable")]
        wanted = np.uint64(max(total * share >> SHARE_BITS, 1))
        tokens = np.sort(order[: int(np.searchsorted(np.cumsum(weights[order]), wanted)) + 1])
    least = np.uint64(min(max(int(words[MIN_P]), 0), _ALL) << (WEIGHT_BITS - SHARE_BITS))
    tokens = tokens[weights[tokens] >= least]
    return tokens, weights[tokens]


def weights_of(scores: Floats, scale: np.float32) -> Weights:
    """2^40 * 2^-((max - score) * scale), in 32 bits of fixed point."""
    with np.errstate(all="ignore"):
        t = (scores.max() - scores) * scale
    lies = t < _END
    q = (np.where(lies & (t > 0), t, 0) * np.float32(2**24)).astype(np.uint64)
    x = ((q & np.uint64(2**24 - 1)) << np.uint64(8)) * np.uint64(LN2) >> np.uint64(32)
    y = np.full(len(scores), TAYLOR[-1], np.uint64)
    for coefficient in TAYLOR[-2::-1]:
        y = np.uint64(coefficient) - (x * y >> np.uint64(32))
    return np.where(lies, y << np.uint64(WEIGHT_BITS - 31) >> (q >> np.uint64(24)), np.uint64(0))
