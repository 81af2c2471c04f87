"""Layers that pool blocks of tokens (DeepSeek V4, Qwen 4): results are transformers', however a text is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import load

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.lm import pooled, probe, states
from qcompiler.lm.compile import example_inputs
from qcompiler.lm.step import prepared

models = load("tests/support/state_models.py")

VOCABULARY, END = 97, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 128, "eos_token_id": END,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV4": ("DeepseekV4Config", {
        "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 32, "index_head_dim": 16,
        "index_topk": 3, "sliding_window": 5, "n_routed_experts": 4, "partial_rotary_factor": 0.5, "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["sliding_attention", "heavily_compressed_attention", *2 * ["compressed_sparse_attention"]],
        "num_hash_layers": 1, "hc_sinkhorn_iters": 3}),
    "Qwen4Exp": ("Qwen4ExpTextConfig", {
        "num_key_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32, "num_experts": 4, "hc_count": 2,
        "layer_types": 2 * ["linear_attention", "indexed_attention"], "hc_lowrank": 16, "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 101, "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 8, "indexer_compress_ratio": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True}}),
    "Glm5Next": ("Glm5NextTextConfig", {
        "intermediate_size": 96, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_group": 1, "topk_group": 1, "index_head_dim": 16, "index_n_heads": 32, "index_topk": 8, "index_kpool": 4,
        "linear_head_dim": 16, "linear_num_heads": 4, "hc_mult": 2, "layer_types": [
            "linear_attention", *3 * ["indexed_attention"]],
        "indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", *3 * ["sparse"]]}),
}  # fmt: skip
"""Indexes choose 3 entries (DeepSeek V4) or 2 (the others) of up to 21. With few heads, scores of zero would be equal,
and which of equal ones is taken is nobody's rule."""
_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
    "projection_intermediate_size": 32,
}  # fmt: skip
"""The part of GLM 5 Next that reads images, which no call here asks for."""
RATES = {"DeepseekV4": {1: 8, 2: 4, 3: 4}, "Qwen4Exp": {1: 4, 3: 4}, "Glm5Next": {1: 4, 3: 4}}
LENGTHS = (7, 64, 1)

_built: dict[str, Any] = {}


def build(name: str, **changed: Any) -> Any:
    """A model with weights of a fixed seed. Tests share it."""
    if changed or name not in _built:
        kind, options = MODELS[name]
        options = {**options, **changed}
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**_SIZES, **options)
        task = "ForCausalLM"
        if name == "Glm5Next":
            task = "ForConditionalGeneration"
            config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=_VISION)
        model: Any = getattr(transformers, f"{name}{task}")(config).eval().float()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if ".visual." not in path:
                    parameter.normal_(std=0.15 if parameter.ndim > 1 else 0.4)
            for path, buffer in model.named_buffers():
                if path.endswith("tid2eid"):  # the experts of each token, in the layers that do not ask a router
                    buffer.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(VOCABULARY)]))
        if changed:
            return model
        _built[name] = model
    return _built[name]


def prompt_of(length: int, seed: int = 3) -> list[int]:
    """Tokens with ends of text among them: n-grams do not reach over those."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, length)
    ids[5::13] = END
    return list(map(int, ids))


def logits_of(model: Any, ids: Sequence[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def assert_same(ours: Any, theirs: Any, limit: float = 1e-5) -> None:
    assert theirs.std() > 0.3, "logits that all are alike would show nothing"
    assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)


def called(model: Any, ids: Sequence[int], parts: Sequence[int], cache: Any = None) -> Any:
    """The logits of a step that is called without a compiler, for so many tokens at once."""
    length, chunk = 48, max(parts)
    with prepared(model, 1, length, cache, length, chunk) as step, torch.no_grad():
        found, start = [], 0
        for count in parts:
            inputs = example_inputs(1, length, chunk, counts=True)
            places = torch.arange(start, start + count)[None]
            inputs |= {"ids": torch.tensor([ids[start : start + count]]), "positions": places, "rows": places}
            inputs |= {"wanted": torch.arange(count), "counts": torch.tensor([count])}
            found.append(step(**inputs)[0].numpy())
            start += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "parts",
    [
        (1, 2, 3, 4, 7, 8, 9, 14),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((48,), (1,) * 48, (5,) * 9, (16, 16, 16), (3, 45))),
    ],
    ids=str,
)
def test_a_step_computes_what_transformers_does_however_a_text_is_cut(name: str, parts: tuple[int, ...]) -> None:
    """Calls that begin and end inside of blocks, complete none, one or many, and are shorter than a window."""
    model, ids = build(name), prompt_of(48)[: sum(parts)]
    assert_same(called(model, ids, parts), logits_of(model, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_has_every_number(name: str, tmp_path: Path) -> None:
    """Heads of GLM 5 Next have no columns that are rotated, which its configuration calls a head_dim of 0."""
    model = build(name)
    model.save_pretrained(tmp_path)
    tensors = qc.from_checkpoint(tmp_path).weights.tensors
    assert set(tensors) == set(model.state_dict())
    for path, tensor in model.state_dict().items():
        assert torch.equal(tensors[path].view(), tensor), path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changed"), [
    ("Qwen4Exp", {"indexer_compress_ratio": 1, "indexer_budget": 3}),
    ("Glm5Next", {"index_kpool": 1, "index_topk": 3}),
    ("Qwen4Exp", {"indexer_compress_ratio": 16, "indexer_budget": 16}),
    ("DeepseekV4", {"compress_rates": {"compressed_sparse_attention": 1, "heavily_compressed_attention": 47}}),
    ("DeepseekV4", {"compress_rates": {"compressed_sparse_attention": 64, "heavily_compressed_attention": 64}}),
])  # fmt: skip
def test_blocks_of_one_token_and_blocks_that_no_text_fills(name: str, changed: dict[str, Any]) -> None:
    model, ids = build(name, **changed), prompt_of(48)
    theirs = logits_of(model, ids)
    for parts in ((1,) * 48, (5,) * 9 + (3,), (48,)):
        assert_same(called(model, ids, parts), theirs)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_a_row_for_each_block_and_the_columns_of_one_window(name: str) -> None:
    """Keys that are values too are kept once, and compressed layers keep no more keys than their window shows."""
    model = build(name)
    with prepared(model, 1, 1000, None, 1000, 20) as step:
        held = {path: buffer.shape for path, buffer in step.named_buffers(recurse=False)}
        rates = RATES[name]
        entries = {layer: {1000 // rate + 2} for layer, rate in rates.items()}
        found: dict[int, set[int]] = {}
        for path, shape in held.items():
            if path.startswith("entries_"):
                found.setdefault(int(path.split("_")[1]), set()).add(shape[1])
        assert found == entries
        if name == "DeepseekV4":
            assert not [path for path in held if path.startswith("values_")]
            assert {held[f"keys_{layer}"][1] for layer in range(4)} == {probe.ring_rows(5, 20)}
            assert held["conv_1_0"] == (1, 2 * 32, 7), "keys and gates of a block, but for its last token"
            assert held["conv_2_0"] == (1, 2 * 64, 7), "two series over two blocks"
        elif name == "Qwen4Exp":
            assert held["keys_1"][1] == 1000
            assert held["conv_1_0"] == (1, 32, 3)
            assert held["conv_0_2"] == (1, 2), "two tokens before"
        else:
            assert held["conv_1_0"] == (1, 2 * 16, 3), "keys and gates"
            assert "conv_2_0" not in held, "its layer takes the choice of the one before"


@pytest.mark.parametrize(("name", "count"), [("DeepseekV4", 5), ("Qwen4Exp", 2), ("Glm5Next", 2 + 3)])
def test_the_models_own_functions_are_back_after_a_step(name: str, count: int) -> None:
    """Three compressors and two indexes; two indexes; two indexes and the masks of three layers."""
    model = build(name)

    def changed() -> list[Any]:
        return [each for each in model.modules() if {"forward", "build_attention_mask_from_topk"} & set(vars(each))]

    with prepared(model, 1, 16, None, 16, 4):
        assert len(changed()) == count
    assert not changed()


@pytest.mark.parametrize(("rows", "count"), [*itertools.product((1, 5, 9), (1, 3, 9, 20))])
def test_best_takes_the_highest_of_those_that_are_seen(rows: int, count: int) -> None:
    torch.manual_seed(rows)
    scores, seen = torch.randn(2, 4, rows), torch.rand(2, 4, rows) > 0.4
    found = pooled.best(scores, seen, count)
    for score, may, chosen in zip(scores.view(-1, rows), seen.view(-1, rows), found.view(-1, rows), strict=True):
        order = sorted((i for i in range(rows) if may[i]), key=lambda i: -float(score[i]))
        assert set(chosen.nonzero().flatten().tolist()) == set(order[:count])


def test_an_index_without_the_tokens_behind_its_last_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens would see nothing, of which transformers makes a mean over all keys."""
    model = build("Glm5Next")
    for module in model.modules():
        if hasattr(module, "index_kpool"):
            monkeypatch.setattr(module, "index_kpool_always_select_tail", False)
    with pytest.raises(ExportError, match="shows no key to a text's first tokens"):
        qc.compile_causal_lm(model, max_seq_len=16)


def test_whole_numbers_that_begin_with_no_known_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Qwen4Exp")
    embedding = model.model.layers[0].ple.ple_embedding
    monkeypatch.setattr(embedding, "layer_idx", 0)
    assert probe._token_before_a_text(model, states.StateShape("conv", 0, 2, (2,), torch.int64)) == END
    with pytest.raises(ExportError, match=r"layer 1 .* keeps whole numbers \(int64\), and no module of it says with"):
        probe._token_before_a_text(model, states.StateShape("conv", 1, 2, (2,), torch.int64))


# --- compiled ---------------------------------------------------------------------------------------------------------

_compiled: dict[tuple[str, int, str], qc.CausalLM] = {}


def compiled(name: str, batch: int = 1, device: str = "cpu") -> qc.CausalLM:
    key = (name, batch, device)
    if key not in _compiled:
        _compiled[key] = qc.compile_causal_lm(build(name), max_seq_len=84, max_batch=batch, chunk=6, device=device)
    return _compiled[key]


def prompts_of(batch: int) -> list[list[int]]:
    """64 tokens, or prompts of 7, 64 and 1 tokens."""
    return [prompt_of(length, length) for length in (LENGTHS[1:2] if batch == 1 else LENGTHS)]


several = pytest.mark.parametrize("batch", [1, 3])
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@several
@each_model
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, batch: int, device: str) -> None:
    model, lm, prompts = build(name), compiled(name, batch, device), prompts_of(batch)
    count = 16 if device == "cpu" else 4
    models.check_texts(model, lm, prompts, count, lambda ours, text: assert_same(ours, logits_of(model, text)))


@pytest.mark.slow
@each_model
def test_a_sequence_that_reads_nothing_keeps_its_entries(name: str) -> None:
    """What the other sequences read in between changes no bit of its logits."""
    lm, prompts = compiled(name, 3), prompts_of(3)
    together, alone = lm.conversation(3), lm.conversation(3)
    for held in (together, alone):
        held.read(prompts)
    nothing: list[int] = []
    together.read([nothing, prompt_of(9), nothing])
    together.read([nothing, [6], [7]])
    for ids in ([9, 8], [4], [5, 3, 6, 6, 7, 8, 9]):
        ours, theirs = (each.read([ids, nothing, nothing])[0] for each in (together, alone))
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
@several
@each_model
def test_conversations_are_shortened_forked_saved_and_restored(name: str, batch: int, tmp_path: Path) -> None:
    model, lm, prompts = build(name), compiled(name, batch), prompts_of(batch)
    held = lm.conversation(batch)
    held.read(prompts)
    cut = min(1, batch - 1)
    held.truncate(22, sequence=cut)
    other, third = held.fork(), lm.conversation(batch)
    held.save(tmp_path / "held.npz")
    wanted = held.read([[11 + i] for i in range(batch)])
    for i, prompt in enumerate(prompts):
        assert_same(wanted[i], logits_of(model, [*(prompt[:22] if i == cut else prompt), 11 + i])[-1:])
    third.restore(tmp_path / "held.npz")
    for conversation in (other, third):
        for one, again in zip(wanted, conversation.read([[11 + i] for i in range(batch)]), strict=True):
            assert np.array_equal(one, again)
    lm.save(tmp_path / "model.qca")
    loaded = qc.load_causal_lm(tmp_path / "model.qca")
    assert loaded.generate(prompts[0], max_new_tokens=5) == lm.generate(prompts[0], max_new_tokens=5)
    assert "a row for each block of tokens" in loaded.cache_report() == lm.cache_report()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["fp32", "bf16", "fp16", "int8", "fp8", "int4"])
@each_model
def test_a_narrow_cache_is_that_of_the_step_in_torch(name: str, cache: str) -> None:
    """Entries keep the model's type, whatever keys and values have."""
    from qcompiler.lm.compile import CACHE_TYPES

    model, ids = build(name), prompt_of(36)
    lm = qc.compile_causal_lm(model, max_seq_len=48, chunk=6, kv_cache=cache)  # type: ignore[arg-type]
    ours = lm.conversation().read(ids, logits="all")[0]
    plain = logits_of(model, ids)
    far = np.linalg.norm(ours - plain) / np.linalg.norm(plain)
    assert far <= 1e-5 if cache == "fp32" else 1e-5 < far < 0.3, f"{cache}: {far:.2e}"
    in_torch = called(model, ids, (6,) * 6, CACHE_TYPES[cache])
    near = np.abs(ours - in_torch).max(-1) <= 1e-3 * np.abs(in_torch).max()
    assert near[:8].all() and near.mean() > 0.5, "an index may choose another block where a code is the next one"


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "nf4", "q4_K"])
@each_model
def test_recipes_of_weights(name: str, quant: str) -> None:
    """Logits of quantised weights are near the float model's while the chosen blocks are all of them."""
    model, ids = build(name), prompt_of(8)
    lm = qc.compile_causal_lm(model, quant, max_seq_len=16, chunk=6)
    ours, plain = lm.conversation().read(ids, logits="all")[0], logits_of(model, ids)
    far = np.linalg.norm(ours - plain) / np.linalg.norm(plain)
    assert 1e-5 < far < (0.1 if quant == "int8" else 0.6), far
    assert math.isfinite(far)
