"""From logits to a token: penalties, masks, temperature, and the smallest sets that the options allow.

The order is transformers': penalties and bias change logits, then temperature, top-k, top-p and min-p each shrink the
set of candidates.  `tests/lm/test_sampling.py` compares the sets with transformers' own processors.  Sources: top-p is
Holtzman et al. 2020 (arXiv 1904.09751), min-p is Nguyen et al. 2024 (arXiv 2407.01082), the repetition penalty is
Keskar et al. 2019 (arXiv 1909.05858); presence and frequency penalties are those of OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError

Logits = npt.NDArray[np.float64]
Allowed = Sequence[int] | Callable[[Sequence[int]], Iterable[int]]

_LIKELY = 1024
"""Candidates that are looked at first: sorting 128,000 tokens takes longer than a step of a small model."""


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

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "0 or more; 0 takes the most likely token"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 changes nothing"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
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
        """The next token of a sequence. `logits` are (vocabulary,); the first `prompt` of its `tokens` were given.

        ArgumentError if no token is allowed, or if the logits hold NaN.
        """
        scores: npt.NDArray[Any] = logits
        if self.temperature or self._adjusts:
            scores = self.adjusted(logits, tokens, prompt)
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            broken = math.isnan(scores[best]) or scores[best] > 0
            what = "the logits hold NaN or infinity" if broken else "no token is allowed here"
            raise ArgumentError(f"token {len(tokens)} of sequence {sequence} cannot be chosen: {what}")
        if self.temperature == 0:
            return best
        kept, weights = self.candidates(scores)
        ends = np.cumsum(weights)
        drawn = uniform(self.seed, sequence, len(tokens) - prompt) * ends[-1]
        return int(kept[min(int(np.searchsorted(ends, drawn, side="right")), len(kept) - 1)])

    @property
    def _adjusts(self) -> bool:
        """Whether an option changes logits. If none does, the most likely token is that of the logits as they are."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.bias or self.allowed is not None)

    def adjusted(self, logits: npt.NDArray[Any], tokens: Sequence[int], prompt: int) -> Logits:
        """The logits after penalties, bias and the mask of allowed tokens, in float64."""
        scores = logits.astype(np.float64)
        if self.repetition_penalty != 1:
            seen = np.unique(np.asarray(tokens, np.int64))
            there = scores[seen]
            scores[seen] = np.where(there > 0, there / self.repetition_penalty, there * self.repetition_penalty)
        if self.presence_penalty or self.frequency_penalty:
            made, counts = np.unique(np.asarray(tokens[prompt:], np.int64), return_counts=True)
            scores[made] -= self.presence_penalty + self.frequency_penalty * counts
        for token, value in self.bias.items():
            scores[_known(token, len(scores), "bias")] += value
        if self.allowed is not None:
            given = self.allowed(tokens) if callable(self.allowed) else self.allowed
            may = np.asarray([_known(token, len(scores), "allowed") for token in given], np.int64)
            masked = np.full_like(scores, -math.inf)
            masked[may] = scores[may]
            scores = masked
        return scores

    def candidates(self, scores: Logits) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The tokens that may be drawn, most likely first (equal ones by number), and their probabilities before the
        set was cut."""
        scaled = (scores - scores.max()) / self.temperature
        weights = np.exp(scaled)
        weights /= weights.sum()
        order = self._order(weights)
        if self.top_k:
            order = order[: self.top_k]
        kept = weights[order]
        if self.top_p < 1:
            before, whole = np.cumsum(kept) - kept, kept.sum() if self.top_k else 1.0
            order = order[: max(1, int(np.count_nonzero(before < self.top_p * whole)))]
            kept = weights[order]
        if self.min_p:
            order = order[: int(np.count_nonzero(kept >= self.min_p * kept[0]))]
        order = order[weights[order] > 0]
        return order, weights[order]

    def _order(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """All tokens by falling weight, or as many of them as the options can need."""
        few = min(max(_LIKELY, self.top_k), len(weights))
        if few < len(weights) and (self.top_k or self.top_p < 1):
            front = np.argpartition(-weights, few - 1)[:few]
            if self.top_k or weights[front].sum() >= self.top_p:
                least = weights[front].min()  # equal ones outside would come by number
                front = np.flatnonzero(weights >= least)
                return front[np.argsort(-weights[front], kind="stable")]
        return np.argsort(-weights, kind="stable")


def uniform(seed: int, sequence: int, step: int) -> float:
    """A number in [0, 1) for one token of one sequence: Philox (Salmon et al. 2011) with these as its counter."""
    bits = np.random.Philox(key=seed, counter=np.array([0, step, sequence, 0], np.uint64))
    return float(np.random.Generator(bits).random())


def _known(token: int, vocabulary: int, name: str) -> int:
    if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
        raise ArgumentError(f"{name} names the token {token}; the vocabulary has {vocabulary}")
    return int(token)
