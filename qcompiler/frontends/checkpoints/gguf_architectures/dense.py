"""GGUF's architectures of decoders with RMS norms and gated MLPs: Llama and its relatives."""

from __future__ import annotations

from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import INSIDE, Architecture, rows_of_pairs
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    FREQUENCIES,
    LONGROPE,
    Keys,
    attention_bias,
    biases,
    even_heads,
    heads_of,
    layer_types,
    longrope,
    partial_rope,
    rms_options,
    rope_of,
    rope_of_windows,
    share,
    sizes,
    turned,
    whole_heads,
    wholly_turned,
    window,
)


def _mistral(keys: Keys) -> dict[str, Any]:
    return rms_options(keys) | {"sliding_window": keys.count("attention.sliding_window")}


def _llama(keys: Keys) -> dict[str, Any]:
    return rms_options(keys) | biases(keys)


def qwen2(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "Qwen2ForCausalLM")
    return {**sizes(keys, heads, width), "rope_parameters": rope_of(keys)}


def qwen3(keys: Keys) -> dict[str, Any]:
    return rms_options(keys) | attention_bias(keys)


def _olmo2(keys: Keys) -> dict[str, Any]:
    return {**_olmo_sizes(keys), "rope_parameters": rope_of(keys)}


def _olmo3(keys: Keys) -> dict[str, Any]:
    return {**_olmo_sizes(keys), **layer_types(keys, 4), "rope_parameters": rope_of_windows(keys)}


def _olmo_sizes(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "Olmo2ForCausalLM")
    return sizes(keys, heads, width)


def granite(keys: Keys) -> dict[str, Any]:
    """Granite, with experts too: every sum is scaled."""
    heads, dim, width = even_heads(keys, "GraniteForCausalLM")
    wholly_turned(keys, dim)
    keys.refuse("rope.scaling.finetuned", True)  # llama.cpp rotates nothing where it is false
    return {**biases(keys), **sizes(keys, heads, width), **granite_factors(keys, dim)}


def granite_factors(keys: Keys, dim: int) -> dict[str, Any]:
    """What Granite's sums are multiplied with, and its positions. `dim` is the size of a head."""
    return {  # as in llama.cpp, a factor of 0 is none
        "attention_multiplier": keys.fp32("attention.scale", 0.0) or dim**-0.5,
        "embedding_multiplier": keys.fp32("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": keys.fp32("residual_scale", 1.0) or 1.0,
        "logits_scaling": keys.fp32("logit_scale", 1.0),
        "rope_parameters": rope_of(keys),
    }


def _smollm3(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "SmolLM3ForCausalLM")
    rest = {"no_rope_layer_interval": 4, "rope_parameters": rope_of(keys)}  # llama.cpp's rule for every file of it
    return {**biases(keys), **sizes(keys, heads, width), **rest}


def _bitnet(keys: Keys) -> dict[str, Any]:
    """BitNet. llama.cpp's rule for every file of it is SiLU; no key says with what a model was trained."""
    heads, width = whole_heads(keys, "BitNetForCausalLM")
    return {**sizes(keys, heads, width), "hidden_act": "silu", "rope_parameters": rope_of(keys)}


def _seed_oss(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


def _ernie(keys: Keys) -> dict[str, Any]:
    return rms_options(keys) | {"use_bias": keys.has_tensor("blk.0.attn_q.bias")}


def phi3(keys: Keys) -> dict[str, Any]:
    """Phi-3 and Phi-4, with experts too."""
    heads, dim, width = even_heads(keys, "Phi3ForCausalLM")
    rotated = turned(keys, dim)
    rope = {**rope_of(keys, reads=("attn_factor", "longrope")), "partial_rotary_factor": share(rotated, dim)}
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    rope |= longrope(keys, rotated, original)
    return {
        **sizes(keys, heads, width),
        **window(keys),
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
    }


def _exaone4(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "Exaone4ForCausalLM")
    return {**sizes(keys, heads, width), **layer_types(keys, 4), "rope_parameters": rope_of(keys)}


def _glm(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    sections = keys.metadata.get(f"{keys.architecture}.rope.dimension_sections")
    if isinstance(sections, list | tuple) and any(sections[:2]):
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.rope.dimension_sections is {shown(sections)}: language models with "
            "positions of images (GLM-4V) are not read from GGUF files; compile their folder"
        )
    return {
        **sizes(keys, heads, width),
        "head_dim": dim,
        **attention_bias(keys),
        "rope_parameters": partial_rope(keys, dim),
    }


def _apertus(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "ApertusForCausalLM")
    return {**sizes(keys, heads, width), **attention_bias(keys), "rope_parameters": rope_of(keys)}


def _ministral3(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    rope = rope_of(keys, reads=("yarn_log_multiplier",) if keys.text("rope.scaling.type") == "yarn" else ())
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    rope |= {"llama_4_scaling_beta": keys.fp32("attention.temperature_scale", 0.0)}
    rope.setdefault("original_max_position_embeddings", original)
    if keys.has("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": keys.fp32("rope.scaling.yarn_log_multiplier")}
    return {**sizes(keys, heads, width), "head_dim": dim, "rope_parameters": rope}


def _minicpm3(keys: Keys) -> dict[str, Any]:
    heads, rank = keys.count("attention.head_count"), keys.count("attention.kv_lora_rank")
    key_dim = keys.rows("blk.0.attn_q_b.weight") // heads
    turned_dim = turned(keys, key_dim)
    plain = key_dim - turned_dim
    if plain < 1:
        raise WeightsError(f"{keys.file.path}: queries of {key_dim} are too short for {turned_dim} rotated numbers")
    rope = rope_of(keys, reads=("attn_factor", "longrope"))
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    return {
        **sizes(keys, heads, keys.count("embedding_length")),
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned_dim,
        "qk_nope_head_dim": plain,
        "v_head_dim": keys.rows("blk.0.attn_kv_b.weight") // heads - plain,
        "scale_emb": 12,  # llama.cpp's rule for every file of this architecture, as the next two
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": rope | longrope(keys, turned_dim, original),
    }


def _hrm(keys: Keys) -> dict[str, Any]:
    """HRM-Text: two stacks of layers that a token passes several times. A file's blocks are the passes of layers."""
    found, stack = rms_options(keys), keys.count("hrm.layers_per_stack")
    high, low = keys.count("hrm.h_cycles"), keys.count("hrm.l_cycles")
    if found["num_hidden_layers"] != stack * high * (low + 1):
        raise WeightsError(
            f"{keys.file.path}: {high} cycles of {low} and 1 passes of {stack} layers are not the "
            f"{found['num_hidden_layers']} blocks that {keys.architecture}.block_count gives"
        )
    del found["num_key_value_heads"]  # the class has as many as query heads
    return found | {
        "num_hidden_layers": stack,  # the class counts the passes itself
        "H_cycles": high,
        "L_cycles": low,
        "embedding_scale": keys.fp32("embedding_scale", 1.0),
        "prefix_lm": False,  # prompts are read as texts are: no token sees a later one
    }


def hrm_names(keys: Keys) -> Architecture:
    """HRM-Text's names: the low stack is the file's first tensors, and the high stack those behind them."""
    stack, top = keys.count("hrm.layers_per_stack"), dict(_HRM_TOP)
    keys.blocks()  # bounds the stack, which `_hrm` compares with it
    for block in range(min(2 * stack, len(keys.file.tensors))):
        module = f"model.{'LH'[block // stack]}_module.layers.{block % stack}"
        top |= {f"{module}.{inside}": f"blk.{block}.{part}" for inside, part in _HRM_INSIDE.items()}
    return Architecture("HrmTextForCausalLM", "HrmTextConfig", _hrm, top=top, whole=_HRM_WHOLE)


LATENT_INSIDE = INSIDE | {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
"""Attention that keeps one short vector for keys and values of all heads (DeepSeek's)."""
_OLMO_INSIDE = INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_SEED_INSIDE = INSIDE | {"post_attention_layernorm": "post_attention_norm"}
_PHI_INSIDE = INSIDE | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GLM_INSIDE = INSIDE | {
    "mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
_HUNYUAN_INSIDE = INSIDE | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_APERTUS_INSIDE = INSIDE | {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"}
_HRM_TOP = {"model.embed_tokens": "token_embd", "lm_head": "output"}
_HRM_INSIDE = INSIDE | {"self_attn.gate_proj": "attn_gate"}
_HRM_WHOLE = {"model.z_L_init": ("hrm.z_l_init",)}
_XIELU = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")}

MISTRAL = Architecture("MistralForCausalLM", "MistralConfig", _mistral, rows=rows_of_pairs, beside=FREQUENCIES)
OLMO3 = Architecture("Olmo3ForCausalLM", "Olmo3Config", _olmo3, inside=_OLMO_INSIDE)
DENSE = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _llama, rows=rows_of_pairs, beside=FREQUENCIES),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", qwen2, beside=FREQUENCIES),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", qwen3, beside=FREQUENCIES),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", _olmo2, inside=_OLMO_INSIDE),
    "arcee": Architecture("ArceeForCausalLM", "ArceeConfig", _llama, rows=rows_of_pairs, beside=FREQUENCIES),
    "seed_oss": Architecture("SeedOssForCausalLM", "SeedOssConfig", _seed_oss, inside=_SEED_INSIDE),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "Ernie4_5Config", _ernie),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", granite, rows=rows_of_pairs, beside=FREQUENCIES),
    "smollm3": Architecture("SmolLM3ForCausalLM", "SmolLM3Config", _smollm3, rows=rows_of_pairs, beside=FREQUENCIES),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", phi3, inside=_PHI_INSIDE, beside=LONGROPE),
    "exaone4": Architecture("Exaone4ForCausalLM", "Exaone4Config", _exaone4, inside=_OLMO_INSIDE, beside=FREQUENCIES),
    "chatglm": Architecture("GlmForCausalLM", "GlmConfig", _glm, inside=_GLM_INSIDE),
    "glm4": Architecture("Glm4ForCausalLM", "Glm4Config", _glm, inside=_GLM_INSIDE | {
        "post_attention_layernorm": "ffn_norm"}),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", qwen3, inside=_HUNYUAN_INSIDE),
    "apertus": Architecture(
        "ApertusForCausalLM", "ApertusConfig", _apertus, inside=_APERTUS_INSIDE, in_keys=_XIELU, beside=FREQUENCIES),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM", "MiniCPM3Config", _minicpm3, inside=LATENT_INSIDE, beside=LONGROPE),
    "bitnet": Architecture(
        "BitNetForCausalLM", "BitNetConfig", _bitnet,
        inside=INSIDE | {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    ),
    "hrm_text": Architecture("HrmTextForCausalLM", "HrmTextConfig", _hrm),  # `hrm_names` adds a file's layers
    "mistral3": Architecture("Ministral3ForCausalLM", "Ministral3Config", _ministral3, rows=rows_of_pairs),
}  # fmt: skip
"""By `general.architecture`."""
