"""GGUF's architectures of decoders whose layers attend to blocks of tokens: DeepSeek V4 and Qwen 4."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    INDEX,
    TOP,
    WHOLE,
    Architecture,
    columns_of_tiles,
    rows_of_tiles,
)
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    Keys,
    expert_scale,
    experts_of,
    heads_of,
    rope_of,
    routing,
    share,
    turned,
)
from qcompiler.frontends.checkpoints.gguf_architectures.mixtures import SHARED_EXPERTS
from qcompiler.frontends.checkpoints.gguf_architectures.recurrent import DELTA_INSIDE, DELTA_WHOLE, delta_moe

_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""DeepSeek V4's layers, by the tokens of a block. llama.cpp knows no other sizes of blocks."""

# --- DeepSeek V4 ------------------------------------------------------------------------------------------------------


def _deepseek4(keys: Keys) -> dict[str, Any]:
    """DeepSeek V4. YaRN scales the positions of layers with blocks alone, without a factor of attention."""
    routing(keys, "sqrtsoftplus")
    keys.refuse("expert_weights_norm", True)
    heads, dim, width = heads_of(keys)
    layers, hashed = keys.model_layers(), keys.count("hash_layer_count", 0, least=0)
    ratios = _ratios(keys)
    unknown = sorted(set(ratios) - set(_KINDS))
    if unknown:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.attention.compress_ratios' has {unknown[0]}; blocks of 4 "
            "and of 128 tokens are known, and 0 for a layer without blocks"
        )
    part = share(turned(keys, dim), dim)
    rope = rope_of(keys)
    blocks = {**rope, "rope_theta": float(keys.number("attention.compress_rope_freq_base"))}
    if rope["rope_type"] == "yarn":
        blocks["attention_factor"] = 1.0
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        **experts_of(keys, "n_routed_experts"),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv"),
        "head_dim": dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "o_groups": keys.count("attention.output_group_count"),
        "o_lora_rank": keys.count("attention.output_lora_rank"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": [_KINDS[each] for each in ratios],
        "compress_rates": {kind: rate for rate, kind in _KINDS.items() if rate},
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "routed_scaling_factor": expert_scale(keys),
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": _limit(keys),
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.fp32("hyper_connection.epsilon"),
        "partial_rotary_factor": part,
        "rope_parameters": {
            "main": {**plain, "partial_rotary_factor": part},
            "compress": {**blocks, "partial_rotary_factor": part},
        },
    }


def _ratios(keys: Keys) -> list[int]:
    """The tokens of a block, by layer; 0 for a layer without blocks."""
    full = f"{keys.architecture}.attention.compress_ratios"
    found = keys.layers(full, int)
    if found is None:
        raise WeightsError(f"{keys.file.path} lacks the key '{full}'")
    return found[: keys.model_layers()]


def _limit(keys: Keys) -> float:
    """The limit of the experts' gates, which transformers' model has once for all layers and all experts."""
    found: set[float] = set()
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        values = keys.layers(f"{keys.architecture}.{name}", float)
        found |= set(values[: keys.model_layers()] if values is not None else [])
    if len(found) != 1:
        raise WeightsError(
            f"{keys.file.path}: the keys '{keys.architecture}.swiglu_clamp_exp' and '…_shexp' are "
            f"{shown(sorted(found))}; transformers' model has one limit for the experts of all layers"
        )
    limit = found.pop()
    return limit if limit > 0 else math.inf


_COMPRESSOR = {"kv_proj": "kv", "gate_proj": "gate", "kv_norm": "norm"}
_DEEPSEEK_INSIDE = SHARED_EXPERTS | {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_norm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_proj": "attn_kv", "self_attn.kv_norm": "attn_kv_a_norm", "self_attn.o_a_proj": "attn_output_a",
    "self_attn.o_b_proj": "attn_output_b", "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
    **{f"self_attn.compressor.{name}": f"attn_compressor_{part}" for name, part in _COMPRESSOR.items()},
    **{f"self_attn.compressor.indexer.{name}": f"indexer_compressor_{part}" for name, part in _COMPRESSOR.items()},
}  # fmt: skip
_DEEPSEEK_WHOLE = {
    **WHOLE,
    "self_attn.compressor.position_bias": ("attn_compressor_ape.weight",),
    "self_attn.compressor.indexer.position_bias": ("indexer_compressor_ape.weight",),
    "mlp.gate.tid2eid": ("ffn_gate_tid2eid.weight",),
    **{
        f"{kind}_hc.{part}": (f"hc_{kind}_{part}.weight",)
        for kind in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"model.hc_head.hc_{part}": (f"output_hc_{part}.weight",) for part in ("fn", "base", "scale")},
}

# --- Qwen 4 -----------------------------------------------------------------------------------------------------------


def _qwen4(keys: Keys) -> dict[str, Any]:
    """Qwen 4: Qwen 3.5's layers, several streams beside one another, and an index that chooses blocks of tokens."""
    found = delta_moe(keys)
    found.pop("intermediate_size")
    ratios = {each for each in _ratios(keys) if each}
    if len(ratios) != 1:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.attention.compress_ratios' is {shown(_ratios(keys))}; the "
            "layers with attention have blocks of one size"
        )
    sections = keys.metadata.get(f"{keys.architecture}.rope.dimension_sections")
    if not isinstance(sections, list | tuple) or len(sections) < 3 or any(type(each) is not int for each in sections):
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.rope.dimension_sections' is {shown(sections)}, and not "
            "the sizes of three parts"
        )
    return {
        **found,
        "layer_types": ["indexed_attention" if "full" in each else each for each in found["layer_types"]],
        "rope_parameters": found["rope_parameters"] | {"mrope_section": list(sections[:3]), "mrope_interleaved": True},
        "hc_count": keys.count("hyper_connection.count", least=2),
        "hc_lowrank": keys.count("hyper_connection.low_rank"),
        "indexer_n_heads": keys.count("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.count("attention.indexer.key_length"),
        "indexer_budget": keys.count("attention.indexer.top_k"),
        "indexer_compress_ratio": ratios.pop(),
        **_ngrams(keys),
    }


def _ngrams(keys: Keys) -> dict[str, Any]:
    """The table of n-grams, which one layer may have.

    transformers' class finds the sizes of its heads from the first one, as the primes that follow it; hashes and sizes
    of the file take their places.  What a head may look up lies inside of the table.
    """
    full = f"{keys.architecture}.ple.layers"
    layers = keys.metadata.get(full)
    if layers is None:
        return {}
    if not isinstance(layers, list | tuple) or len(layers) != 1 or type(layers[0]) is not int:
        raise WeightsError(f"{keys.file.path}: the key '{full}' is {shown(layers)}, and not the number of one layer")
    size, heads = keys.count("ple.ngram_size", least=2), keys.count("ple.heads_per_ngram")
    rows = keys.rows("per_layer_token_embd.weight")
    spans: list[Any] = [
        keys.metadata.get(f"{keys.architecture}.ple.head_{name}") for name in ("offsets", "vocab_sizes")
    ]
    count = (size - 1) * heads
    if not all(_are_numbers(each, count) for each in spans) or any(
        first < 0 or length < 1 or first + length > rows for first, length in zip(*spans, strict=True)
    ):
        raise WeightsError(
            f"{keys.file.path}: the keys '{keys.architecture}.ple.head_offsets' and '…head_vocab_sizes' are no parts "
            f"of a table of {rows} rows for {count} heads: {shown(spans)}"
        )
    ends = keys.metadata.get("tokenizer.ggml.eos_token_id")
    first = keys.count("ple.eos_token_id", least=0)
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": keys.count("embedding_length_per_layer_input") * count,
        "ple_conv_kernel_size": keys.count("ple.conv_kernel"),
        "ngram_size": size,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": spans[1][0],
        "make_ngram_vocab_size_divisible_by": rows,
        "eos_token_id": [first, *([ends] if isinstance(ends, int) and ends != first else [])],
    }


def _are_numbers(value: Any, count: int) -> bool:
    """Whether a value is a list of so many whole numbers."""
    return isinstance(value, list | tuple) and len(value) == count and all(type(each) is int for each in value)


_QWEN_INSIDE = DELTA_INSIDE | {
    **{
        f"{kind}_hyper_connection.{name}": f"hc_{part}_{suffix}"
        for kind, part in (("attn", "attn"), ("mlp", "ffn"))
        for name, suffix in (
            ("block_inject_weight", "inject"),
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
        )
    },
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.conv1d": "ple_conv1d",
    **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("conv", "key", "query")},
}
_QWEN_TOP = {name: part for name, part in TOP.items() if part != "output_norm"} | {
    "model.hyper_connection_mixer.hc_norm": "output_hc_norm",
    "model.hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
    "model.hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
}
_QWEN = Architecture(
    "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", _qwen4, top=_QWEN_TOP, inside=_QWEN_INSIDE,
    whole={**DELTA_WHOLE, f"self_attn.{INDEX}": ("indexer.q_proj.weight", "indexer.k_proj.weight")},
    lists={
        f"ple.ple_embedding.{name}": f"qwen4exp.ple.{key}"
        for name, key in (("layer_multipliers", "layer_multipliers"), ("ngram_heads_offsets", "head_offsets"),
                          ("ngram_heads_vocab_sizes", "head_vocab_sizes"))
    },
    rows=rows_of_tiles, columns=columns_of_tiles, one_in_norms=True,
)  # fmt: skip


def qwen4_names(keys: Keys) -> Architecture:
    """Qwen 4's names: the table of n-grams stands beside the blocks, and belongs to one of them."""
    layers = keys.metadata.get(f"{keys.architecture}.ple.layers")
    layer = layers[0] if isinstance(layers, list | tuple) and layers else 0
    table = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
    return replace(_QWEN, top={**_QWEN_TOP, table: "per_layer_token_embd"})


BLOCKS = {
    "deepseek4": Architecture(
        "DeepseekV4ForCausalLM", "DeepseekV4Config", _deepseek4, inside=_DEEPSEEK_INSIDE, whole=_DEEPSEEK_WHOLE,
        tables={"mlp.gate.tid2eid": "n_routed_experts"},
    ),
    "qwen4exp": _QWEN,
}  # fmt: skip
"""By `general.architecture`."""
