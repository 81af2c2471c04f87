"""GGUF's architectures of decoders with mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from qcompiler.errors import WeightsError
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    INSIDE,
    WHOLE,
    Architecture,
    rows_of_pairs,
)  # fmt: skip
from qcompiler.frontends.checkpoints.gguf_architectures.dense import granite, phi3, qwen2, qwen3
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    FREQUENCIES,
    LONGROPE,
    Keys,
    attention_bias,
    expert_scale,
    experts_of,
    heads_of,
    layer_types,
    partial_rope,
    rms_options,
    rope_of,
    rope_of_windows,
    routing,
    share,
    sizes,
    sizes_beside_norms,
    sizes_of_layers,
    turned,
    whole_heads,
    wholly_turned,
    window,
)


def _mixtral(keys: Keys) -> dict[str, Any]:
    return rms_options(keys) | experts_of(keys, "num_local_experts") | window(keys)


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return qwen3(keys) | {
        **experts_of(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's rule for every file of this architecture
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return qwen2(keys) | {
        **experts_of(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp's rule for every file of this architecture
    }


def _olmoe(keys: Keys) -> dict[str, Any]:
    return qwen2(keys) | {
        **experts_of(keys, "num_experts"),
        "norm_topk_prob": False,  # llama.cpp's rule for every file of this architecture
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as gpt-oss was trained; no key says so
    return {
        **sizes(keys, heads, width),
        "head_dim": dim,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        **experts_of(keys, "num_local_experts"),
        **layer_types(keys, 2, required=True),
        **attention_bias(keys),
        "rope_parameters": rope,
    }


def sparse_from(keys: Keys) -> int:
    """The first layer with experts; without the key, the first that has a router."""
    if keys.has("leading_dense_block_count"):
        return keys.count("leading_dense_block_count", least=0)
    layers = range(keys.blocks())
    return next((each for each in layers if keys.has_tensor(f"blk.{each}.ffn_gate_inp.weight")), len(layers))


def mlp_types(keys: Keys) -> dict[str, Any]:
    """The layers with experts, as a list."""
    layers = keys.model_layers()
    first = min(sparse_from(keys), layers)
    return {"mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first)}


def scaled_groups(keys: Keys) -> dict[str, Any]:
    """The width of experts, the factor of their sum, and the groups that the router chooses from."""
    return {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "routed_scaling_factor": expert_scale(keys),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
    }


def grouped_experts(keys: Keys) -> dict[str, Any]:
    """DeepSeek's way of choosing experts, which Glm 4 and dots.llm1 share: shared experts, groups, scaled sums."""
    return {
        **experts_of(keys, "n_routed_experts"),
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": sparse_from(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        **scaled_groups(keys),
    }


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM 4.5 and 4.6, and Solar Open, which computes the same without dense layers."""
    routing(keys, "sigmoid")
    heads, dim, width = heads_of(keys)
    return {
        **sizes_beside_norms(keys, heads, width, wide="expert_feed_forward_length"),
        **grouped_experts(keys),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "head_dim": dim,
        **attention_bias(keys),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "rope_parameters": partial_rope(keys, dim),
    }


def _dots1(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * keys.model_layers()}
    return rms_options(keys) | grouped_experts(keys) | whole | attention_bias(keys)


def _ernie_moe(keys: Keys) -> dict[str, Any]:
    routing(keys, "softmax")
    return rms_options(keys) | {
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "moe_num_experts": keys.count("expert_count"),
        "moe_k": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.count("expert_shared_count", 0, least=0),
        "moe_layer_start_index": sparse_from(keys),
        "moe_layer_end_index": -1,
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


def _exaone_moe(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    return rms_options(keys) | {
        **experts_of(keys, "num_experts"),
        **mlp_types(keys),
        **layer_types(keys, 4, required=True),
        "num_shared_experts": keys.count("expert_shared_count", 1),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        **scaled_groups(keys),
    }


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return granite(keys) | experts_of(keys, "num_local_experts")


def _granite_shared(keys: Keys) -> dict[str, Any]:
    return _granite_moe(keys) | {"shared_intermediate_size": keys.count("expert_shared_feed_forward_length")}


def _granite_windows(keys: Keys) -> dict[str, Any]:
    found = granite(keys) | layer_types(keys, 4, whole_first=True, required=True)
    has_positions = keys.layers(f"{keys.architecture}.attention.rope_pattern", bool)
    if has_positions is not None:  # transformers takes a base of 0 for none
        theta = found["rope_parameters"]["rope_theta"]
        found["layer_rope_theta"] = [theta if each else 0.0 for each in has_positions]
    return found


def _granite_moe_windows(keys: Keys) -> dict[str, Any]:
    shared = keys.count("expert_shared_feed_forward_length", 0, least=0)
    return _granite_windows(keys) | experts_of(keys, "num_local_experts") | {"shared_intermediate_size": shared}


def _hunyuan_moe(keys: Keys) -> dict[str, Any]:
    return qwen3(keys) | {
        "num_experts": keys.count("expert_count"),
        "moe_topk": keys.count("expert_used_count"),
    }


def _hy_v3(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    keys.refuse("expert_weights_norm", True)
    wide = keys.count("expert_feed_forward_length")
    return rms_options(keys) | {
        **experts_of(keys, "num_experts"),
        **mlp_types(keys),
        "moe_intermediate_size": wide,
        "num_shared_experts": keys.count("expert_shared_feed_forward_length") // wide,
        "router_scaling_factor": expert_scale(keys),
    }


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    heads, dim, width = heads_of(keys)
    return {
        **sizes(keys, heads, width),
        **experts_of(keys, "num_local_experts"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "head_dim": dim,
        "rope_parameters": partial_rope(keys, dim),
    }


def _afmoe(keys: Keys) -> dict[str, Any]:
    routing(keys, "sigmoid")
    keys.refuse("expert_weights_norm", True)
    keys.refuse("attention.sliding_window_pattern", 4)  # llama.cpp's positions do not follow a pattern
    return rms_options(keys) | {
        **experts_of(keys, "num_experts"),
        **layer_types(keys, 4, required=True),
        "num_dense_layers": sparse_from(keys),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_shared_experts": keys.count("expert_shared_count"),
        "route_scale": expert_scale(keys),
        "mup_enabled": True,  # llama.cpp's rule for every file of this architecture
    }


def _phimoe(keys: Keys) -> dict[str, Any]:
    return phi3(keys) | {
        **experts_of(keys, "num_local_experts"),
        **attention_bias(keys),
        "lm_head_bias": keys.has_tensor("output.bias"),
    }


def _cohere2_moe(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    gating = "softmax" if keys.count("expert_gating_func", 2) == 1 else "sigmoid"
    routing(keys, gating)
    keys.refuse("expert_weights_scale", 0, 1)
    rms = keys.fp32("attention.layer_norm_rms_epsilon") if keys.has("attention.layer_norm_rms_epsilon") else None
    eps = {"rms_norm_eps": rms, "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon", rms or 1e-5)}
    return {
        **sizes_beside_norms(keys, heads, width),
        **experts_of(keys, "num_experts"),
        **mlp_types(keys),
        **layer_types(keys, 4, whole_first=True, required=True),
        **eps,
        "head_dim": dim,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": keys.count("feed_forward_length"),
        "num_shared_experts": keys.count("expert_shared_count", 0, least=0),
        "expert_selection_fn": gating,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "logit_scale": keys.fp32("logit_scale"),
        "rope_parameters": rope_of(keys),
    }


def _dbrx(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "DBRX")
    routing(keys, "softmax")
    keys.refuse("attention.layer_norm_epsilon", float(np.float32(1e-5)))
    keys.refuse("expert_weights_scale", 0, 1)
    rope = rope_of(keys)
    clip = keys.fp32("attention.clamp_kqv", 0.0)
    return {
        "d_model": width,
        "n_heads": heads,
        "n_layers": keys.model_layers(),
        "max_seq_len": keys.count("context_length"),
        "rope_parameters": rope,
        "attn_config": {
            "kv_n_heads": keys.count("attention.head_count_kv", heads),
            "clip_qkv": clip or float(np.finfo(np.float32).max),
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": keys.count("feed_forward_length"),
            "moe_num_experts": keys.count("expert_count"),
            "moe_top_k": keys.count("expert_used_count"),
            "moe_normalize_expert_weights": 1.0,  # llama.cpp's rule for every file of this architecture
        },
    }


def _llama4(keys: Keys) -> dict[str, Any]:
    """Llama 4. Every fourth layer sees all tokens and has no positions, as in every file of this architecture."""
    keys.refuse("attention.sliding_window", keys.count("attention.chunk_size", 8192))
    keys.refuse("attention.sliding_window_pattern")
    return rms_options(keys) | {
        **experts_of(keys, "num_local_experts"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.count("feed_forward_length"),
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step", 1),
        "attention_chunk_size": keys.count("attention.chunk_size", 8192),
        "use_qk_norm": keys.count("expert_count") != 128,  # llama.cpp's rule: Maverick has no norms of queries and keys
        "no_rope_layer_interval": 4,
    }


def _laguna(keys: Keys) -> dict[str, Any]:
    """Laguna, whose layers may have different numbers of query heads. The gate is a number per head or per element."""
    routing(keys, "sigmoid")
    heads, dim = keys.counts("attention.head_count"), keys.count("attention.key_length")
    rope = rope_of_windows(keys)
    for kind, key in (("full_attention", "rope.dimension_count"), ("sliding_attention", "rope.dimension_count_swa")):
        rope[kind]["partial_rotary_factor"] = share(turned(keys, dim, key), dim)
    keys.refuse("expert_weights_norm", True)
    types = layer_types(keys, 4, whole_first=True)
    return {
        **sizes(keys, max(heads), keys.count("embedding_length")),
        **experts_of(keys, "num_experts"),
        **mlp_types(keys),
        **{name: value for name, value in types.items() if value is not None},
        "num_attention_heads_per_layer": heads[: keys.model_layers()],
        "head_dim": dim,
        "gating": "per-head" if keys.rows("blk.0.attn_gate.weight") == heads[0] else "per-element",
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": expert_scale(keys),
        "rope_parameters": rope,
    }


def _mimo2(keys: Keys) -> dict[str, Any]:
    """MiMo V2, whose layers with a window have twice as many key/value heads.

    The model was trained with a window of so many tokens *before* each token (the remark in transformers' class), as
    the key says; llama.cpp counts the token itself among them, and so sees one token less.
    """
    routing(keys, "sigmoid")
    keys.refuse("expert_weights_norm", True)
    types, groups = layer_types(keys, 6, required=True), keys.counts("attention.head_count_kv")
    of_windows = [kind == "sliding_attention" for kind in types["layer_types"]]
    shared = {each // 2 if has else each for each, has in zip(groups, of_windows, strict=False)}
    if len(shared) > 1 or any(each % 2 for each, has in zip(groups, of_windows, strict=False) if has):
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.attention.head_count_kv is {groups}; layers with a window have "
            "twice as many as the others"
        )
    dim, rope = keys.count("attention.key_length"), rope_of_windows(keys)
    for each in rope.values():
        each["partial_rotary_factor"] = share(turned(keys, dim), dim)
    return {
        **sizes_of_layers(keys, keys.count("attention.head_count"), keys.count("embedding_length")),
        **mlp_types(keys),
        **types,
        **attention_bias(keys),
        **experts_of(keys, "n_routed_experts"),
        "num_key_value_heads": shared.pop(),
        "sliding_window": types["sliding_window"] + 1,
        "head_dim": dim,
        "v_head_dim": keys.count("attention.value_length", dim),
        "attention_value_scale": keys.fp32("attention.value_scale", 1.0),
        **scaled_groups(keys),
        "rope_parameters": rope,
    }


def _mellum(keys: Keys) -> dict[str, Any]:
    return rms_options(keys, reads=("freq_base_swa",)) | {
        **attention_bias(keys),
        **experts_of(keys, "num_experts"),
        **layer_types(keys, 4),
        "mlp_layer_types": ["sparse"] * keys.model_layers(),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's rule for every file of this architecture
        "rope_parameters": rope_of_windows(keys),
    }


SHARED_EXPERTS = {f"mlp.shared_experts.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")}
SHARED_INSIDE = INSIDE | {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_OSS_INSIDE = INSIDE | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_GROUPED_INSIDE = INSIDE | SHARED_EXPERTS
_GLM_INSIDE = _GROUPED_INSIDE | {"post_attention_layernorm": "post_attention_norm"}
GRANITE_INSIDE = INSIDE | {"block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.output_linear": "ffn_down_shexp"}
GRANITE_WHOLE = {
    **WHOLE,
    "block_sparse_moe.experts.gate_up_proj": WHOLE["mlp.experts.gate_up_proj"],
    "block_sparse_moe.experts.down_proj": WHOLE["mlp.experts.down_proj"],
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
}
_HUNYUAN_INSIDE = INSIDE | {
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm", "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
}  # fmt: skip
_AFMOE_INSIDE = _GROUPED_INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm", "self_attn.gate_proj": "attn_gate", "mlp.router.gate": "ffn_gate_inp",
}  # fmt: skip
_LLAMA4_INSIDE = INSIDE | {
    **{f"feed_forward.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
}
_LLAMA4_WHOLE = {
    **WHOLE,
    "feed_forward.experts.gate_up_proj": WHOLE["mlp.experts.gate_up_proj"],
    "feed_forward.experts.down_proj": WHOLE["mlp.experts.down_proj"],
}
_ERNIE_WHOLE = {**WHOLE, "mlp.gate.moe_statics.e_score_correction_bias": ("exp_probs_b.bias",)}
_AFMOE_WHOLE = {**WHOLE, "mlp.expert_bias": ("exp_probs_b.bias",)}
_HY_WHOLE = {**WHOLE, "mlp.e_score_correction_bias": ("exp_probs_b",)}
_MINIMAX_WHOLE = {**WHOLE, "mlp.e_score_correction_bias": ("exp_probs_b.bias",)}

_DBRX_TOP = {"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "lm_head": "output"}
_DBRX_INSIDE = {
    "norm_attn_norm.norm_1": "attn_norm", "norm_attn_norm.norm_2": "attn_output_norm",
    "norm_attn_norm.attn.Wqkv": "attn_qkv", "norm_attn_norm.attn.out_proj": "attn_output",
    "ffn.router.layer": "ffn_gate_inp",
}  # fmt: skip
_DBRX_WHOLE = {
    f"ffn.experts.mlp.{ours}": (f"ffn_{theirs}_exps.weight",)
    for ours, theirs in (("w1", "gate"), ("v1", "up"), ("w2", "down"))
}

MIXTRAL = Architecture("MixtralForCausalLM", "MixtralConfig", _mixtral, rows=rows_of_pairs, beside=FREQUENCIES)
GRANITE_SHARED = Architecture(
    "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", _granite_shared, inside=GRANITE_INSIDE,
    whole=GRANITE_WHOLE, rows=rows_of_pairs,
)  # fmt: skip
GRANITE_MOE_WINDOWS = Architecture(
    "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig", _granite_moe_windows, inside=GRANITE_INSIDE,
    whole=GRANITE_WHOLE, rows=rows_of_pairs,
)  # fmt: skip
MIXTURES = {
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _qwen3_moe),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _qwen2_moe, inside=SHARED_INSIDE),
    "olmoe": Architecture("OlmoeForCausalLM", "OlmoeConfig", _olmoe),
    "gpt-oss": Architecture("GptOssForCausalLM", "GptOssConfig", _gpt_oss, inside=_OSS_INSIDE, experts="alternating"),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "Glm4MoeConfig", _glm4_moe, inside=_GLM_INSIDE),
    "dots1": Architecture("Dots1ForCausalLM", "Dots1Config", _dots1, inside=_GROUPED_INSIDE),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", _ernie_moe, inside=_GROUPED_INSIDE, whole=_ERNIE_WHOLE),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", "ExaoneMoeConfig", _exaone_moe, inside=_GROUPED_INSIDE),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", _granite_moe, inside=GRANITE_INSIDE, whole=GRANITE_WHOLE,
        rows=rows_of_pairs,
    ),
    "granite_swa": Architecture("GraniteSWAForCausalLM", "GraniteSWAConfig", _granite_windows, rows=rows_of_pairs),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", _hunyuan_moe, inside=_HUNYUAN_INSIDE),
    "hy_v3": Architecture("HYV3ForCausalLM", "HYV3Config", _hy_v3, inside=_GROUPED_INSIDE, whole=_HY_WHOLE),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "MiniMaxM2Config", _minimax_m2, whole=_MINIMAX_WHOLE),
    "afmoe": Architecture("AfmoeForCausalLM", "AfmoeConfig", _afmoe, inside=_AFMOE_INSIDE, whole=_AFMOE_WHOLE),
    "phimoe": Architecture(
        "PhimoeForCausalLM", "PhimoeConfig", _phimoe, inside=INSIDE | {"mlp.router": "ffn_gate_inp"}, beside=LONGROPE),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", "Cohere2MoeConfig", _cohere2_moe, inside=_GROUPED_INSIDE),
    "llama4": Architecture(
        "Llama4ForCausalLM", "Llama4TextConfig", _llama4, inside=_LLAMA4_INSIDE, whole=_LLAMA4_WHOLE, experts="halves",
        beside=FREQUENCIES,
    ),
    "dbrx": Architecture(
        "DbrxForCausalLM", "DbrxConfig", _dbrx, layers="transformer.blocks.", top=_DBRX_TOP, inside=_DBRX_INSIDE,
        whole=_DBRX_WHOLE, experts="matrices",
    ),
    "laguna": Architecture(
        "LagunaForCausalLM", "LagunaConfig", _laguna, inside=_GROUPED_INSIDE | {"self_attn.g_proj": "attn_gate"}),
    "mellum": Architecture("MellumForCausalLM", "MellumConfig", _mellum),
    "mimo2": Architecture("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", _mimo2),
}  # fmt: skip
"""By `general.architecture`."""
