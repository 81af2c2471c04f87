"""From logits to a token: penalties, masks, temperature, and the smallest sets that the options allow.

What is computed is defined in plan/sample_rule.py: a compiled program samples in the same step as it computes logits,
and gives the tokens that `Sampling.pick` gives on the host.  Weights are integers, so that sums have no order.

The order is transformers': penalties and bias change logits, then temperature, top-k, top-p and min-p each shrink the
set of candidates.  `tests/lm/test_sampling.py` compares the sets with transformers' own processors.  Sources: top-p is
Holtzman et al. 2020 (arXiv 1904.09751), min-p is Nguyen et al. 2024 (arXiv 2407.01082), the repetition penalty is
Keskar et al. 2019 (arXiv 1909.05858); presence and frequency penalties are those of OpenAI's API.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError
from qcompiler.plan.kinds.sample import (
    BROKEN,
    DRAW,
    FLAGS,
    FREQUENCY,
    GIVEN,
    MIN_P,
    MOST_COLUMNS,
    PRESENCE,
    READS_BIAS,
    READS_TALLIES,
    REPETITION,
    SCALE,
    SHARE_BITS,
    TOP_K,
    TOP_P,
    WORDS,
)
from qcompiler.plan.sample_rule import Floats, Words, adjusted, bits_of, drawn, kept, number_of

Allowed = Sequence[int] | Callable[[Sequence[int]], Iterable[int]]

_LEAST_SCALE = 1e-37
"""A scale of 0 would mean temperature 0."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. With `temperature` 0 it is the most likely one, and nothing is random.

    - `top_k` keeps the k most likely tokens (0: all); `top_p` the fewest likely tokens whose probabilities sum to
      at least p; `min_p` those with at least min_p times the probability of the most likely one.
    - `repetition_penalty` r divides positive logits of tokens that occur in the text by r, and multiplies negative
      ones by r.
    - `presence_penalty` is subtracted from the logits of tokens that were generated; `frequency_penalty` once for each
      time they were.
    - `bias` is added to logits, by token.  `allowed` is the tokens that may be chosen, or a function from the sequence
      so far to them.
    - `ends` are not chosen for the first `min_new_tokens` tokens.
    - `seed` starts the random numbers.  Each number depends on the seed, the index of the sequence in its batch and the
      number of the token alone: other sequences of a batch do not change a sequence's text.

    ArgumentError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Allowed | None = None
    seed: int = 0
    ends: frozenset[int] = frozenset()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "0 or more; 0 takes the most likely token"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 changes nothing"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("min_new_tokens", self.min_new_tokens >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
        )
        for name, fits, rule in checks:
            value = getattr(self, name)
            if not fits:
                raise ArgumentError(f"{name}={value!r}: choose {rule}")

        if not all(math.isfinite(value) for value in (*self.bias.values(), self.repetition_penalty, self.temperature)):
            raise ArgumentError("bias, repetition_penalty and temperature are finite; `allowed` excludes tokens")
        if not isinstance(self.top_k, int) or not isinstance(self.seed, int):
            raise ArgumentError(f"top_k={self.top_k!r} and seed={self.seed!r} are whole numbers")

    def check(self, vocabulary: int) -> None:
        """ArgumentError if the options name a token that the vocabulary lacks."""
        for token in self.bias:
            _known(token, vocabulary, "bias")
        for token in () if self.allowed is None or callable(self.allowed) else self.allowed:
            _known(token, vocabulary, "allowed")

    def pick(self, logits: npt.NDArray[Any], tokens: Sequence[int], prompt: int, sequence: int) -> int:
        """The next token of a sequence, on the host. `logits` are (vocabulary,), and the first `prompt` of its `tokens`
        were given.

        A program that samples gives the same token.  ArgumentError if no token is allowed, or if the logits hold NaN.
        """
        vocabulary = len(logits)
        words = self.words(sequence, len(tokens) - prompt)
        biases = self.biases(tokens, vocabulary, len(tokens) - prompt)
        found = drawn(adjusted(logits, words, self.tallies(tokens, prompt, vocabulary), biases), words)
        return require_token(found, len(tokens), sequence)

    def words(self, sequence: int, step: int) -> Words:
        """What the program is told for one token (plan/kinds/sample.py), apart from the row of its logits."""
        words = self._constant_words.copy()
        if self.temperature:
            words[DRAW] = np.uint64(draw(self.seed, sequence, step)).view(np.int64)
        if self.masks_ends(step):
            words[FLAGS] |= READS_BIAS
        return words

    @functools.cached_property
    def _constant_words(self) -> Words:
        """What is the same for all tokens, if no end token is masked."""
        words = np.zeros(WORDS, np.int64)
        if self.temperature:
            words[SCALE] = bits_of(max(math.log2(math.e) / self.temperature, _LEAST_SCALE))
        words[TOP_K] = min(self.top_k, MOST_COLUMNS)
        words[TOP_P] = max(int(self.top_p * 2**SHARE_BITS), 1)
        words[MIN_P] = int(self.min_p * 2**SHARE_BITS)
        words[REPETITION] = bits_of(self.repetition_penalty)
        words[PRESENCE], words[FREQUENCY] = bits_of(self.presence_penalty), bits_of(self.frequency_penalty)
        words[FLAGS] = READS_BIAS * self.has_bias + READS_TALLIES * self.has_penalties
        return words

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def has_bias(self) -> bool:
        return bool(self.bias) or self.allowed is not None

    def masks_ends(self, made: int) -> bool:
        """Whether the token after `made` new ones must not end the text."""
        return made < self.min_new_tokens and bool(self.ends)

    def tallies(self, tokens: Sequence[int], prompt: int, vocabulary: int) -> Floats:
        """For each token of the vocabulary how often it was generated, and `GIVEN` more if it occurs in the prompt."""
        found = np.zeros(vocabulary, np.float32)
        if self.has_penalties:
            found += np.bincount(np.asarray(tokens[prompt:], np.int64), minlength=vocabulary)
            found[np.asarray(tokens[:prompt], np.int64)] += GIVEN
        return found

    def biases(self, tokens: Sequence[int], vocabulary: int, made: int = 0) -> Floats:
        """What is added to each logit after `made` new tokens; -infinity for tokens that are not allowed."""
        found = np.zeros(vocabulary, np.float32)
        for token, value in self.bias.items():
            found[_known(token, vocabulary, "bias")] = number_of(bits_of(value))
        if self.allowed is not None:
            given = self.allowed(tokens) if callable(self.allowed) else self.allowed
            may = np.asarray([_known(token, vocabulary, "allowed") for token in given], np.int64)
            masked = np.full(vocabulary, -math.inf, np.float32)
            masked[may] = found[may]
            found = masked
        if self.masks_ends(made):
            found[[token for token in self.ends if token < vocabulary]] = -math.inf
        return found

    def candidates(self, scores: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The tokens that may be drawn, by number, and weights in proportion to their probabilities."""
        return kept(scores, self.words(0, 0))


def draw(seed: int, sequence: int, step: int) -> int:
    """64 bits for one token of one sequence: Philox (Salmon et al. 2011) with these as its counter."""
    bits = np.random.Philox(key=seed, counter=np.array([0, step, sequence, 0], np.uint64))
    return int(bits.random_raw())


def require_token(found: int, place: int, sequence: int) -> int:
    """The token. ArgumentError for a result that says why there is none."""
    if found >= 0:
        return found
    what = "the logits hold NaN or infinity" if found == BROKEN else "no token is allowed here"
    raise ArgumentError(f"token {place} of sequence {sequence} cannot be chosen: {what}")


def _known(token: int, vocabulary: int, name: str) -> int:
    if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
        raise ArgumentError(f"{name} names the token {token}; the vocabulary has {vocabulary}")
    return int(token)
