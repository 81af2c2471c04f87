"""GGUF's architectures of models with recurrences: Mamba and its hybrids with attention, and gated delta nets.

    blk.0.ssm_a             (heads, 1)        -exp(A_log) of model.layers.0.mamba.A_log (heads)
    blk.0.ssm_conv1d.weight (channels, taps)  model.layers.0.mamba.conv1d.weight (channels, 1, taps)
    blk.0.ssm_norm.weight   (groups, rows)    model.layers.0.mamba.norm.weight (groups · rows)

The layers with attention are those that have heads of keys, or those that the file does not call recurrent.
"""

from __future__ import annotations

from typing import Any

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    INSIDE,
    LATENT,
    TOP,
    WHOLE,
    Architecture,
    columns_of_tiles,
    rows_of_pairs,
    rows_of_tiles,
)
from qcompiler.frontends.checkpoints.gguf_architectures.dense import LATENT_INSIDE, granite_factors
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    Keys,
    attention_bias,
    expert_scale,
    experts_of,
    heads_of,
    partial_rope,
    rope_of,
    routing,
    sizes,
    wholly_turned,
)
from qcompiler.frontends.checkpoints.gguf_architectures.latent import latent_heads
from qcompiler.frontends.checkpoints.gguf_architectures.mixtures import (
    GRANITE_INSIDE,
    GRANITE_WHOLE,
    SHARED_EXPERTS,
    SHARED_INSIDE,
    sparse_from,
)

# --- what several of them share ---------------------------------------------------------------------------------------


def _inner(keys: Keys, parts: int) -> int:
    """The width of the recurrence. WeightsError unless `parts` divides it."""
    inner = keys.count("ssm.inner_size")
    if inner % parts:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.ssm.inner_size' is {inner}, which {parts} does not divide"
        )
    return inner


def _expand(keys: Keys) -> int:
    """The width of the recurrence as a multiple of the model's."""
    width = keys.count("embedding_length")
    return _inner(keys, width) // width


def _of_layers(keys: Keys, key: str) -> list[int]:
    """A number for each layer of the model: one and the same for some of them, and 0 for the others."""
    full = f"{keys.architecture}.{key}"
    found = (keys.layers(full, int) or [])[: keys.model_layers()]
    if not any(found) or len({each for each in found if each}) > 1 or min(found) < 0:
        raise WeightsError(
            f"{keys.file.path}: the key '{full}' is {shown(found)}, and not one number for some layers and 0 for the "
            "others"
        )
    return found


def _period(keys: Keys, layers: list[int], what: str) -> tuple[int, int]:
    """The period and the first of layers that are equally far from one another. WeightsError for others."""
    count = keys.model_layers()
    if not layers:
        return count + 1, count
    period = layers[1] - layers[0] if len(layers) > 1 else count
    if layers != list(range(layers[0], count, period)) or layers[0] >= period:
        raise WeightsError(f"{keys.file.path}: the layers with {what}, {shown(layers)} of {count}, have no period")
    return period, layers[0]


def _hybrid_sizes(keys: Keys, heads: int, width: int, counts: list[int]) -> dict[str, Any]:
    """What configurations of hybrids share; `counts` are the heads of keys of each layer."""
    return {
        "hidden_size": width,
        "num_hidden_layers": len(counts),
        "num_attention_heads": heads,
        "num_key_value_heads": max(counts),
        "max_position_embeddings": keys.count("context_length"),
    }


def _projections(keys: Keys, conv: str, projection: str) -> dict[str, Any]:
    """Whether the recurrence's convolution and projections have biases, as in the first layer that has one."""
    first = next((each for each in range(keys.blocks()) if keys.has_tensor(f"blk.{each}.ssm_in.weight")), 0)
    return {
        conv: keys.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
        projection: keys.has_tensor(f"blk.{first}.ssm_in.bias"),
    }


def _mamba_2(keys: Keys) -> dict[str, Any]:
    """The options of Mamba 2, by the names that hybrids with attention have for them."""
    heads = keys.count("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _inner(keys, heads) // heads,
        "mamba_n_groups": keys.count("ssm.group_count"),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        **_projections(keys, "mamba_conv_bias", "mamba_proj_bias"),
    }


# --- Mamba ------------------------------------------------------------------------------------------------------------


def _mamba_sizes(keys: Keys) -> dict[str, Any]:
    return {
        "hidden_size": keys.count("embedding_length"),
        "num_hidden_layers": keys.model_layers(),
        "state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "expand": _expand(keys),
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_rms_epsilon"),
        **_projections(keys, "use_conv_bias", "use_bias"),
    }


def _mamba(keys: Keys) -> dict[str, Any]:
    """Mamba, and Falcon Mamba, of which no file has the epsilon of the inner norms: transformers' 1e-6 stays."""
    return _mamba_sizes(keys) | {"time_step_rank": keys.count("ssm.time_step_rank")}


def _mamba2(keys: Keys) -> dict[str, Any]:
    heads = keys.count("ssm.time_step_rank")
    return _mamba_sizes(keys) | {
        "num_heads": heads,
        "head_dim": _inner(keys, heads) // heads,
        "n_groups": keys.count("ssm.group_count"),
    }


# --- hybrids ----------------------------------------------------------------------------------------------------------


def _jamba(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    if heads * dim != width:
        raise WeightsError(f"{keys.file.path}: {heads} heads of {dim} are not the width {width} of JambaForCausalLM")
    counts = _of_layers(keys, "attention.head_count_kv")
    attention = _period(keys, [layer for layer, count in enumerate(counts) if count], "attention")
    routed = [layer for layer in range(len(counts)) if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")]
    experts = _period(keys, routed, "experts")
    return {
        **_hybrid_sizes(keys, heads, width, counts),
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        **(experts_of(keys, "num_experts") if routed else {"num_experts": 1, "num_experts_per_tok": 1}),
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_expand": _expand(keys),
        "mamba_dt_rank": keys.count("ssm.time_step_rank"),
        **_projections(keys, "mamba_conv_bias", "mamba_proj_bias"),
    }


def _falcon_h1(keys: Keys) -> dict[str, Any]:
    """Falcon H1. Its multipliers are in the weights of a file, and 1 here."""
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    return {
        **sizes(keys, heads, width),
        **_mamba_2(keys),
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "head_dim": dim,
        "mamba_rms_norm": keys.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp's rule for every file of this architecture
        "projectors_bias": keys.has_tensor("blk.0.ssm_out.bias"),
        **attention_bias(keys),
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
        "rope_parameters": rope_of(keys),
    }


def _granite_hybrid(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    counts = _of_layers(keys, "attention.head_count_kv")
    has_experts = bool(keys.count("expert_count", 0, least=0))
    return {
        **_hybrid_sizes(keys, heads, width, counts),
        **_mamba_2(keys),
        **granite_factors(keys, dim),
        "mamba_expand": _expand(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if each else "linear_attention" for each in counts],
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else None,
        **(experts_of(keys, "num_local_experts") if has_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": keys.count(
            "expert_shared_feed_forward_length" if has_experts else "feed_forward_length"
        ),
    }


def _bamba(keys: Keys) -> dict[str, Any]:
    heads, dim, width = heads_of(keys)
    counts = _of_layers(keys, "attention.head_count_kv")
    return {
        **_hybrid_sizes(keys, heads, width, counts),
        **_mamba_2(keys),
        "mamba_expand": _expand(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "attn_layer_indices": [layer for layer, each in enumerate(counts) if each],
        "rope_parameters": partial_rope(keys, dim),
    }


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    """Nemotron H: each layer is attention, an MLP or experts, or a recurrence."""
    heads, dim, width = heads_of(keys)
    counts, wide = _of_layers(keys, "attention.head_count_kv"), _of_layers(keys, "feed_forward_length")
    kinds = [
        "full_attention" if count
        else "moe" if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")
        else "mlp" if wide[layer]
        else "linear_attention"
        for layer, count in enumerate(counts)
    ]  # fmt: skip
    mamba = _mamba_2(keys)
    return {
        **_hybrid_sizes(keys, heads, width, counts),
        "layers_block_type": kinds,
        "intermediate_size": max(wide),
        "head_dim": dim,
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "mamba_proj_bias": mamba["mamba_proj_bias"],
        "num_nextn_predict_layers": 0,
    }


def _nemotron_h_moe(keys: Keys) -> dict[str, Any]:
    latent = {"moe_latent_size": keys.count("moe_latent_size")} if keys.has("moe_latent_size") else {}
    return _nemotron_h(keys) | {
        **experts_of(keys, "n_routed_experts"),
        **latent,
        "n_shared_experts": keys.count("expert_shared_count", 1),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": expert_scale(keys),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
    }


# --- gated delta nets -------------------------------------------------------------------------------------------------


def _delta(keys: Keys) -> dict[str, Any]:
    """Qwen 3.5: three gated delta nets, then a layer with attention, unless the file says otherwise."""
    heads, dim, width = heads_of(keys)
    layers, values = keys.model_layers(), keys.count("ssm.time_step_rank")
    if values % keys.count("ssm.group_count"):
        raise WeightsError(
            f"{keys.file.path}: {values} value heads do not share {keys.count('ssm.group_count')} key heads evenly"
        )
    recurrent = keys.flags("attention.recurrent_layers")
    if recurrent is None:
        period = keys.count("full_attention_interval", 4)
        recurrent = [(each + 1) % period != 0 for each in range(layers)]
    return {
        **_hybrid_sizes(keys, heads, width, [keys.count("attention.head_count_kv")] * layers),
        "head_dim": dim,
        "intermediate_size": keys.count("feed_forward_length", width),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": _inner(keys, values) // values,
        **attention_bias(keys),
        "rope_parameters": partial_rope(keys, dim),
    }


def delta_moe(keys: Keys) -> dict[str, Any]:
    return _delta(keys) | {
        **experts_of(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's rule for every file of these architectures
    }


def _kimi_linear(keys: Keys) -> dict[str, Any]:
    """Kimi Linear: Kimi's delta attention, and attention over short vectors without positions."""
    routing(keys, "sigmoid")
    counts = _of_layers(keys, "attention.head_count_kv")
    heads, dense, dim = keys.count("attention.head_count"), sparse_from(keys), keys.count("kda.head_dim")
    queries = f"blk.{counts.index(0) if 0 in counts else 0}.attn_q.weight"
    rows = keys.rows(queries)
    if 0 in counts and rows % dim:
        raise WeightsError(
            f"{keys.file.path}: the key '{keys.architecture}.kda.head_dim' is {dim}, and '{queries}' has {rows} rows"
        )
    return {
        **_hybrid_sizes(keys, heads, keys.count("embedding_length"), [heads] * len(counts)),
        **experts_of(keys, "num_local_experts"),
        **latent_heads(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if each else "linear_attention" for each in counts],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(len(counts))],
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_head_dim": dim,
        "linear_num_heads": max(rows // dim, 1),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count", 1),
        "routed_scaling_factor": expert_scale(keys),
        "norm_topk_prob": True,  # llama.cpp's rule for every file of this architecture
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
    }


# --- names ------------------------------------------------------------------------------------------------------------


def _recurrence(module: str) -> dict[str, str]:
    """The names of a recurrence's modules; the model calls it `module`."""
    parts = {f"{module}.{kind}_proj": f"ssm_{kind}" for kind in ("in", "out", "x", "dt")}
    norms = {f"{module}.{kind}_layernorm": f"ssm_{kind}_norm" for kind in ("dt", "b", "c")}
    return parts | norms | {f"{module}.conv1d": "ssm_conv1d", f"{module}.norm": "ssm_norm"}


def _vectors(module: str) -> dict[str, tuple[str, ...]]:
    """The recurrence's parameters that are no module's."""
    return {
        f"{module}.A_log": ("ssm_a",),
        f"{module}.D": ("ssm_d",),
        f"{module}.dt_bias": ("ssm_dt.bias",),
    }


_MAMBA_TOP = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
_MAMBA_INSIDE = {"norm": "attn_norm"} | _recurrence("mixer")
_MAMBA_WHOLE = _vectors("mixer")
_FINAL_TOP = TOP | {"model.final_layernorm": "output_norm"}
_FEED_FORWARD = {f"feed_forward.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")}
_HYBRID_INSIDE = INSIDE | _FEED_FORWARD | _recurrence("mamba") | {
    "pre_ff_layernorm": "ffn_norm", "feed_forward.router": "ffn_gate_inp",
}  # fmt: skip
_JAMBA_WHOLE = _vectors("mamba") | {
    "feed_forward.experts.gate_up_proj": WHOLE["mlp.experts.gate_up_proj"],
    "feed_forward.experts.down_proj": WHOLE["mlp.experts.down_proj"],
}
_FALCON_H1_WHOLE = _vectors("mamba") | {"pre_ff_layernorm.weight": ("ffn_norm",)}
_DENSE_GRANITE = {
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down.weight",),
}
_NEMOTRON_TOP = {"model.embeddings": "token_embd", "model.norm_f": "output_norm", "lm_head": "output"}
_NEMOTRON_INSIDE = _MAMBA_INSIDE | {
    **{f"mixer.{kind}_proj": f"attn_{kind}" for kind in ("q", "k", "v")}, "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    **{f"mixer.shared_experts.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("up", "down")},
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip
_NEMOTRON_WHOLE = _vectors("mixer") | {
    "mixer.experts.up_proj": ("ffn_up_exps.weight",), "mixer.experts.down_proj": ("ffn_down_exps.weight",),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
}  # fmt: skip
DELTA_INSIDE = SHARED_INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip
DELTA_WHOLE = {
    **WHOLE, **_vectors("linear_attn"), "linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
}  # fmt: skip
_KIMI_INSIDE = LATENT_INSIDE | SHARED_EXPERTS | {
    "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
}  # fmt: skip
_KIMI_WHOLE = {
    **WHOLE, **_vectors("self_attn.forget_gate"), LATENT: ("attn_k_b.weight", "attn_v_b.weight"),
    "self_attn.conv1d.weight": tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),
}  # fmt: skip

FALCON_MAMBA = Architecture(
    "FalconMambaForCausalLM", "FalconMambaConfig", _mamba, layers="backbone.layers.", top=_MAMBA_TOP,
    inside=_MAMBA_INSIDE, whole=_MAMBA_WHOLE,
)  # fmt: skip
BAMBA = Architecture(
    "BambaForCausalLM", "BambaConfig", _bamba, top=_FINAL_TOP, inside=_HYBRID_INSIDE, whole=_vectors("mamba"),
    rows=rows_of_pairs,
)  # fmt: skip
GRANITE_HYBRID_MOE = Architecture(
    "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _granite_hybrid,
    inside=GRANITE_INSIDE | _recurrence("mamba"), whole=GRANITE_WHOLE | _vectors("mamba"), rows=rows_of_pairs,
)  # fmt: skip
RECURRENT = {
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig", _mamba, layers="backbone.layers.", top=_MAMBA_TOP, inside=_MAMBA_INSIDE,
        whole=_MAMBA_WHOLE,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM", "Mamba2Config", _mamba2, layers="backbone.layers.", top=_MAMBA_TOP, inside=_MAMBA_INSIDE,
        whole=_MAMBA_WHOLE,
    ),
    "jamba": Architecture(
        "JambaForCausalLM", "JambaConfig", _jamba, top=_FINAL_TOP, inside=_HYBRID_INSIDE, whole=_JAMBA_WHOLE),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM", "FalconH1Config", _falcon_h1, top=_FINAL_TOP, inside=_HYBRID_INSIDE,
        whole=_FALCON_H1_WHOLE,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _granite_hybrid,
        inside=INSIDE | _recurrence("mamba"), whole=_DENSE_GRANITE | _vectors("mamba"), rows=rows_of_pairs,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM", "NemotronHConfig", _nemotron_h, top=_NEMOTRON_TOP, inside=_NEMOTRON_INSIDE,
        whole=_NEMOTRON_WHOLE, rows=rows_of_pairs,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM", "NemotronHConfig", _nemotron_h_moe, top=_NEMOTRON_TOP, inside=_NEMOTRON_INSIDE,
        whole=_NEMOTRON_WHOLE, rows=rows_of_pairs,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", delta_moe, inside=DELTA_INSIDE, whole=DELTA_WHOLE,
        one_in_norms=True,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _delta, inside=DELTA_INSIDE, whole=DELTA_WHOLE,
        rows=rows_of_tiles, columns=columns_of_tiles, one_in_norms=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", delta_moe, inside=DELTA_INSIDE, whole=DELTA_WHOLE,
        rows=rows_of_tiles, columns=columns_of_tiles, one_in_norms=True,
    ),
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM", "KimiLinearConfig", _kimi_linear, inside=_KIMI_INSIDE, whole=_KIMI_WHOLE),
}  # fmt: skip
"""By `general.architecture`."""
