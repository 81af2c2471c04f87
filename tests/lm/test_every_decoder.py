"""Every class that transformers takes for a causal language model, as a step in torch, as a program and as a folder.

Configurations are transformers' defaults with small sizes.  What is not run here, and what is refused, stands by name
with its reason: a class that a new transformers brings fails until it runs or has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import load
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import qcompiler as qc
from qcompiler.errors import QCompilerError
from qcompiler.lm.compile import example_inputs, inputs_to_trace
from qcompiler.lm.step import prepared

VOCABULARY, LENGTH, CHUNK = 199, 40, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 128, "n_positions": 128, "sliding_window": 8,
    # widths and depths
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96,
    "num_hidden_layers": 6, "n_layer": 6, "n_layers": 6, "num_layers": 6, "decoder_layers": 6, "encoder_layers": 1,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention, and indexes that choose tokens
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 5, "index_topk_blocks": 2, "index_block_size": 3, "index_n_heads": 16, "index_head_dim": 16,
    # recurrences
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 8,
}  # fmt: skip
"""Taken where a configuration has a value of that name. Six layers have all kinds that a model mixes."""

_LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16}
_ROTATED: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_layers": 2}
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4",
         "minicpm3", "youtu"), _LATENT),
    "bailing_hybrid": {**_LATENT, "head_dim": 16, "num_experts": 16, "layer_group_size": 2, "n_group": 2},
    "bamba": {**_TWO_LAYERS, **_MAMBA_2, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        **_TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROTATED, "full_attention": _ROTATED}},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 16},
    "gemma3n_text": {
        **_TWO_LAYERS, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "global_head_dim": 16},
    "gpt_neo": {**_TWO_LAYERS, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_TWO_LAYERS, **_MAMBA_2, "layer_types": ["mamba", "attention"]},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY}, "inkling_text": {"unpadded_vocab_size": VOCABULARY},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 2},
    "lfm2_moe": {**_TWO_LAYERS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        **_LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 6, "zero_expert_num": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8},
    "minimax_m3_vl_text": {
        **_TWO_LAYERS, "layer_types": ["minimax_m3_sparse", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2},
    "zamba": {
        "num_hidden_layers": 6, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8,
        "layers_block_type": [
            "linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"]},
    "zamba2": {**_FOUR_LAYERS, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}  # fmt: skip

_IMAGES = "reads images or sound, too: the decoder inside has a class of its own, or tests/lm/test_multimodal.py has it"
_HAS_TEST = "its sizes depend on each other; tests/lm/{}.py runs it"
NOT_RUN: dict[str, str] = {
    **dict.fromkeys(
        ("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama",
         "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe",
         "qwen4_exp", "dots3_note"), _IMAGES),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts tokens for another model"),
    "dbrx": _HAS_TEST.format("test_gguf_models"),
    "dots3_note_text": _HAS_TEST.format("test_sparse_attention"),
    "kimi_linear": _HAS_TEST.format("test_states"),
    "qwen4_exp_text": _HAS_TEST.format("test_pooled"),
    "blt": "reads bytes in patches that a second model cuts",
    "reformer": "keeps hashes and hidden values, not keys, and is none without is_decoder",
    "xlm": "has no cache that transformers keeps for it", "xmod": "needs a language beside the tokens",
}  # fmt: skip

_LATER = "shows a token those that follow it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        _LATER),
    "cpmant": "if past_length != 0", "prophetnet": r"get_seq_length\(\) != 0",
    "gpt_neo": "mask of its own",
    "minimax": "uses cache of its own",
    **dict.fromkeys(("openai-gpt", "rwkv", "xlnet"), "hands neither keys and values nor states to a cache"),
    "recurrent_gemma": "keeps states in its modules",
    "xlstm": "takes a cache of transformers' common classes, not one of its own",
}  # fmt: skip
"""What the error says.  transformers has no static cache for any of them, or gives other logits with it."""

OTHER_PATH = ("zamba",)
"""Read one token by another formula of transformers', whose logits with its own static cache are 6e-3 from these, too.
A program is traced with several tokens."""

QUICK = ("jetmoe", "longcat_flash", "minimax_m3_vl_text", "zaya", "rembert")
COMPILED = ("jetmoe", "longcat_flash", "minimax_m3_vl_text", "zaya")


PATTERNS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2")
"""Kinds whose first two layers have no attention, which transformers' cache asks for, or whose list of layers has more
than two."""


def build(kind: str, **more: Any) -> Any:
    found = CLASSES[kind]
    made = transformers.CONFIG_MAPPING[kind]
    usual, renamed = made().to_dict(), getattr(made, "attribute_map", {})
    common = {name: value for name, value in SIZES.items() if name in usual and name not in renamed}
    torch.manual_seed(0)
    config = made(**common | OWN.get(kind, {}) | more)
    model: Any = getattr(transformers, found if isinstance(found, str) else found[0])(config).eval().float()
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e7, "a size is not small"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12)
    return model


def kinds(names: Any = CLASSES) -> list[Any]:
    """The cases of these model types, of which QUICK run always."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in names
        if name in CLASSES and name not in NOT_RUN
    ]


IDS = np.random.default_rng(3).integers(3, VOCABULARY, 23).tolist()


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def stepped(model: Any, parts: tuple[int, ...]) -> Any:
    """The logits of a step that reads so many tokens in each call."""
    found, start = [], 0
    with prepared(model, 1, LENGTH, None, LENGTH, CHUNK) as step, torch.no_grad():
        inputs_to_trace(step, LENGTH, CHUNK)
        for count in parts:
            places = torch.arange(start, start + count)[None]
            inputs = example_inputs(1, LENGTH, CHUNK, step.has_states)
            inputs |= {"ids": torch.tensor([IDS[start : start + count]]), "positions": places, "rows": places}
            inputs |= {"counts": torch.tensor([count])} if step.has_states else {}
            found.append(step(**(inputs | {"wanted": torch.arange(count)}))[0].numpy())
            start += count
    return np.concatenate(found)


@pytest.mark.parametrize("kind", kinds(name for name in CLASSES if name not in REFUSED))
def test_a_step_computes_what_transformers_does(kind: str) -> None:
    """Calls of several tokens, of which programs are traced, and of one, past the window of a layer that has one."""
    model = build(kind)
    theirs = logits_of(model)
    for parts in (8, 2, 5, 8), (7, 1, 1, 8, 1, 5):
        if parts[1] == 1 and kind in OTHER_PATH:
            continue
        ours = stepped(model, parts)
        assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs), parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in CLASSES if name not in (*REFUSED, *NOT_RUN)])
def test_a_program_computes_what_transformers_does(kind: str) -> None:
    """Compiled, of two layers where a model can be so small: a prompt in three calls, one of them of one token."""
    model = build(kind, **({} if kind in PATTERNS else _TWO_LAYERS))
    theirs = logits_of(model)
    text = qc.compile_causal_lm(model, max_seq_len=LENGTH, chunk=CHUNK, device="cpu").conversation()
    parts = (IDS[:8], IDS[8:]) if kind in OTHER_PATH else (IDS[:8], IDS[8:9], IDS[9:])
    ours = np.concatenate([text.read(part, logits="all")[0] for part in parts])
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("kind", kinds(REFUSED))
def test_what_is_refused_says_why(kind: str) -> None:
    with pytest.raises(QCompilerError, match=REFUSED[kind]):
        qc.compile_causal_lm(build(kind), max_seq_len=LENGTH)


@pytest.mark.parametrize("kind", kinds(name for name in CLASSES if name not in REFUSED))
def test_a_folder_has_every_number(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    tensors = qc.from_checkpoint(tmp_path).weights.tensors
    state = model.state_dict()
    head = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    tied = {name for name in state if name not in tensors}
    assert not [name for name in tensors if name not in state]
    assert all(any(state[name].data_ptr() == state[other].data_ptr() for other in tensors) for name in tied - head)
    for name in tensors:
        assert torch.equal(tensors[name].view().to(state[name].dtype), state[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_ones_read_sequences_of_different_lengths(kind: str, batch: int) -> None:
    load("tests/lm/test_architectures.py").check(build(kind, **_TWO_LAYERS), batch)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "cache"), [("cpu", "int8"), ("sim:0", "fp16"), ("cpu", "bf16")])
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_ones_run_on_other_devices_and_with_narrow_caches(kind: str, device: str, cache: Any) -> None:
    """A value of ZAYA depends on a state of the token before, which a narrow cache hid from the check of reads."""
    model = build(kind, **_TWO_LAYERS)
    lm = qc.compile_causal_lm(model, max_seq_len=LENGTH, chunk=CHUNK, device=device, kv_cache=cache)
    theirs = logits_of(model)
    far = np.linalg.norm(lm.conversation().read(IDS, logits="all")[0] - theirs) / np.linalg.norm(theirs)
    assert 1e-6 < far < 0.05, far


def test_every_name_that_is_listed_is_one_of_transformers() -> None:
    """An older transformers lacks some."""
    listed = {*OWN, *NOT_RUN, *REFUSED, *QUICK, *COMPILED, *OTHER_PATH}
    assert not set(NOT_RUN) & set(REFUSED)
    missing = [name for name in listed if name not in CLASSES]
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert not missing or version < (5, 23), f"not causal language models of transformers: {missing}"
