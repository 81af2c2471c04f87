"""`qc bench model.qca --prompt 512 --generate 128`: how fast a language model reads a prompt and generates."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from qcompiler.errors import ArgumentError
from qcompiler.lm.cache_layers import layer_caches
from qcompiler.lm.conversation import Conversation
from qcompiler.lm.draws import Draws
from qcompiler.lm.model import CausalLM
from qcompiler.lm.sampling import Sampling
from qcompiler.plan.kinds.sample import ROW


@dataclass(frozen=True)
class Speed:
    """Medians of `rounds` rounds, each of which reads a prompt into an empty cache and generates after it.

    Tokens a second are those of all sequences together. `not_product` is the share of a step of one token per sequence
    that is not matrix products, behind the prompt; None on a GPU.
    """

    prompt_tokens: int
    generated_tokens: int
    sequences: int
    rounds: int
    prompt_tokens_per_second: float
    seconds_to_first: float
    decode_tokens_per_second: float | None
    """None if one token was asked for, which the prompt's call gives."""
    step_seconds: float | None
    not_product: float | None
    device: str
    cache_bytes: int
    cache: str
    """The rows and bytes of the cache, by kind of layer."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"prompt   {self.prompt_tokens} tokens x {self.sequences}: {self.prompt_tokens_per_second:.1f} tokens/s, "
            f"the first new token after {self.seconds_to_first * 1e3:.1f} ms"
        ]
        if self.decode_tokens_per_second is not None and self.step_seconds is not None:
            lines.append(
                f"decode   {self.generated_tokens} tokens x {self.sequences}: {self.decode_tokens_per_second:.1f} "
                f"tokens/s, {self.step_seconds * 1e3:.2f} ms a step"
            )
        if self.not_product is not None:
            lines.append(f"outside of matrix products: {self.not_product:.1%} of a step")
        lines.append(self.cache)
        return "\n".join(lines)


def measure(lm: CausalLM, prompt: int, generate: int, batch: int, rounds: int) -> Speed:
    """Times `rounds` rounds after one that is not timed. Tokens are random (seed 0), and then the most likely ones.

    ArgumentError for counts below 1, and for more tokens or sequences than the model was compiled for.
    """
    for name, value in (("prompt", prompt), ("generate", generate), ("batch", batch)):
        if value < 1:
            raise ArgumentError(f"--{name} {value}: choose 1 or more")
    if prompt + generate - 1 > lm.max_seq_len:  # the last token is not read
        raise ArgumentError(
            f"--prompt {prompt} and --generate {generate} need {prompt + generate - 1} rows of the cache: the model "
            f"was compiled for max_seq_len={lm.max_seq_len}"
        )
    held = lm.conversation(batch)
    ids = np.random.default_rng(0).integers(0, lm.record.vocabulary, (batch, prompt)).tolist()
    _round(held, ids, min(generate, 4))
    times = [_round(held, ids, generate) for _ in range(rounds)]
    first = median(begin for begin, _ in times)
    steps = [steps for _, steps in times if steps]
    whole = median(sum(each) for each in steps) if steps else None
    return Speed(
        prompt, generate, batch, rounds,
        prompt_tokens_per_second=batch * prompt / first,
        seconds_to_first=first,
        decode_tokens_per_second=None if whole is None else batch * (generate - 1) / whole,
        step_seconds=median(step for each in steps for step in each) if steps else None,
        not_product=_not_product(lm, prompt, batch) if lm.device == "cpu" else None,
        device=lm.device,
        cache_bytes=sum(each.nbytes for each in layer_caches(lm.record, lm.run.plan)),
        cache=lm.cache_report(),
    )  # fmt: skip


def _round(held: Conversation, prompts: list[list[int]], generate: int) -> tuple[float, list[float]]:
    """Seconds until the first new token of all sequences is known, and of each step after it."""
    held.reset()
    texts = [list(prompt) for prompt in prompts]
    draws = Draws(held, Sampling(), texts)
    times = [time.perf_counter()]
    new = prompts
    for _ in range(generate):
        found = draws.step(new)
        new = [[draws.token(found[i], i)] for i in range(len(texts))]
        for i, ids in enumerate(new):
            texts[i] += ids
        times.append(time.perf_counter())
    steps = [end - begin for begin, end in itertools.pairwise(times[1:])]
    return times[1] - times[0], steps


def _not_product(lm: CausalLM, at: int, batch: int) -> float:
    """The share of one step at position `at` (the last position, if the prompt fills the cache)."""
    positions = np.full((batch, 1), min(at, lm.max_seq_len - 1), np.int64)
    rows = positions + np.arange(batch)[:, None] * lm.record.rows
    given: dict[str, Any] = {
        "ids": np.ones_like(positions),
        "positions": positions,
        "rows": rows,
        "wanted": np.arange(batch),
    }
    if lm.record.counts:
        given["counts"] = np.ones(batch, np.int64)
    if lm.record.samples:
        given["how"] = np.stack([Sampling().words(i, 0) for i in range(batch)])
        given["how"][:, ROW] = np.arange(batch)
    return float(lm.run.profile(**given, rounds=15, keep_states=False).not_product)


__all__ = ["Speed", "measure"]
