"""Every decoder of the zoo through `compile_causal_lm`: logits beside transformers', at batch 1 and 3, cut anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc

LENGTHS = (7, 1, 12)
QUICK = {("llama", 3), ("gpt2", 1), ("falcon", 3)}


def names() -> list[str]:
    return [*load("tests/models/zoo.py").DECODERS, "gpt2"]


def build(name: str) -> Any:
    zoo = load("tests/models/zoo.py")
    return zoo.gpt2().model if name == "gpt2" else zoo.DECODERS[name].build()


CASES = [
    pytest.param(name, batch, marks=() if (name, batch) in QUICK else pytest.mark.slow)
    for name in names()
    for batch in (1, 3)
]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_logits_are_those_of_transformers(name: str, batch: int) -> None:
    check(build(name), batch)


def check(model: Any, batch: int) -> None:
    """A prompt in calls of several tokens and a step after it, for sequences of different lengths."""
    lm = qc.compile_causal_lm(model, max_seq_len=40, max_batch=batch, chunk=5)
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 199, length).tolist() for length in LENGTHS[:batch]]
    held = lm.conversation(batch)
    whole = held.read(prompts, logits="all")
    steps = held.read([[5], [6], [7]][:batch])
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            theirs = model(torch.tensor([[*prompt, 5 + i]]), use_cache=False).logits[0].numpy()
        ours = np.concatenate([whole[i], steps[i]])
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
