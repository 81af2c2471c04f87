"""Layers with a sliding window keep a ring of rows: their tokens and logits are those of transformers and of a whole
cache, over texts that are much longer than the window."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from by_path import load
from transformers import GptOssConfig, GptOssForCausalLM, Qwen2Config, Qwen2ForCausalLM

import qcompiler as qc
from qcompiler.errors import CorruptFileError
from qcompiler.lm.model import checked
from qcompiler.lm.probe import LayerShape, Probe, ring_rows, shows_window
from qcompiler.lm.record import LanguageModel
from qcompiler.plan.kinds.attention import AttentionKernel

VOCABULARY, LENGTH = 199, 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "max_position_embeddings": 512,
}  # fmt: skip
PROMPTS = [11, 90, 3]
"""Tokens of the prompts: near the window, far beyond it, and fewer."""


@cache
def model(name: str, window: int) -> Any:
    torch.manual_seed(5)
    if name == "gpt_oss":
        config: Any = GptOssConfig(**_SIZES, head_dim=16, sliding_window=window, num_local_experts=4,
                                   num_experts_per_tok=2, attn_implementation="eager")  # fmt: skip
        made = GptOssForCausalLM(config)
    elif name == "qwen2":
        config = Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=window, max_window_layers=1)
        made = Qwen2ForCausalLM(config)
    else:
        zoo = load("tests/models/zoo.py")
        made = zoo.DECODERS[name].build(sliding_window=window)
    for parameter in made.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 and name in ("gpt_oss", "qwen2") else 1)
    return made.eval()


@cache
def compiled(
    name: str, window: int, chunk: int, batch: int = 1, device: str = "cpu", kv_cache: Any = "auto"
) -> qc.CausalLM:
    return qc.compile_causal_lm(
        model(name, window), max_seq_len=LENGTH, chunk=chunk, max_batch=batch, device=device, kv_cache=kv_cache
    )


def prompts(batch: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(2, VOCABULARY, length).tolist() for length in PROMPTS[:batch]]


def theirs(name: str, window: int, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(name, window)(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    return found


def distance(ours: Any, wanted: Any) -> float:
    return float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted))


def check(lm: qc.CausalLM, name: str, window: int, batch: int, tolerance: float = 1e-5) -> None:
    """Logits of prompts, and of five steps after them, beside transformers'."""
    held, texts = lm.conversation(batch), prompts(batch)
    whole = held.read(texts, logits="all")
    steps = [held.read([[5 + i] for i in range(batch)]) for _ in range(5)]
    for i, text in enumerate(texts):
        wanted = theirs(name, window, [*text, *[5 + i] * 5])
        ours = np.concatenate([whole[i], *(step[i] for step in steps)])
        assert distance(ours, wanted) <= tolerance


# --- what every run checks: one program ------------------------------------------------------------------------------

GEMMA = ("gemma3", 8, 7, 3)


def test_sequences_of_different_lengths_have_the_logits_of_transformers() -> None:
    check(compiled(*GEMMA), "gemma3", 8, 3)


def test_only_the_layer_with_a_window_keeps_a_ring_and_the_bytes_say_so() -> None:
    lm = compiled(*GEMMA)
    record = lm.record
    assert (record.window, record.ring, record.ring_layers) == (8, 16, (0,))
    sizes = {arena.name: arena.nbytes for arena in lm.run.plan.arenas if arena.kind == "state"}
    row = 4 * 2 * 16  # fp32, two heads of 16
    assert sizes["state.keys_0"] == sizes["state.values_0"] == 3 * 16 * row
    assert sizes["state.keys_1"] == sizes["state.values_1"] == 3 * (LENGTH + 7) * row
    rings = [kernel.body for kernel in lm.run.plan.kernels if isinstance(kernel.body, AttentionKernel)]
    assert {(body.ring, body.window, body.mask) for body in rings} == {(True, 8, "none"), (False, None, "none")}
    assert lm.program is not None
    report = str(lm.program.report())
    assert "a ring of 16 rows for each sequence" in report and "its window is 8 tokens" in report
    assert "layers 0: a ring of 16 rows (window 8)" in lm.cache_report()
    assert f"layers 1: {LENGTH + 7} rows" in lm.cache_report()


def test_truncate_reads_again_what_the_ring_has_lost() -> None:
    held, (short, text, _) = compiled(*GEMMA).conversation(3), prompts(3)
    held.read([short, text, []])
    for length in (89, 40, 8, 1, 0):
        held.truncate(length, 1)
        assert held.tokens == [short, text[:length], []]
        ours = held.read([[], [9], []])[1][0]
        assert distance(ours, theirs("gemma3", 8, [*text[:length], 9])[-1]) <= 1e-5
        held.truncate(length, 1)
    ours = held.read([[7], [], []])[0][0]
    assert distance(ours, theirs("gemma3", 8, [*short, 7])[-1]) <= 1e-5


def test_truncate_within_the_ring_reads_nothing() -> None:
    held, (_, text, _) = compiled(*GEMMA).conversation(1), prompts(3)
    held.read(text[:40])
    for token in text[40:48]:
        held.read([token])
    held._read = None  # type: ignore[method-assign, assignment]  # a call of it would fail
    held.truncate(39)  # the ring has the keys of 48 - 16 = 32 and later; position 39 sees 32
    with pytest.raises(TypeError):
        held.truncate(38)


def test_forked_and_restored_conversations_go_on_alike(tmp_path: Path) -> None:
    lm = compiled(*GEMMA)
    held, texts = lm.conversation(3), prompts(3)
    held.read(texts)
    other, again = held.fork(), lm.conversation(3)
    held.save(tmp_path / "talk.npz")
    again.restore(tmp_path / "talk.npz")
    wanted = held.read([[4], [5], [6]])
    for each in (other, again):
        assert each._kept[1] == 90 - 16
        for ours, one in zip(each.read([[4], [5], [6]]), wanted, strict=True):
            assert ours.tobytes() == one.tobytes()
        each.truncate(20, 1)
        assert distance(each.read([[], [9], []])[1][0], theirs("gemma3", 8, [*texts[1][:20], 9])[-1]) <= 1e-5
    with np.load(tmp_path / "talk.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "kept"}
    np.savez(tmp_path / "forgot.npz", **kept)
    with pytest.raises(CorruptFileError, match="which keys its caches still have"):
        again.restore(tmp_path / "forgot.npz")


def test_a_saved_program_keeps_its_rings_and_a_wrong_record_is_refused(tmp_path: Path) -> None:
    lm = compiled(*GEMMA)
    lm.save(tmp_path / "model.qca")
    loaded = qc.load_causal_lm(tmp_path / "model.qca")
    assert loaded.record == lm.record and loaded.record.ring == 16
    wrong = (
        {"ring": 32}, {"ring": 48}, {"ring_layers": (1,)}, {"ring_layers": (0, 1)}, {"ring_layers": (0, 7)},
        {"ring": 0, "window": 0, "ring_layers": ()}, {"rows": LENGTH + 7 + 103}, {"rows": 2 * (LENGTH + 7)},
    )  # fmt: skip
    for change in wrong:
        record = msgspec.structs.replace(lm.record, **change)
        assert record.wrong() is None
        with pytest.raises(CorruptFileError, match="is not what language-model"):
            checked(record, lm.run, "x.qca")


@pytest.mark.parametrize(
    "change",
    [{"ring": 13}, {"ring": LENGTH}, {"ring_layers": (0, 0)}, {"ring_layers": ()}, {"window": 0},
     {"window": LENGTH + 1}, {"ring_layers": (-1,)}],
)  # fmt: skip
def test_a_record_whose_ring_cannot_be_is_refused(change: dict[str, Any]) -> None:
    record = LanguageModel(
        vocabulary=9, max_seq_len=LENGTH, max_batch=1, rows=LENGTH, chunk=7, cache_dtype="float32", window=8, ring=16,
        ring_layers=(0,),
    )  # fmt: skip
    assert record.wrong() is None
    assert msgspec.structs.replace(record, **change).wrong() is not None


def test_a_window_is_believed_only_if_the_mask_shows_it() -> None:
    def window(width: int) -> Any:
        return lambda b, h, q, k: (k <= q) & (k > q - width)

    def chunks(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k // 8 == q // 8)

    def sinks(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((k > q - 8) | (k < 4))

    assert shows_window(window(8), 8, 200) and shows_window(window(1), 1, 2)
    assert not any(shows_window(rule, 8, 200) for rule in (window(7), window(9), chunks, sinks))


def test_ring_holds_the_window_of_the_first_token_of_a_call() -> None:
    for window in (1, 5, 8, 16, 4096):
        for chunk in (2, 7, 16, 512):
            assert window + chunk - 1 <= ring_rows(window, chunk) < window + chunk + 15


# --- the full run ----------------------------------------------------------------------------------------------------

SLOW = [
    (name, window, chunk, batch, device, kv_cache)
    for name, window, chunk, batch, device, kv_cache in (
        *(("mistral", window, chunk, 1, "cpu", "auto") for window in (8, 16, 5) for chunk in (3, 7, 16)),
        *(("mistral", window, 16, 3, "cpu", "auto") for window in (8, 16, 5)),
        *((name, 8, 7, batch, "cpu", "auto") for name in ("gemma2", "phi3", "qwen2", "gpt_oss") for batch in (1, 3)),
        ("gemma3", 8, 7, 3, "cpu", "int8"), ("gemma3", 8, 7, 1, "cpu", "fp16"), ("gemma2", 8, 7, 3, "cpu", "bf16"),
        ("gpt_oss", 8, 7, 3, "cpu", "int8"),
        ("gemma3", 8, 7, 3, "sim:0", "auto"), ("mistral", 16, 16, 1, "sim:0", "int8"),
        ("gemma3", 8, 7, 3, "cpu", "int4"), ("gpt_oss", 8, 7, 1, "cpu", "int4"),
        ("mistral", 16, 16, 1, "sim:0", "int4"),
        ("gemma2", 5, 7, 3, "sim:0", "fp16"),
    )
]  # fmt: skip
TOLERANCE = {"auto": 1e-5, "fp16": 4e-3, "bf16": 4e-2, "int8": 4e-2, "int4": 3e-1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window", "chunk", "batch", "device", "kv_cache"), SLOW)
def test_logits_are_those_of_transformers(
    name: str, window: int, chunk: int, batch: int, device: str, kv_cache: str
) -> None:
    lm = compiled(name, window, chunk, batch, device, kv_cache)
    assert lm.record.ring == ring_rows(window, chunk) < LENGTH
    check(lm, name, window, batch, TOLERANCE[kv_cache])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device"), [("mistral", "cpu"), ("gemma2", "cpu"), ("gpt_oss", "cpu"), ("gemma3", "sim:0")]
)
def test_tokens_are_those_of_a_whole_cache_and_replays_read_the_ring(name: str, device: str) -> None:
    rings = compiled(name, 8, 7, 3, device)
    whole = qc.compile_causal_lm(model(name, 8), max_seq_len=LENGTH, chunk=LENGTH, max_batch=3)
    assert not whole.record.ring and rings.record.ring
    assert rings.program is not None
    assert any(isinstance(each.body, AttentionKernel) and each.body.ring for each in rings.program.plan.kernels)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        texts = [text[:60] for text in prompts(3)]
        assert rings.generate(texts, max_new_tokens=30, **options) == whole.generate(
            texts, max_new_tokens=30, **options
        )


def test_no_layer_keeps_a_ring_if_one_with_a_window_cannot() -> None:
    """transformers makes one mask for all layers with a window, as long as the rows of one of them."""

    def rule(batch: Any, head: Any, queries: Any, keys: Any) -> Any:
        return (keys <= queries) & (keys > queries - 4) & (batch == head)

    shapes = {layer: LayerShape(2, 32, 32, torch.float32) for layer in range(3)}
    seen = Probe(shapes=shapes, uses={0: [(4, rule)], 1: [(4, None)], 2: [(None, rule)]})
    assert seen.windows(40) == {} and "layer 1 has a window" in seen.reasons[0]
    seen = Probe(shapes=shapes, uses={0: [(4, rule)], 1: [(64, None)], 2: [(None, rule)]})
    assert seen.windows(40) == {0: 4}
