"""GGUF's architectures of decoders with layer norms: GPT-2 and its relatives, Command R, OLMo 1, and others."""

from __future__ import annotations

from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    INSIDE,
    Architecture,
    rows_by_part,
    rows_of_groups,
    rows_of_pairs,
)  # fmt: skip
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    Keys,
    attention_bias,
    biases,
    even_heads,
    heads_of,
    layer_types,
    partial_rope,
    rope_of,
    sizes_beside_norms,
    whole_heads,
    wholly_turned,
    window,
)

_STARCODER_INSIDE = INSIDE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_BLOOM_TOP = {
    "transformer.word_embeddings": "token_embd", "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm", "lm_head": "output",
}  # fmt: skip
_BLOOM_INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip
_PHI2_TOP = {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"}
_PHI2_INSIDE = INSIDE | {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_GPT2_TOP = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "lm_head": "output",
}  # fmt: skip
_GPT2_INSIDE = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_NEOX_TOP = {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "lm_head": "output"}
_NEOX_INSIDE = {
    "input_layernorm": "attn_norm", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip
_FALCON_TOP = {
    "transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output",
}  # fmt: skip
_FALCON_INSIDE = {
    "input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def _olmo(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "OlmoForCausalLM")
    clamp = {"clip_qkv": keys.fp32("attention.clamp_kqv")} if keys.has("attention.clamp_kqv") else {}
    return {**sizes_beside_norms(keys, heads, width), **clamp, "rope_parameters": rope_of(keys)}


def _cohere(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "CohereForCausalLM")
    return {
        **sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "logit_scale": keys.fp32("logit_scale"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        **attention_bias(keys),
        "rope_parameters": rope_of(keys),
    }


def _phi2(keys: Keys) -> dict[str, Any]:
    heads, dim, width = even_heads(keys, "PhiForCausalLM")
    return {
        **sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "rope_parameters": partial_rope(keys, dim),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    heads, dim, width = even_heads(keys, "StableLmForCausalLM")
    if keys.has_tensor("blk.0.attn_q_norm.weight"):
        raise WeightsError(
            f"{keys.file.path}: norms of each head (StableLM 2 12B) are not read from GGUF files; compile its folder"
        )
    return {
        **sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "rope_parameters": partial_rope(keys, dim),
    }


def _nemotron(keys: Keys) -> dict[str, Any]:
    heads, dim, width = even_heads(keys, "NemotronForCausalLM")
    return {
        **biases(keys),
        **sizes_beside_norms(keys, heads, width),
        "head_dim": dim,
        "norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "rope_parameters": partial_rope(keys, dim),
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "Starcoder2ForCausalLM")
    return {
        **sizes_beside_norms(keys, heads, width),
        "norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        **window(keys),
        "rope_parameters": rope_of(keys),
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    heads, _, width = even_heads(keys, "GPT2LMHeadModel")
    return {
        "n_embd": width,
        "n_inner": keys.count("feed_forward_length", 4 * width),
        "n_layer": keys.count("block_count"),
        "n_head": heads,
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
    }


def _neox(keys: Keys) -> dict[str, Any]:
    heads, dim, width = even_heads(keys, "GPTNeoXForCausalLM")
    return {
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": partial_rope(keys, dim),
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "FalconForCausalLM")
    groups, norms = keys.count("attention.head_count_kv", 1), 1 + keys.has_tensor("blk.0.attn_norm_2.weight")
    if heads % groups:
        raise WeightsError(f"{keys.file.path}: {heads} heads do not share {groups} key/value heads evenly")
    return {
        "hidden_size": width,
        "ffn_hidden_size": keys.count("feed_forward_length", 4 * width),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_kv_heads": groups,
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
        "new_decoder_architecture": groups > 1 or norms > 1,
        "num_ln_in_parallel_attn": norms,
        "rope_parameters": rope_of(keys),
    }


def _cohere2(keys: Keys) -> dict[str, Any]:
    heads, width = whole_heads(keys, "Cohere2ForCausalLM")
    return {
        **sizes_beside_norms(keys, heads, width),
        **layer_types(keys, 4, required=True),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "logit_scale": keys.fp32("logit_scale"),
        "rope_parameters": rope_of(keys),
    }


def _bloom(keys: Keys) -> dict[str, Any]:
    heads, _, width = even_heads(keys, "BloomForCausalLM")
    if keys.count("feed_forward_length", 4 * width) != 4 * width:
        raise WeightsError(f"{keys.file.path}: Bloom's MLP is four times as wide as the model ({width})")
    return {
        "hidden_size": width,
        "n_layer": keys.count("block_count"),
        "n_head": heads,
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
    }


def _bigcode(keys: Keys) -> dict[str, Any]:
    return _gpt2(keys) | {"multi_query": keys.count("attention.head_count_kv", 1) == 1}


def _jais2(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    return {
        **biases(keys),
        **sizes_beside_norms(keys, heads, width),
        "head_dim": dim,
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "rope_parameters": rope_of(keys),
    }


OLDER = {
    "olmo": Architecture("OlmoForCausalLM", "OlmoConfig", _olmo, rows=rows_of_pairs),
    "command-r": Architecture("CohereForCausalLM", "CohereConfig", _cohere),
    "cohere2": Architecture("Cohere2ForCausalLM", "Cohere2Config", _cohere2),
    "phi2": Architecture("PhiForCausalLM", "PhiConfig", _phi2, top=_PHI2_TOP, inside=_PHI2_INSIDE),
    "stablelm": Architecture("StableLmForCausalLM", "StableLmConfig", _stablelm),
    "nemotron": Architecture("NemotronForCausalLM", "NemotronConfig", _nemotron, one_in_norms=True),
    "jais2": Architecture("Jais2ForCausalLM", "Jais2Config", _jais2),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", _bigcode, layers="transformer.h.", top=_GPT2_TOP,
        inside=_GPT2_INSIDE,
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "Starcoder2Config", _starcoder2, inside=_STARCODER_INSIDE),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config", _gpt2, layers="transformer.h.", top=_GPT2_TOP, inside=_GPT2_INSIDE,
        transposed=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _neox, layers="gpt_neox.layers.", top=_NEOX_TOP, inside=_NEOX_INSIDE,
        rows=rows_by_part,
    ),
    "falcon": Architecture(
        "FalconForCausalLM", "FalconConfig", _falcon, layers="transformer.h.", top=_FALCON_TOP, inside=_FALCON_INSIDE,
        rows=rows_of_groups,
    ),
    "bloom": Architecture(
        "BloomForCausalLM", "BloomConfig", _bloom, layers="transformer.h.", top=_BLOOM_TOP, inside=_BLOOM_INSIDE,
        rows=rows_by_part,
    ),
}  # fmt: skip
"""By `general.architecture`."""
