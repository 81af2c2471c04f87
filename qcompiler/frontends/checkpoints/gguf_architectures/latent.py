"""GGUF's architectures of decoders whose keys and values come from short vectors: DeepSeek's, and their relatives."""

from __future__ import annotations

import math
from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    LATENT,
    WHOLE,
    Architecture,
    factor_of_latent_norms,
)
from qcompiler.frontends.checkpoints.gguf_architectures.dense import LATENT_INSIDE
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    Keys,
    experts_of,
    layer_types,
    rope_of,
    rope_of_windows,
    routing,
    sizes,
    turned,
)
from qcompiler.frontends.checkpoints.gguf_architectures.mixtures import (
    SHARED_EXPERTS,
    grouped_experts,
    mlp_types,
    scaled_groups,
)


def latent_heads(keys: Keys) -> dict[str, Any]:
    """The sizes of heads whose keys and values come from one short vector."""
    dim = keys.count("attention.key_length_mla")
    rotated = turned(keys, dim)
    if rotated == dim:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.attention.key_length_mla leaves nothing beside {rotated} rotated "
            "numbers"
        )
    return {
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": dim - rotated,
        "v_head_dim": keys.count("attention.value_length_mla"),
    }


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2, V3, and models that compute as V3 does (GLM 4.7 Flash, Kimi K2, Youtu, which has no experts).

    llama.cpp's key_length is that of its own attention over compressed vectors; the model's is key_length_mla.
    """
    heads = keys.count("attention.head_count")
    keys.refuse("attention.temperature_scale", 0)
    found = {
        **sizes(keys, heads, keys.count("embedding_length")),
        **latent_heads(keys),
        "num_key_value_heads": heads,
        "attention_bias": keys.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        "rope_parameters": _log_yarn(keys),
    }
    if not keys.count("expert_count", 0, least=0):
        return found | {"first_k_dense_replace": keys.model_layers()}
    return found | grouped_experts(keys)


def _deepseek_v2(keys: Keys) -> dict[str, Any]:
    """V2, whose files may lack the key of the router's scores."""
    routing(keys, "softmax")
    groups = keys.count("expert_group_count", 1)
    return _deepseek2(keys) | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _indexer_types(keys: Keys) -> list[str] | None:
    """Whether each layer has an index ("full") or takes the choice of the layer before ("shared"). None without the
    key."""
    choosing = keys.flags("attention.indexer.types")
    if choosing is None:
        return None
    return ["full" if chooses else "shared" for chooses in choosing[: keys.model_layers()]]


def _glm_dsa(keys: Keys) -> dict[str, Any]:
    """GLM DSA computes as DeepSeek V3.2 does, and layers without an index take the choice of the layer before."""
    return _deepseek_v32(keys) | {"indexer_types": _indexer_types(keys)}


def _hy_v4(keys: Keys) -> dict[str, Any]:
    """HY V4: the attention of GLM DSA with sinks and gates, and several streams beside one another.

    Its rotary positions are transformers': halves of the rotated numbers are rotated, where llama.cpp rotates pairs of
    neighbours of the same rows.
    """
    layers, limits = keys.model_layers(), keys.layers(f"{keys.architecture}.swiglu_clamp_exp", float) or [0.0]
    if len(set(limits[:layers])) > 1:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.swiglu_clamp_exp' is {shown(limits)}; transformers' model "
            "has one limit for the experts of all layers"
        )
    return _deepseek_v32(keys) | {
        **mlp_types(keys),
        "indexer_types": _indexer_types(keys) or ["full"] * layers,
        "swiglu_limit": limits[0] if limits[0] > 0 else math.inf,
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_eps": keys.fp32("hyper_connection.epsilon"),
        "hc_magnitude": keys.fp32("hyper_connection.magnitude"),
    }


def _index(keys: Keys) -> dict[str, Any]:
    """The sizes of the index by which a layer chooses tokens."""
    return {
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
    }


def _deepseek_v32(keys: Keys) -> dict[str, Any]:
    """DeepSeek V3.2, whose layers choose by an index which tokens they attend to."""
    routing(keys, "sigmoid")
    return _deepseek2(keys) | _index(keys)


def _dots3_note(keys: Keys) -> dict[str, Any]:
    """dots.3 note: layers with an index, and layers with a window, which have latent heads of other sizes."""
    routing(keys, "sigmoid")
    types, heads = layer_types(keys, 4, required=True), keys.counts("attention.head_count")
    of_windows = [kind == "sliding_attention" for kind in types["layer_types"]]
    choosing = keys.flags("attention.indexer.types")
    if choosing is not None and choosing[: len(of_windows)] != [not each for each in of_windows]:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.attention.indexer.types' is {shown(choosing)}; the layers "
            "of this architecture have an index where they have no window"
        )
    of_kind = [{each for each, has in zip(heads, of_windows, strict=False) if has is kind} for kind in (False, True)]
    if max(map(len, of_kind)) > 1:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.attention.head_count' is {shown(heads)}, and not one "
            "number for the layers with a window and one for the others"
        )
    wide, narrow = ((each or {max(heads)}).pop() for each in of_kind)
    latent, rotated = latent_heads(keys), turned(keys, keys.count("attention.key_length_mla"))
    dim = keys.count("attention.key_length_mla_swa", least=rotated + 1)
    return {
        **sizes(keys, wide, keys.count("embedding_length")),
        **experts_of(keys, "n_routed_experts"),
        **scaled_groups(keys),
        **mlp_types(keys),
        **_index(keys),
        **latent,
        "num_key_value_heads": wide,
        "head_dim": rotated,  # the configuration class divides by it, and multiplies again
        "layer_types": ["sliding_attention" if each else "indexed_attention" for each in of_windows],
        "sliding_window": types["sliding_window"],
        "swa_num_attention_heads": narrow,
        "swa_num_key_value_heads": narrow,
        "swa_q_lora_rank": latent["q_lora_rank"],
        "swa_kv_lora_rank": keys.count("attention.kv_lora_rank_swa"),
        "swa_head_dim": dim,
        "swa_qk_nope_head_dim": dim - rotated,
        "swa_qk_rope_head_dim": rotated,
        "swa_v_head_dim": keys.count("attention.value_length_mla_swa"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "shared_experts_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "rope_parameters": {
            "indexed_attention" if kind == "full_attention" else kind: rope
            for kind, rope in rope_of_windows(keys).items()
            if kind == "full_attention" or True in of_windows
        },
    }


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    if keys.count("expert_count", 0, least=0):
        routing(keys, "sigmoid")
    return _deepseek2(keys) | {"rope_interleave": True}


def _log_yarn(keys: Keys) -> dict[str, Any]:
    """YaRN with DeepSeek's factor of attention; files hold a tenth of it, times mscale."""
    rope = rope_of(keys, reads=("yarn_log_multiplier",) if keys.text("rope.scaling.type") == "yarn" else ())
    multiplier = keys.fp32("rope.scaling.yarn_log_multiplier", 0.0)
    return rope | ({"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier} if multiplier else {})


_LATENT_INSIDE = LATENT_INSIDE | SHARED_EXPERTS
_CHOOSING_INSIDE = _LATENT_INSIDE | {
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
}  # fmt: skip
"""Attention to the tokens that an index chooses (DeepSeek V3.2)."""
_LATENT_WHOLE = {**WHOLE, LATENT: ("attn_k_b.weight", "attn_v_b.weight")}
_STREAMS_WHOLE = {
    **_LATENT_WHOLE,
    **{
        f"{kind}_hc.{part}": (f"hc_{kind}_{part}.weight",)
        for kind in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"model.hc_head.hc_{part}": (f"output_hc_{part}.weight",) for part in ("fn", "base", "scale")},
}
"""Several streams beside one another, which layers mix (HY V4)."""
_NOTE_INSIDE = _CHOOSING_INSIDE | {
    "self_attn.k_rope_only_layernorm": "attn_k_norm", "self_attn.g_proj": "attn_gate",
}  # fmt: skip

DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM", "DeepseekV2Config", _deepseek_v2, inside=_LATENT_INSIDE, whole=_LATENT_WHOLE
)
LATENTS = {
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", _deepseek_v3, inside=_LATENT_INSIDE, whole=_LATENT_WHOLE),
    "deepseek32": Architecture(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", _deepseek_v32, inside=_CHOOSING_INSIDE, whole=_LATENT_WHOLE),
    "glm-dsa": Architecture(
        "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _glm_dsa, inside=_CHOOSING_INSIDE, whole=_LATENT_WHOLE),
    "hy_v4": Architecture(
        "HYV4ForCausalLM", "HYV4Config", _hy_v4, inside=_CHOOSING_INSIDE | {"self_attn.gate_proj": "attn_gate"},
        whole=_STREAMS_WHOLE,
    ),
    "dots3note": Architecture(
        "Dots3NoteForCausalLM", "Dots3NoteTextConfig", _dots3_note, inside=_NOTE_INSIDE, whole=_LATENT_WHOLE,
        factor=factor_of_latent_norms,
    ),
}  # fmt: skip
"""By `general.architecture`."""
