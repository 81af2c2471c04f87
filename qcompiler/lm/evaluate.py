"""How well language models predict a text, and how far their predictions are from those of a reference.

bits            sum of -log2 p(token), from which bits per byte and perplexity follow
divergence      KL(reference || model) at every predicted token, in nats; how often both prefer the same token, and
                how many right tokens became wrong, or wrong ones right
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError
from qcompiler.units import counted

if TYPE_CHECKING:
    from qcompiler.lm.model import CausalLM

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

ROWS = 32
"""Logits that are widened to float64 at a time: 32 rows of 128,000 tokens are 33 MB."""


class Reader(Protocol):
    """What reads tokens and gives the logits that follow each of them: a conversation, or another program's model."""

    def reset(self) -> None: ...

    def read(self, new: Sequence[int], *, logits: Literal["all"]) -> list[Logits]: ...


@dataclass(frozen=True)
class Divergence:
    """The distance of a model's predictions from the reference's."""

    nats: Floats
    """KL(reference || model) for each predicted token."""
    same: int
    """How many times the most likely token was the reference's."""
    lost: int
    """Tokens of the text that are the reference's most likely ones and not the model's: answers that became wrong."""
    won: int
    """Tokens of the text that are the model's most likely ones and not the reference's."""

    @property
    def mean(self) -> float:
        return float(self.nats.mean())

    @property
    def high(self) -> float:
        """The value that 99 % of the tokens do not exceed."""
        return float(np.quantile(self.nats, 0.99))

    @property
    def agreement(self) -> float:
        """The share of tokens at which both prefer the same one."""
        return self.same / len(self.nats)


@dataclass(frozen=True)
class Score:
    """The negative log2 likelihood of `tokens` predicted tokens, and the bytes of the whole text."""

    bits: float
    tokens: int
    nbytes: int
    divergence: Divergence | None = None
    """None for the reference itself, and without a reference."""

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.nbytes

    @property
    def perplexity(self) -> float:
        nats = self.bits * math.log(2) / self.tokens
        return math.exp(nats) if nats < 709 else math.inf  # the largest double is exp(709.78)


def score(lm: CausalLM, ids: Sequence[int], nbytes: int, *, progress: Callable[[int], object] | None = None) -> Score:
    """Scores a text with one model, in windows of its `max_seq_len`; see `scores`."""
    readers = {"model": lm.conversation()}
    return scores(readers, ids, nbytes, lm.max_seq_len, lm.record.chunk, progress=progress)["model"]


def scores(
    readers: Mapping[str, Reader],
    ids: Sequence[int],
    nbytes: int,
    window: int,
    chunk: int,
    *,
    reference: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Score]:
    """Scores a text with each reader, in windows of `window` tokens that all of them read in pieces of `chunk`.

    The first half of each window is the last half of the one before.  So every token but those of the first window sees
    at least half a window of context.  The first token of the text is not predicted.  `reference` names the reader that
    the others are compared with.  `progress` is called with the number of tokens that are done.  ArgumentError for
    fewer than two tokens.
    """
    if len(ids) < 2:
        raise ArgumentError(f"a text of {counted(len(ids), 'token')} predicts nothing; at least two are needed")
    tallies = {name: _Tally() for name in readers}
    begin, done = 0, 1
    while done < len(ids):
        end = min(begin + window, len(ids))
        for reader in readers.values():
            reader.reset()
        for at in range(begin, end - 1, chunk):
            piece = ids[at : min(at + chunk, end - 1)]
            new = max(done - 1 - at, 0)  # tokens that an earlier window predicted
            found = {name: reader.read(piece, logits="all")[0][new:] for name, reader in readers.items()}
            if new < len(piece):
                _count(found, ids[at + 1 + new : at + 1 + len(piece)], tallies, reference)
        done = end
        begin = max(end - window // 2, begin + 1)
        if progress is not None:
            progress(done)
    return {name: tally.score(len(ids) - 1, nbytes) for name, tally in tallies.items()}


class _Tally:
    """The sums of one reader."""

    def __init__(self) -> None:
        self.bits, self.same, self.lost, self.won = 0.0, 0, 0, 0
        self.nats: list[Floats] = []

    def score(self, tokens: int, nbytes: int) -> Score:
        far = Divergence(np.concatenate(self.nats), self.same, self.lost, self.won) if self.nats else None
        return Score(self.bits, tokens, nbytes, far)


def _count(
    logits: Mapping[str, Logits], targets: Sequence[int], tallies: Mapping[str, _Tally], reference: str | None
) -> None:
    """Adds some rows of logits to the sums."""
    for at in range(0, len(targets), ROWS):
        rows = slice(at, at + ROWS)
        chosen: Any = (np.arange(len(targets[rows])), np.asarray(targets[rows]))
        base = log_softmax(logits[reference][rows]) if reference is not None else None
        for name, tally in tallies.items():
            own = base if base is not None and name == reference else log_softmax(logits[name][rows])
            tally.bits -= float(own[chosen].sum() / math.log(2))
            if base is not None and name != reference:
                tally.nats.append(divergences(base, own))
                first, ours, text = base.argmax(1), own.argmax(1), chosen[1]
                tally.same += int(np.count_nonzero(first == ours))
                tally.lost += int(np.count_nonzero((first == text) & (ours != text)))
                tally.won += int(np.count_nonzero((first != text) & (ours == text)))


def log_softmax(logits: Logits) -> Floats:
    """The logarithms of the probabilities of each row, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: Floats = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def divergences(reference: Floats, model: Floats) -> Floats:
    """KL(reference || model) of each row of logarithms of probabilities. Rounding does not make it negative."""
    there = np.isfinite(reference)  # what the reference excludes has no part in the sum
    terms = np.exp(reference) * np.subtract(reference, model, out=np.zeros_like(reference), where=there)
    found: Floats = np.maximum(terms.sum(axis=1), 0.0)
    return found
