"""Texts beyond the trained length: each scaling of rotary positions, before and behind that length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc

TRAINED, LENGTH = 32, 72
_BASE = {"rope_theta": 10000.0}
_FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.1], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": TRAINED,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": TRAINED},
    "yarn with its options": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": TRAINED, "beta_fast": 20.0,
        "beta_slow": 2.0, "attention_factor": 1.3},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED},
    "longrope": {"rope_type": "longrope", **_FACTORS},
}  # fmt: skip
TEXT = np.random.default_rng(5).integers(2, 199, LENGTH).tolist()


def build(scaling: str, **options: Any) -> Any:
    """A small random Llama that was trained for 32 positions; the extended kinds say for how many they were made."""
    zoo = load("tests/models/zoo.py")
    extended = scaling in ("longrope",) or scaling.startswith("yarn")
    positions = 3 * TRAINED if extended else TRAINED
    return zoo.DECODERS["llama"].build(
        rope_parameters={**_BASE, **SCALINGS[scaling]}, max_position_embeddings=positions, **options
    )


def of_transformers(model: Any, tokens: list[int]) -> Any:
    """Logits of one call: its frequencies are those of this text's length."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def close(ours: Any, theirs: Any) -> bool:
    return bool(np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs))


@pytest.mark.parametrize(("scaling", "batch"), [
    pytest.param(name, batch, marks=pytest.mark.slow)
    for name in SCALINGS for batch in (1, 3)
])  # fmt: skip
def test_logits_before_and_behind_the_trained_length(scaling: str, batch: int) -> None:
    model = build(scaling)
    lm = qc.compile_causal_lm(model, max_seq_len=LENGTH, chunk=16, max_batch=batch)
    ours = lm.conversation(batch).read([TEXT, TEXT[:3], TEXT[:40]][:batch], logits="all")
    theirs = of_transformers(model, TEXT)
    assert close(ours[0][:TRAINED], theirs[:TRAINED])
    assert close(ours[0][TRAINED:], theirs[TRAINED:])
    for row, logits in enumerate(ours[1:], 1):  # a causal model: a shorter text is the longer one's beginning
        assert close(logits, theirs[: (0, 3, 40)[row]])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_program_for_short_texts_has_the_frequencies_of_short_texts(scaling: str, batch: int) -> None:
    """`max_seq_len` decides; the spare rows of a cache for several sequences are no tokens."""
    model = build(scaling)
    lm = qc.compile_causal_lm(model, max_seq_len=TRAINED, chunk=16, max_batch=batch)
    ours = lm.conversation(batch).read([TEXT[:TRAINED], TEXT[:5]][:batch], logits="all")[0]
    assert close(ours, of_transformers(model, TEXT[:TRAINED]))


@pytest.mark.slow
def test_how_a_text_is_cut_changes_transformers_numbers_and_not_ours() -> None:
    """Why "dynamic" frequencies are fixed: transformers turns keys of one cache by different frequencies."""
    model = build("dynamic")
    whole = of_transformers(model, TEXT)
    with torch.no_grad():
        first = model(torch.tensor([TEXT[:20]]), use_cache=True)
        rest = model(torch.tensor([TEXT[20:]]), past_key_values=first.past_key_values).logits[0].numpy()
    assert not close(rest, whole[20:])
    lm = qc.compile_causal_lm(model, max_seq_len=LENGTH, chunk=16)
    held = lm.conversation()
    held.read(TEXT[:20])
    assert close(held.read(TEXT[20:], logits="all")[0], whole[20:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_layers_with_frequencies_of_their_own(kind: str) -> None:
    """Gemma 3: the layers with a window keep their frequencies, the others are scaled."""
    rope = {"full_attention": {**_BASE, **SCALINGS[kind]}, "sliding_attention": {**_BASE, "rope_type": "default"}}
    model = (
        load("tests/models/zoo.py")
        .DECODERS["gemma3"]
        .build(
            rope_parameters=rope, max_position_embeddings=TRAINED, layer_types=["sliding_attention", "full_attention"]
        )
    )
    lm = qc.compile_causal_lm(model, max_seq_len=LENGTH, chunk=16)
    ours = lm.conversation().read(TEXT, logits="all")[0]
    theirs = of_transformers(model, TEXT)
    assert close(ours[:TRAINED], theirs[:TRAINED]) and close(ours[TRAINED:], theirs[TRAINED:])
