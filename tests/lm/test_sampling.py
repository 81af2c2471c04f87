"""Sampling: the sets of candidates are those of transformers' own processors, and numbers follow the distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from qcompiler.errors import ArgumentError
from qcompiler.lm.sampling import Sampling, draw
from qcompiler.plan.kinds.sample import GIVEN
from qcompiler.plan.sample_rule import adjusted, weights_of

VOCABULARY = 3000


def logits_of(seed: int, vocabulary: int = VOCABULARY, spread: float = 3.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * spread).astype(np.float32)


OPTIONS = [
    {"top_k": 1}, {"top_k": 50}, {"top_k": 2999}, {"top_p": 0.9}, {"top_p": 0.1}, {"top_p": 0.999}, {"min_p": 0.05},
    {"min_p": 1.0}, {"top_k": 40, "top_p": 0.8}, {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.3, "top_k": 40}, {"repetition_penalty": 0.7, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_the_candidates_are_those_of_transformers(options: dict[str, Any], temperature: float, spread: float) -> None:
    tokens = [5, 7, 5, 100]
    logits = logits_of(1, spread=spread)
    chain = LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(logits_process.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(logits_process.TemperatureLogitsWarper(temperature))
    if "top_k" in options:
        chain.append(logits_process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(logits_process.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(logits_process.MinPLogitsWarper(options["min_p"]))
    theirs = chain(torch.tensor([tokens]), torch.from_numpy(logits.copy()).double()[None])[0]
    sampling = Sampling(temperature=temperature, **options)
    kept, weights = sampling.candidates(scores_of(sampling, logits, tokens, 2))
    expected = theirs.softmax(-1).numpy()
    possible = expected > expected.max() * 2.0**-40  # less likely ones have no weight
    assert set(kept.tolist()) == set(np.flatnonzero(possible).tolist())
    np.testing.assert_allclose(weights / weights.sum(), expected[kept] / expected[kept].sum(), rtol=3e-5, atol=1e-12)


def scores_of(sampling: Sampling, logits: np.ndarray[Any, Any], tokens: list[int], prompt: int) -> np.ndarray[Any, Any]:
    tallies, biases = sampling.tallies(tokens, prompt, len(logits)), sampling.biases(tokens, len(logits))
    return adjusted(logits, sampling.words(0, len(tokens) - prompt), tallies, biases)


@pytest.mark.parametrize("scale", [0.3, 1.4427, 7.0])
def test_weights_are_powers_of_two_in_fixed_point(scale: float) -> None:
    """Against float64. t is a difference and a product in fp32, each rounded once; then it is cut at 2^-24."""
    scores = np.sort(np.random.default_rng(6).uniform(-20, 20, 4000)).astype(np.float32)
    t = (float(scores.max()) - scores.astype(np.float64)) * float(np.float32(scale))
    found = weights_of(scores, np.float32(scale)).astype(np.float64)
    assert found[-1] == 2**40 and (np.diff(found) >= 0).all() and (found[t >= 41.001] == 0).all()
    likely = t < 20
    np.testing.assert_allclose(found[likely], 2.0 ** (40 - t[likely]), rtol=20 * 2.0**-23 + 2.0**-19)


def test_temperature_0_takes_the_most_likely_token_and_the_first_of_equal_ones() -> None:
    logits = logits_of(2)
    assert Sampling().pick(logits, [], 0, 0) == int(logits.argmax())
    logits[[17, 900]] = 99
    assert Sampling().pick(logits, [], 0, 0) == 17


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    drawn = [Sampling(temperature=1.0, seed=3).pick(logits, [0] * n, 0, 0) for n in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125], atol=0.03)


def test_a_number_depends_on_seed_sequence_and_step_alone() -> None:
    numbers = {draw(seed, sequence, step) for seed in (0, 1, 2**63) for sequence in (0, 1) for step in (0, 1, 2)}
    assert len(numbers) == 18
    assert all(0 <= number < 2**64 for number in numbers)
    assert draw(1, 2, 3) == draw(1, 2, 3)


def test_presence_and_frequency_count_what_was_generated_and_not_the_prompt() -> None:
    logits = np.zeros(10, np.float32)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_array_equal(scores_of(sampling, logits, [1, 1, 2, 2, 3], 2)[:5], [0, 0, -1.0, -0.75, 0])
    np.testing.assert_array_equal(sampling.tallies([1, 1, 2, 1], 2, 4), [0, GIVEN + 1, 1, 0])


def test_bias_and_allowed_tokens() -> None:
    logits = logits_of(3)
    assert Sampling(bias={11: 100.0}).pick(logits, [], 0, 0) == 11
    assert Sampling(allowed=[7, 8]).pick(logits, [], 0, 0) == (7 if logits[7] >= logits[8] else 8)
    assert Sampling(allowed=lambda tokens: [len(tokens)]).pick(logits, [4] * 6, 0, 0) == 6
    for _ in range(20):
        assert Sampling(temperature=5.0, allowed=[1, 2], seed=_).pick(logits, [], 0, 0) in (1, 2)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Sampling(temperature=-1), "temperature=-1"), (lambda: Sampling(top_p=0), "top_p=0"),
    (lambda: Sampling(top_p=1.5), "top_p=1.5"), (lambda: Sampling(min_p=math.nan), "min_p=nan"),
    (lambda: Sampling(temperature=math.nan), "temperature=nan"), (lambda: Sampling(top_k=-1), "top_k=-1"),
    (lambda: Sampling(repetition_penalty=0), "repetition_penalty=0"), (lambda: Sampling(seed=-1), "seed=-1"),
    (lambda: Sampling(bias={VOCABULARY: 1.0}).pick(logits_of(0), [], 0, 0), "bias names the token 3000"),
    (lambda: Sampling(allowed=[-1]).pick(logits_of(0), [], 0, 0), "allowed names the token -1"),
    (lambda: Sampling(allowed=[]).pick(logits_of(0), [], 0, 0), "no token is allowed"),
    (lambda: Sampling().pick(np.full(5, math.nan, np.float32), [], 0, 0), "hold NaN"),
])  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_equal_tokens_are_kept_by_number() -> None:
    logits = logits_of(4, 5000, spread=2.0)
    logits[:2000] = logits.max()
    for options, count in (
        ({"top_k": 1030}, 1030),
        ({"top_k": 1030, "top_p": 0.5}, 515),
        ({"top_k": 5, "min_p": 1.0}, 5),
    ):
        kept, _ = Sampling(temperature=1.0, **options).candidates(logits)  # type: ignore[arg-type]
        np.testing.assert_array_equal(kept, np.arange(count))


@pytest.mark.parametrize("options", [{"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 1e-30}, {"top_k": 1}], ids=str)
def test_the_narrowest_settings_leave_the_most_likely_token(options: dict[str, Any]) -> None:
    logits = logits_of(5)
    for seed in range(20):
        sampling = Sampling(**{"temperature": 1.0, "seed": seed, **options})
        assert sampling.pick(logits, [], 0, 0) == int(logits.argmax())


def test_the_highest_temperature_makes_all_tokens_equal() -> None:
    logits = logits_of(5, 8, spread=100.0)
    kept, weights = Sampling(temperature=1e300).candidates(logits)
    assert len(kept) == 8 and len(set(weights.tolist())) == 1
