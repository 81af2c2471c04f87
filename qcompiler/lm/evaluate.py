"""How well a language model predicts a text: bits, from which bits per byte and perplexity follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError

if TYPE_CHECKING:
    from qcompiler.lm.model import CausalLM


@dataclass(frozen=True)
class Score:
    """The negative log2 likelihood of `tokens` predicted tokens, and the bytes of the whole text."""

    bits: float
    tokens: int
    nbytes: int


def score(lm: CausalLM, ids: Sequence[int], nbytes: int, *, progress: Callable[[int], object] | None = None) -> Score:
    """Scores a text in windows of `max_seq_len` tokens; the first half of each is the last half of the one before.

    So every token but those of the first window sees at least half a window of context.  The first token of the text is
    not predicted.  `progress` is called with the number of tokens that are done.  ArgumentError for fewer than two
    tokens.
    """
    if len(ids) < 2:
        raise ArgumentError(f"a text of {len(ids)} tokens predicts nothing; at least two are needed")
    window, held = lm.max_seq_len, lm.conversation()
    bits, begin, done = 0.0, 0, 1
    while done < len(ids):
        end = min(begin + window, len(ids))
        held.reset()
        for at in range(begin, end - 1, lm.record.chunk):
            piece = ids[at : min(at + lm.record.chunk, end - 1)]
            logits = held.read(piece, logits="all")[0]
            new = max(done - 1 - at, 0)  # tokens that an earlier window predicted
            if new < len(piece):
                bits += nll(logits[new:], ids[at + 1 + new : at + 1 + len(piece)])
        done = end
        begin = max(end - window // 2, begin + 1)
        if progress is not None:
            progress(done)
    return Score(bits, len(ids) - 1, nbytes)


def nll(logits: npt.NDArray[np.float32], targets: Sequence[int]) -> float:
    """The sum of -log2 p(target), in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = wide[np.arange(len(targets)), np.asarray(targets)]
    return float((np.log(np.exp(wide).sum(axis=1)) - chosen).sum() / np.log(2))
