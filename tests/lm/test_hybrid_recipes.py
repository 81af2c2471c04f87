"""Models with attention and recurrences in recipes of weights, int8 activations, caches and types of the model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from oracle_logits import oracle_logits

import qcompiler as qc
from qcompiler.lm.step import prepared
from qcompiler.plan.kinds.sample import WORDS

models = load("tests/support/state_models.py")

PROMPT = [5, 17, 80, 3, 61, 44, 9]
RECIPES = (("float", None), ("nf4", None), ("int4:group=32", None), ("q8_0", None), ("int4:group=32", "int8"),
           ("int8", "int8"), ("q8_0", "int8"))  # fmt: skip
CACHES = ("int8", "int4", "fp8", "fp16", "bf16", "fp32")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}
"""Relative norm: fp32 sums in another order; in 16 bits ten roundings of 2^-11 and 2^-8, since kernels round less often
than torch."""


MODELS = ("lfm2", "falcon_h1", "qwen3_next", "granitemoehybrid", "jamba")


def cases() -> list[Any]:
    """Every recipe on both devices; models, caches and types take turns."""
    found = []
    for i, (recipe, device) in enumerate(itertools.product(RECIPES, ("cpu", "sim:0"))):
        cache, dtype = CACHES[(i + i // len(CACHES)) % len(CACHES)], tuple(DTYPES)[i % len(DTYPES)]
        found.append(pytest.param(MODELS[i % len(MODELS)], cache, *recipe, dtype, device, marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "cache", "recipe", "activations", "dtype", "device"), cases())
def test_recipes_activations_caches_types_and_devices(
    name: str, cache: Any, recipe: str, activations: Any, dtype: str, device: str
) -> None:
    model = models.build(name).to(DTYPES[dtype])
    quant = qc.QuantConfig(recipe, activations=activations, promise_bits=None)
    lm = qc.compile_causal_lm(model, quant, max_seq_len=32, chunk=8, kv_cache=cache, device=device)
    held = lm.conversation()
    calls = [held.read(PROMPT[:5], logits="all")[0], held.read(PROMPT[5:6])[0], held.read(PROMPT[6:])[0]]
    ours, theirs = np.concatenate(calls).astype(np.float32), oracle_logits(lm, PROMPT)
    # A code that rounds the other way moves one number by 1/127 of the largest; a narrow cache rounds once more.
    narrow = 2e-2 if activations or cache in ("int8", "int4", "fp8") else 1e-3 if cache != "fp32" else 0.0
    assert np.linalg.norm(ours - theirs) <= (ROUNDING[dtype] + narrow) * np.linalg.norm(theirs)
    assert lm.generate(PROMPT, max_new_tokens=4, eos_token_id=-1)[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("cache", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8", "int4"))])
def test_the_step_of_a_hybrid_with_a_narrow_cache_is_transformers_model(cache: str) -> None:
    """In eager torch, in two calls: keys and values in rows of bytes beside states in fp32."""
    model = models.build("falcon_h1")
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
        with prepared(model, 1, 32, cache, 32, 8) as step:
            found = []
            for first, last in ((0, 5), (5, 7)):
                rows, count = torch.arange(first, last)[None], last - first
                logits, _ = step(
                    ids=torch.tensor([PROMPT[first:last]]), positions=rows, rows=rows, wanted=torch.arange(count),
                    how=torch.full((1, WORDS), -1), counts=torch.tensor([count]),
                )  # fmt: skip
                found.append(logits.numpy())
    error = np.linalg.norm(np.concatenate(found) - theirs) / np.linalg.norm(theirs)
    assert 0 < error <= {"int8": 2e-2, "fp8": 6e-2, "int4": 2e-1}[cache]
