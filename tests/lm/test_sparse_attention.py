"""Layers that choose by an index of their own which tokens they attend to (DeepSeek's sparse attention)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import qcompiler as qc
from qcompiler.lm.compile import example_inputs
from qcompiler.lm.step import prepared

MODELS = ("DeepseekV32", "GlmMoeDsa", "HYV4", "Dots3Note", "MiniMaxM3VL")
CHOSEN = 6
"""Keys that a token attends to, of up to 40. With few heads of the index, scores of zero would be equal, and which of
equal ones is taken is nobody's rule."""
SIZES: Any = {
    "vocab_size": 199, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16, "n_group": 2, "topk_group": 1, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "index_head_dim": 16, "index_n_heads": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip


OWN: dict[str, Any] = {"Dots3Note": {
    "layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 4, "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 32, "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "shared_experts_intermediate_size": 32,
}, "MiniMaxM3VL": {
    "layer_types": ["minimax_m3_sparse", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    "dense_intermediate_size": 96, "shared_intermediate_size": 32, "num_local_experts": 4, "head_dim": 16,
    "num_key_value_heads": 2, "rotary_dim": 8, "index_n_heads": 2, "index_block_size": 3, "index_topk_blocks": 3,
}}  # fmt: skip
"""Dots 3: its other layers have a window, and heads of other sizes. MiniMax M3 chooses blocks of keys for each group of
heads: three blocks of three keys."""


def build(name: str, chosen: int = CHOSEN) -> Any:
    torch.manual_seed(0)
    kind = f"{name}TextConfig" if name in OWN else f"{name}Config"
    config = getattr(transformers, kind)(index_topk=chosen, **{**SIZES, **OWN.get(name, {})})
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def logits_of(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_for_sequences_of_different_lengths(name: str, batch: int) -> None:
    check(build(name), batch, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "limit"), [({"device": "sim:0"}, 1e-5), ({"kv_cache": "int8"}, 0.1)])
def test_other_devices_and_caches(options: dict[str, Any], limit: float) -> None:
    check(build("DeepseekV32"), 1, limit, **options)


def check(model: Any, batch: int, limit: float, **options: Any) -> None:
    lm = qc.compile_causal_lm(model, max_seq_len=40, max_batch=batch, chunk=5, **options)
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 199, length).tolist() for length in ((20,) if batch == 1 else (7, 1, 20))]
    held = lm.conversation(batch)
    whole = held.read(prompts, logits="all")
    steps = held.read([[5], [6], [7]][:batch])
    for i, prompt in enumerate(prompts):
        held.truncate(len(prompt) - 1, i)
    again = held.read([prompt[-1:] for prompt in prompts], logits="all")
    for i, prompt in enumerate(prompts):
        theirs = logits_of(model, [*prompt, 5 + i])
        ours = np.concatenate([whole[i], steps[i]])
        assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)
        assert np.allclose(again[i], whole[i][-1:], atol=1e-4), "a conversation that was shortened goes on"


def called(model: Any, ids: list[int], parts: tuple[int, ...], cache: Any = None) -> Any:
    """The logits of a step that is called without a compiler, for so many tokens at once."""
    with prepared(model, 1, 40, cache, 40, 8) as step, torch.no_grad():
        found, start = [], 0
        for count in parts:
            inputs = example_inputs(1, 40, 8)
            places = torch.arange(start, start + count)[None]
            inputs |= {"ids": torch.tensor([ids[start : start + count]]), "positions": places, "rows": places}
            found.append(step(**(inputs | {"wanted": torch.arange(count)}))[0].numpy())
            start += count
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cache"), [*((name, "int4") for name in MODELS), ("DeepseekV32", "fp8")])
def test_a_narrow_cache_is_that_of_the_step_in_torch_and_is_saved(name: str, cache: str, tmp_path: Path) -> None:
    """Keys and values of short vectors are kept in few bits; the keys of the index keep the model's type."""
    model = build(name)
    ids = np.random.default_rng(3).integers(2, 199, 20).tolist()
    lm = qc.compile_causal_lm(model, max_seq_len=40, chunk=5, kv_cache=cache)
    held = lm.conversation()
    ours = held.read(ids, logits="all")[0]
    wanted = called(model, ids, (5, 5, 5, 5), cache)
    assert np.linalg.norm(ours - wanted) <= 1e-3 * np.linalg.norm(wanted), "a code at a border may be the next one"
    plain = logits_of(model, ids)
    assert np.linalg.norm(ours - plain) > 1e-3 * np.linalg.norm(plain), "the cache is narrow"
    lm.save(tmp_path / "model.qca")
    held.save(tmp_path / "talk.npz")
    loaded = qc.load_causal_lm(tmp_path / "model.qca")
    other = loaded.conversation()
    assert np.array_equal(other.read(ids, logits="all")[0], ours)
    assert loaded.cache_report() == lm.cache_report()
    other.reset()
    other.restore(tmp_path / "talk.npz")
    assert np.array_equal(other.read([5]), held.read([5])), "the keys of the index are saved with a conversation"
