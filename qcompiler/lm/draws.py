"""The next tokens of a conversation's sequences: drawn by the program, or for old programs from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qcompiler.lm.conversation import Conversation
from qcompiler.lm.sampling import Sampling, require_token


class Draws:
    """Draws tokens for one text of each sequence of a conversation.

    `texts` are the tokens of each sequence, to which the caller adds the new ones; the first `begins` were given.
    Penalties begin anew with each `Draws`: the tallies of the program are written once, and the program keeps them.
    """

    def __init__(self, held: Conversation, sampling: Sampling, texts: list[list[int]]) -> None:
        self.held, self.sampling, self.texts = held, sampling, texts
        self.begins = [len(text) for text in texts]
        self._marked: bool | None = None  # whether what was written masks end tokens; None: nothing was written

    def made(self, sequence: int) -> int:
        """How many tokens were drawn for a sequence."""
        return len(self.texts[sequence]) - self.begins[sequence]

    def step(self, new: Sequence[Sequence[int]]) -> dict[int, int]:
        """Reads the new tokens. Returns the next one of each sequence that has some, or what `token` takes."""
        if not self.held.record.samples:
            logits = self.held.read(new)
            return {
                i: self.sampling.pick(rows[-1], self.texts[i], self.begins[i], i)
                for i, rows in enumerate(logits)
                if len(rows)
            }
        words = np.stack([self.sampling.words(i, self.made(i)) for i in range(len(self.texts))])
        self._mark(new)
        return self.held.draw(new, words)

    def token(self, found: int, sequence: int) -> int:
        """The token of a result of `step`. ArgumentError if there is none."""
        return require_token(found, len(self.texts[sequence]), sequence)

    def _mark(self, new: Sequence[Sequence[int]]) -> None:
        """Writes tallies and biases where an option needs them: once, again when end tokens may be chosen, or if
        `allowed` is a function, for each token."""
        sampling, vocabulary = self.sampling, self.held.record.vocabulary
        masks = any(ids and sampling.masks_ends(self.made(i)) for i, ids in enumerate(new))
        is_written = self._marked == masks and not callable(sampling.allowed)
        if is_written or not (sampling.has_penalties or sampling.has_bias or masks):
            return
        none = np.zeros(vocabulary, np.float32)
        tallies = [
            sampling.tallies(text, begin, vocabulary) for text, begin in zip(self.texts, self.begins, strict=True)
        ]
        biases = [
            sampling.biases(text, vocabulary, self.made(i)) if new[i] else none for i, text in enumerate(self.texts)
        ]
        self.held.set_marks(tallies, biases)
        self._marked = masks


__all__ = ["Draws"]
