"""Caches in fp16 and bf16: read as they are, never widened as a whole, and equal to the oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from by_path import load
from oracle_logits import oracle_logits

import qcompiler as qc
from qcompiler.plan.kinds.attention import AttentionKernel

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1]]


@cache
def model() -> Any:
    return load("tests/models/zoo.py").DECODERS["llama"].build()


@cache
def compiled(kv_cache: Any, batch: int, device: str) -> qc.CausalLM:
    return qc.compile_causal_lm(model(), max_seq_len=48, chunk=16, kv_cache=kv_cache, max_batch=batch, device=device)


CASES = [
    pytest.param(dtype, batch, device, marks=() if (dtype, batch, device) == ("fp16", 3, "cpu") else pytest.mark.slow)
    for dtype in ("fp16", "bf16", "fp32") for batch in (1, 2, 3) for device in ("cpu", "sim:0")
]  # fmt: skip


@pytest.mark.parametrize(("kv_cache", "batch", "device"), CASES)
def test_a_narrow_cache_is_read_as_it_is(kv_cache: Any, batch: int, device: str) -> None:
    lm = compiled(kv_cache, batch, device)
    program = lm.program
    assert program is not None
    stored = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[kv_cache]
    kernels = {kernel.name: kernel for kernel in program.plan.kernels}
    attentions = [kernel for kernel in kernels.values() if isinstance(kernel.body, AttentionKernel)]
    assert attentions
    for kernel in attentions:
        assert [operand.dtype for operand in kernel.operands[:3]] == ["f32", stored, stored]
    held = lm.conversation(batch)
    ours = held.read(PROMPTS[:batch], logits="all")
    for prompt, found in zip(PROMPTS, ours, strict=False):
        theirs = oracle_logits(lm, prompt)
        assert np.linalg.norm(found - theirs) <= 1e-5 * np.linalg.norm(theirs)
    again = lm.conversation(batch)  # the same tokens one by one
    for step in range(5):
        last = again.read([prompt[step : step + 1] for prompt in PROMPTS[:batch]])
    np.testing.assert_allclose(last[0][0], ours[0][-1], rtol=0, atol=1e-3 * float(np.abs(ours[0]).max()))


@pytest.mark.slow
def test_what_a_narrow_cache_costs() -> None:
    wide = compiled("fp32", 1, "cpu").conversation().read(PROMPTS[0])[0]
    errors = {}
    for kind in ("fp16", "bf16"):
        narrow = compiled(kind, 1, "cpu").conversation().read(PROMPTS[0])[0]
        errors[kind] = float(np.linalg.norm(narrow - wide) / np.linalg.norm(wide))
    assert 0 < errors["fp16"] < 2e-3 and 0 < errors["bf16"] < 2e-2
