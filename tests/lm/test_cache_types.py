"""Caches in fp16, bf16, int8, fp8 and int4: read as they are, never widened as a whole, and equal to the oracle."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_path import load
from oracle_logits import oracle_logits

import qcompiler as qc
from qcompiler.formats.cache_rows import row_bytes
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel
from qcompiler.plan.kinds.quantize_cache import QuantizeCacheKernel
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.plan import Launch

DECODERS = load("tests/models/zoo.py").DECODERS
PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1]]


@cache
def model() -> Any:
    return DECODERS["llama"].build()


@cache
def compiled(kv_cache: Any, batch: int, device: str) -> qc.CausalLM:
    return qc.compile_causal_lm(model(), max_seq_len=48, chunk=16, kv_cache=kv_cache, max_batch=batch, device=device)


SHORT = (("fp16", 3, "cpu"), ("int8", 3, "sim:0"))
CASES = [
    pytest.param(dtype, batch, device, marks=() if (dtype, batch, device) in SHORT else pytest.mark.slow)
    for dtype in ("fp16", "bf16", "fp32", "int8", "fp8", "int4") for batch in (1, 2, 3) for device in ("cpu", "sim:0")
]  # fmt: skip
STORED = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "int8": "i8", "fp8": "i8", "int4": "i8"}


@pytest.mark.parametrize(("kv_cache", "batch", "device"), CASES)
def test_a_narrow_cache_is_read_as_it_is(kv_cache: Any, batch: int, device: str) -> None:
    lm = compiled(kv_cache, batch, device)
    program = lm.program
    assert program is not None
    stored = STORED[kv_cache]
    kernels = {kernel.name: kernel for kernel in program.plan.kernels}
    attentions = [kernel for kernel in kernels.values() if isinstance(kernel.body, AttentionKernel)]
    if stored == "i8":  # one launch makes the rows of keys and of values
        steps = next(entry for entry in program.plan.entries if entry.name == "decode").steps
        made = [kernels[s.kernel].body for s in steps if isinstance(s, Launch)]
        assert sum(isinstance(body, QuantizeCacheKernel) for body in made) == LAYERS
    assert attentions and not any(isinstance(kernel.body, DequantizeCacheKernel) for kernel in kernels.values())
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
    for kind in ("fp16", "bf16", "int8", "fp8", "int4"):
        narrow = compiled(kind, 1, "cpu").conversation().read(PROMPTS[0])[0]
        errors[kind] = float(np.linalg.norm(narrow - wide) / np.linalg.norm(wide))
    assert 0 < errors["fp16"] < 2e-3 and 0 < errors["bf16"] < 2e-2 and 0 < errors["int8"] < 2e-2
    assert errors["int8"] < errors["fp8"] < errors["int4"] < 3e-1


HEADS, DIM, LAYERS, LENGTH = 2, 16, 2, 48


def test_a_cache_in_int8_takes_a_byte_for_each_number_and_four_for_each_row() -> None:
    """Rows are rounded up to 16 bytes: of 16 numbers to 32, of 128 to 144."""
    program = compiled("int8", 1, "cpu").program
    assert program is not None
    states = {arena.name: arena.nbytes for arena in program.plan.arenas if arena.kind == "state"}
    kept = {name: size for name, size in states.items() if name.startswith(("state.keys", "state.values"))}
    assert len(kept) == 2 * LAYERS and set(kept.values()) == {HEADS * LENGTH * row_bytes(DIM, "int8")}
    assert row_bytes(DIM, "int8") == 32 and row_bytes(128, "int8") == 144


def test_conversations_over_int8_go_on_fork_forget_and_are_saved(tmp_path: Path) -> None:
    lm = compiled("int8", 1, "cpu")
    held = lm.conversation()
    held.read(PROMPTS[0])
    other = held.fork()
    held.save(tmp_path / "talk.npz")
    (wanted,) = held.read([4])
    assert np.array_equal(other.read([4])[0], wanted)
    other.truncate(len(PROMPTS[0]))
    assert np.array_equal(other.read([4])[0], wanted)
    again = lm.conversation()
    again.restore(tmp_path / "talk.npz")
    assert np.array_equal(again.read([4])[0], wanted)
    again.reset()
    again.read(PROMPTS[0])
    assert np.array_equal(again.read([4])[0], wanted)


def test_the_report_says_which_keys_are_rotated() -> None:
    texts = [
        str(compiled(kind, batch, "cpu").program.report())  # type: ignore[union-attr]
        for kind, batch in (("int4", 3), ("int8", 1))
    ]
    assert ["keys are rotated, and queries  [layer 0 and 1 more]" in text for text in texts] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma2", "int8"), ("gpt-oss", "int8"), ("mixtral", "int8"), ("falcon", "int8"), ("gemma2", "int4"),
        ("gpt-oss", "int4"), ("gpt-oss", "fp8"),
    ],
)  # fmt: skip
def test_attention_with_caps_and_sinks_reads_rows(name: str, kind: Any) -> None:
    made = load("tests/lm/test_moe.py").build("GptOss") if name == "gpt-oss" else DECODERS[name].build()
    lm = qc.compile_causal_lm(made, max_seq_len=24, chunk=8, kv_cache=kind, device="cpu")
    assert lm.program is not None
    kinds = {kernel.body.__class__ for kernel in lm.program.plan.kernels}
    assert DequantizeCacheKernel not in kinds and SoftmaxKernel not in kinds
    ours, theirs = lm.conversation().read(PROMPTS[0], logits="all")[0], oracle_logits(lm, PROMPTS[0])
    assert np.linalg.norm(ours - theirs) <= 2e-3 * np.linalg.norm(theirs)
