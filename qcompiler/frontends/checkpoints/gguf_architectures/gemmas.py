"""GGUF's architectures of Gemma 1 to 4."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import INSIDE, TOP, WHOLE, Architecture
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    FREQUENCIES,
    ROPE_FACTORS,
    Keys,
    divisors,
    heads_of,
    layer_types,
    rms_options,
    rope_of,
    sizes_of_layers,
)

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's models of 27 B scale queries by the width per head, the others by the head's dim; no key says which, and
llama.cpp tells them apart by the number of layers."""


def _gemma(keys: Keys) -> dict[str, Any]:
    return rms_options(keys)


def _gemma2(keys: Keys) -> dict[str, Any]:
    found = rms_options(keys, reads=("freq_base_swa",) if keys.architecture == "gemma3" else ())
    is_27b = found["num_hidden_layers"] == _LAYERS_OF_27B.get(keys.architecture)
    return found | {
        "query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"] if is_27b else found["head_dim"],
        **(layer_types(keys, 2) if keys.has("attention.sliding_window") else {"sliding_window": 4096}),
        "attn_logit_softcapping": keys.fp32("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.fp32("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    found = _gemma2(keys)
    rope = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", 10000.0))}
    return found | {
        "attn_logit_softcapping": None,
        **_softcap(keys),
        **layer_types(keys, 6, required=True),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": rope},
    }


def _local_and_global(keys: Keys) -> dict[str, Any]:
    """Layer types (every fifth layer has no window), rotary bases, shared layers and per-layer inputs."""
    keys.refuse("nextn_predict_layers", 0)
    base = {"rope_type": "default", "rope_theta": keys.fp32("rope.freq_base_swa", 10000.0)}
    full = rope_of(keys, reads=("freq_base_swa",))
    return layer_types(keys, 5, required=True) | {
        "rope_parameters": {"full_attention": full, "sliding_attention": base},
        "num_kv_shared_layers": keys.count("attention.shared_kv_layers", least=0),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0, least=0),
    }


def _per_layer_vocabulary(keys: Keys) -> dict[str, Any]:
    if not keys.has_tensor("per_layer_token_embd.weight"):
        return {}
    return {"vocab_size_per_layer_input": keys.rows("per_layer_token_embd.weight")}


def _gemma3n(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    scales = keys.layers(f"{keys.architecture}.activation_sparsity_scale", float) or []
    return {
        **sizes_of_layers(keys, heads, width),
        **_local_and_global(keys),
        **_per_layer_vocabulary(keys),
        "head_dim": dim,
        "final_logit_softcapping": keys.fp32("final_logit_softcapping", 30.0),
        "altup_num_inputs": keys.count("altup.num_inputs"),
        "altup_active_idx": keys.count("altup.active_idx", 0, least=0),
        "laurel_rank": keys.rows("blk.0.laurel_l.weight"),
        # the file holds how many deviations above the mean a number must be, transformers the share of those below
        "activation_sparsity_pattern": [_share_below(scale) for scale in scales] or None,
    }


def _share_below(scale: float) -> float:
    """The share of a normal distribution below so many deviations, with the digits that fp32 holds."""
    found = NormalDist().cdf(scale)
    return round(found, 6) if 0 < round(found, 6) < 1 else found


def _gemma4(keys: Keys) -> dict[str, Any]:
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    found = _local_and_global(keys)
    groups = keys.counts("attention.head_count_kv")
    kinds = dict(zip(found["layer_types"], groups, strict=True))
    local = kinds.get("sliding_attention", groups[-1])
    wide = keys.counts("feed_forward_length")
    own = found["layer_types"][: len(wide) - found["num_kv_shared_layers"]]  # layers with keys of their own
    whole = [layer for layer, kind in enumerate(own) if kind == "full_attention"]
    rope = found["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "default" or found["layer_types"][-1] != "full_attention":
        raise WeightsError(
            f"{keys.file.path}: Gemma 4 has no scaling of positions ({rope['rope_type']}), and its last layer has no "
            f"window ({found['layer_types'][-1]})"
        )
    rope |= {"rope_type": "proportional"}
    found["rope_parameters"]["full_attention"] = rope | {"partial_rotary_factor": _share_of_ones(keys)}
    return {
        **sizes_of_layers(keys, heads, width),
        **found,
        **_per_layer_vocabulary(keys),
        "num_key_value_heads": local,
        "num_global_key_value_heads": kinds.get("full_attention", local),
        "head_dim": keys.count("attention.key_length_swa"),
        "global_head_dim": keys.count("attention.key_length"),
        "attention_k_eq_v": any(not keys.has_tensor(f"blk.{layer}.attn_v.weight") for layer in whole),
        "use_double_wide_mlp": wide[-1] == 2 * wide[0],
        **_softcap(keys),
        **_gemma4_experts(keys),
    }


def _softcap(keys: Keys) -> dict[str, Any]:
    """The soft cap of logits, which is none without the key."""
    key = "final_logit_softcapping"
    return {key: keys.fp32(key) if keys.has(key) else None}


def _gemma4_experts(keys: Keys) -> dict[str, Any]:
    if not keys.has_tensor("blk.0.ffn_gate_inp.weight"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": keys.count("expert_count"),
        "top_k_experts": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
    }


def _share_of_ones(keys: Keys) -> float:
    """The share of frequencies that rotate: the file divides them by 1, and the others by 1e30: no rotation."""
    if not keys.has_tensor(ROPE_FACTORS):
        return 1.0
    values = divisors(keys.file, ROPE_FACTORS)
    count = int((values == 1).sum())
    plain = (values[:count] == 1).all() and (values[count:] > 1e29).all()
    if len(values) * 2 != keys.count("attention.key_length") or not plain:
        raise WeightsError(f"'{ROPE_FACTORS}' in {keys.file.path} scales frequencies, which this architecture does not")
    return count / len(values)


_GEMMA_INSIDE = INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_PER_LAYER_TOP = TOP | {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
_PER_LAYER_INSIDE = _GEMMA_INSIDE | {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_GEMMA_3N_INSIDE = _PER_LAYER_INSIDE | {
    "altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
}  # fmt: skip
_GEMMA_3N_WHOLE = {**WHOLE, "altup.correct_output_scale": ("altup_correct_scale.weight",)}
_ALTUP = {
    "model.altup_projections": "altup_proj.weight", "model.altup_unembed_projections": "altup_unembd_proj.weight",
}  # fmt: skip
_GEMMA_4_INSIDE = _PER_LAYER_INSIDE | {
    "router.proj": "ffn_gate_inp", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
}  # fmt: skip
_GEMMA_4_WHOLE = {
    **WHOLE,
    "experts.gate_up_proj": WHOLE["mlp.experts.gate_up_proj"],
    "experts.down_proj": WHOLE["mlp.experts.down_proj"],
    "layer_scalar": ("layer_output_scale.weight",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
}

GEMMAS = {
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", _gemma, one_in_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", _gemma2, inside=_GEMMA_INSIDE, one_in_norms=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", _gemma3, inside=_GEMMA_INSIDE, one_in_norms=True),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", "Gemma3nTextConfig", _gemma3n, top=_PER_LAYER_TOP, inside=_GEMMA_3N_INSIDE,
        whole=_GEMMA_3N_WHOLE, stacked=_ALTUP,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "Gemma4TextConfig", _gemma4, top=_PER_LAYER_TOP, inside=_GEMMA_4_INSIDE,
        whole=_GEMMA_4_WHOLE, beside=FREQUENCIES,
    ),
}  # fmt: skip
"""By `general.architecture`."""
