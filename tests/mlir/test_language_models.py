"""The third oracle for language models: upstream MLIR runs their calls, caches and draws.

Tolerances: sums in fp32 of K numbers in another order differ by about 2^-24 √K of their size, 10⁻⁶ for these models;
a few layers add up to less than ten times that.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import upstream_lm
from by_path import load

import qcompiler as qc
from qcompiler.ir.mlir_oracle import parses_in_mlir

causal, gguf, moe = (load(f"tests/lm/test_{name}.py") for name in ("causal_lm", "gguf_models", "moe"))
positions = load("tests/lm/test_positions.py")
architectures = load("tests/lm/test_architectures.py")
TOLERANCE = 1e-5
LENGTH, CHUNK = 56, 16

Options = dict[str, Any]
DRAWS: tuple[Options, ...] = (
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {101: 2.0}},
)


def near(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    assert ours.shape == theirs.shape
    return bool(np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs))


# --- compiled models -------------------------------------------------------------------------------------------------


@cache
def small(name: str) -> Any:
    return causal.model() if name == "tiny llama" else architectures.build(name)


COMPILED = [
    *(("tiny llama", quant, 1, "auto") for quant in ("int8", "q4_K", "nf4")),
    ("gpt2", None, 1, "auto"), ("qwen3", "q8_0", 2, "auto"), ("gemma3", "int8", 1, "auto"), ("llama", None, 1, "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "quant", "batch", "kv_cache"), COMPILED)
def test_texts_are_those_of_the_program(name: str, quant: str | None, batch: int, kv_cache: Any) -> None:
    """Logits of a prompt in pieces, greedy tokens, and draws with penalties: the states are what the text hands on."""
    lm = qc.compile_causal_lm(small(name), quant, max_seq_len=LENGTH, max_batch=batch, chunk=CHUNK, kv_cache=kv_cache)
    other, sessions = upstream_lm.run_upstream(lm)
    prompts = [list(causal.PROMPTS[0]), list(causal.PROMPTS[2])][:batch]
    for ours, theirs in zip(
        lm.conversation(batch).read(prompts, logits="all"), other.conversation(batch).read(prompts, logits="all"),
        strict=True,
    ):  # fmt: skip
        assert near(ours, theirs, 1e-5 if kv_cache == "auto" else 1e-2)  # a code of a cache may round the other way
    assert lm.generate(prompts, max_new_tokens=12) == other.generate(prompts, max_new_tokens=12)
    for options in DRAWS if name == "tiny llama" else ():
        assert lm.generate(prompts, max_new_tokens=12, **options) == other.generate(
            prompts, max_new_tokens=12, **options
        )
    assert {"prefill", "decode" if batch == 1 else "decode_batch"} <= set(sessions[1].calls)


def test_an_entry_point_has_fixed_sizes_and_names_its_states() -> None:
    lm = causal.compiled()
    whole, prefill = (lm.to_mlir("linalg", entry=entry, weights="arguments") for entry in (None, "prefill"))
    decode = lm.to_mlir("linalg", entry="decode", weights="arguments")
    assert "// Sizes are those of the entry point decode.\n" in decode.text
    assert "// Size s: from 1 to 16.\n" in prefill.text and "// Size s:" not in decode.text
    assert "%ids : tensor<1x1xi64>" in decode.text and "%ids : tensor<?x?xi64>" in whole.text
    assert {"keys_0", "values_0", "marks", "drawn"} <= set(decode.states) and "//   5: state keys_0\n" in decode.text
    parses_in_mlir(decode.text, upstream_only=True)


# --- every other decoder of the suite, without kernels ---------------------------------------------------------------


@pytest.mark.parametrize("name", architectures.names())
def test_decoders_of_the_zoo(name: str) -> None:
    model = small(name)
    tokens = np.random.default_rng(3).integers(2, 199, 13).tolist()
    assert near(upstream_lm.read(upstream_lm.lowered_decoder(model), tokens, 5), upstream_lm.logits_of(model, tokens))


OF_FILES = (
    "llama", "gpt-oss", "gemma3n", "gemma4 with heads of two sizes", "phimoe", "bloom", "apertus", "minicpm3",
)  # fmt: skip
"""Models of GGUF files that run here, a sample: the other 96 are exported in ten minutes and more. They are made of the
ops that test_oracle.py runs one by one."""


@pytest.mark.parametrize("name", OF_FILES)
def test_models_of_gguf_files(name: str, tmp_path: Path) -> None:
    """With the codes of the file, against transformers on the weights that they mean."""
    made = gguf.file_of(name, tmp_path / "model.gguf")
    ours = upstream_lm.read(upstream_lm.lowered_decoder(made.path), gguf.PROMPT, 5)
    assert near(ours, upstream_lm.logits_of(made.model, gguf.PROMPT))


@pytest.mark.parametrize("kind", moe.MODELS)
def test_mixtures_of_experts(kind: str) -> None:
    model = moe.build(kind)
    ours = upstream_lm.read(upstream_lm.lowered_decoder(model), gguf.PROMPT, 5)
    assert near(ours, upstream_lm.logits_of(model, gguf.PROMPT))


@pytest.mark.parametrize("scaling", ["default", "linear", "dynamic"])
def test_positions_beyond_the_trained_length(scaling: str) -> None:
    """The other scalings are tables of other numbers."""
    module = upstream_lm.lowered_decoder(positions.build(scaling), length=positions.LENGTH, chunk=24)
    ours = upstream_lm.read(module, positions.TEXT, 24)
    assert near(ours, upstream_lm.logits_of(positions.build(scaling), positions.TEXT), 2e-5)
