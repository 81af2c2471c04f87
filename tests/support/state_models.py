"""Small random models of transformers with states beside keys and values, by `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8,
    "num_hidden_layers": 3,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_DELTA = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {**_SIZES, **_HEADS, **_CONVOLVED}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SIZES, **_HEADS, **_CONVOLVED, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {**_SIZES, **_HEADS, **_CONVOLVED, **_TOKENS}),
    "mamba": ("MambaConfig", _MAMBA),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "mamba2": ("Mamba2Config", {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        "JambaConfig",
        {
            **_SIZES, **_HEADS, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
            "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**_SIZES, **_HEADS, **_MAMBA_2, "mamba_d_ssm": 128, "num_hidden_layers": 2}),
    "bamba": ("BambaConfig", {**_SIZES, **_HEADS, **_MAMBA_2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES, **_HEADS, **_MAMBA_2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_SIZES, **_HEADS, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": 16,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig", {**_SIZES, **_HEADS, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_SIZES, **_HEADS, **_DELTA}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **_SIZES, **_DELTA, "num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_key_heads": 4,
            "linear_key_head_dim": 12, "linear_value_head_dim": 24, "pad_token_id": 0,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 32,
            "num_local_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **_TOKENS,
        },
    ),
    "zamba": (
        "ZambaConfig",
        {
            **_SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 8,
            "mamba_dt_rank": 4, "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 16,
            "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 8, "adapter_rank": 4, "use_mem_rope": True,
            "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
    ),
    "zaya": (
        "ZayaConfig",
        {
            **_SIZES, **_HEADS, "head_dim": 16, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 1,
            "moe_intermediate_size": 32, "router_hidden_size": 32, "sliding_window": 16, **_TOKENS,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        },
    ),
}  # fmt: skip
"""The configuration's class, and its values."""


def build(name: str) -> Any:
    """The model, with weights of a fixed seed."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def small() -> Any:
    """One layer of Mamba: a window of a convolution and a recurrence, no keys and values."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def check_texts(
    model: Any, lm: Any, prompts: list[list[int]], count: int, check: Callable[[Any, list[int]], None]
) -> None:
    """Prompts that are read together, then three tokens one by one: `check` gets the logits
    and the text of each. Then `count` greedy tokens, which are transformers'."""
    held = lm.conversation(len(prompts))
    whole = held.read(prompts, logits="all")
    steps = [held.read([[5 + i] for i in range(len(prompts))]) for _ in range(3)]
    for i, prompt in enumerate(prompts):
        check(np.concatenate([whole[i], *(step[i] for step in steps)]), [*prompt, *[5 + i] * 3])
    texts = lm.generate(prompts, max_new_tokens=count, eos_token_id=-1)
    for prompt, text in zip(prompts, texts, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert text == made[0].tolist()
