"""GGUF's architectures of models whose layers keep other states than keys and values."""

from __future__ import annotations

from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import Architecture
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    Keys,
    experts_of,
    heads_of,
    rope_of,
    routing,
    wholly_turned,
)


def _lfm2(keys: Keys) -> dict[str, Any]:
    """LFM 2: a layer without heads of keys is a short convolution."""
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    full, layers = f"{keys.architecture}.attention.head_count_kv", keys.model_layers()
    of_layers = (keys.layers(full, int) or [])[:layers]
    counts = {each for each in of_layers if each}
    if len(counts) != 1 or min(counts) < 1 or dim * heads != width:
        raise WeightsError(
            f"{keys.file.path}: the key '{full}' is {shown(of_layers)}; LFM 2 has one number of heads for all layers "
            f"with attention, 0 for the others, and {heads} heads as wide as the model"
        )
    keys.refuse("attention.sliding_window", 0)
    return {
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": counts.pop(),
        "max_position_embeddings": keys.count("context_length"),
        "norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if each else "conv" for each in of_layers],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": False,
        "rope_parameters": rope_of(keys),
    }


def _lfm2_dense(keys: Keys) -> dict[str, Any]:
    return _lfm2(keys) | {"block_auto_adjust_ff_dim": False}  # the file has the width that there is


def _lfm2_moe(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    return _lfm2(keys) | {
        **experts_of(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_dense_layers": keys.count("leading_dense_block_count", 0, least=0),
        "use_expert_bias": True,  # llama.cpp's rule for every file of this architecture, as the next two
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_TOP = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"}
_INSIDE = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
_WHOLE = {
    "feed_forward.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "feed_forward.experts.down_proj": ("ffn_down_exps.weight",),
    "feed_forward.expert_bias": ("exp_probs_b.bias",),
}

HYBRIDS = {
    "lfm2": Architecture("Lfm2ForCausalLM", "Lfm2Config", _lfm2_dense, top=_TOP, inside=_INSIDE),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", "Lfm2MoeConfig", _lfm2_moe, top=_TOP, inside=_INSIDE, whole=_WHOLE),
}
"""By `general.architecture`."""
