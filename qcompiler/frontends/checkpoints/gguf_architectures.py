"""The architectures of GGUF files that are read: transformers' classes for them, their names, and their configuration.

    qwen3moe, qwen3moe.block_count, qwen3moe.expert_count, …      Qwen3MoeConfig
    blk.3.ffn_gate_exps.weight                                    model.layers.3.mlp.experts.gate_up_proj

What a file does not say, llama.cpp has in its code; each such constant stands here beside the model it belongs to.

Sources: the names of gguf-py 0.19 (constants.py, tensor_mapping.py), what llama.cpp's convert_hf_to_gguf.py changes in
tensors, and the values that llama.cpp's src/models fill in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import Order, transformers
from qcompiler.frontends.checkpoints.described_model import TensorTotals, configuration
from qcompiler.frontends.checkpoints.gguf_files import GgufFile, Metadata

ROPE_FACTORS = "rope_freqs.weight"
"""The divisors of the rotary embedding's frequencies (Llama 3.1's scaling)."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same for longrope: for texts beyond the length that the model was first trained for, and for shorter ones."""


def required(file: GgufFile, key: str) -> Any:
    """A key's value. WeightsError if the file lacks it."""
    if key not in file.metadata:
        raise WeightsError(f"{file.path} lacks the key '{key}'; it may be no file of a language model")
    return file.metadata[key]


@dataclass(frozen=True)
class Keys:
    """The keys of one architecture: `llama.block_count` is `block_count`."""

    file: GgufFile
    architecture: str

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; WeightsError if it is missing without a default, or not a single number."""
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default) if default is not None else required(self.file, full)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise WeightsError(
                f"{self.file.path}: the key '{full}' is {shown(value)}, no number; models whose layers differ are not "
                "read"
            )
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A count of at least `least`; WeightsError for anything else. `check_numbers` refuses counts that are too
        large."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < least:
            raise WeightsError(f"{self.file.path}: the key '{self.architecture}.{key}' is {value}, no number of things")
        return value

    def fp32(self, key: str, default: float | None = None) -> float:
        """A number that the file holds in fp32."""
        return float(np.float32(self.number(key, default)))

    def text(self, key: str) -> str | None:
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is not None and not isinstance(value, str):
            raise WeightsError(f"{self.file.path}: the key '{self.architecture}.{key}' is {shown(value)}, no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, bool):
            raise WeightsError(
                f"{self.file.path}: the key '{self.architecture}.{key}' is {shown(value)}, neither true nor false"
            )
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    @property
    def metadata(self) -> Metadata:
        return self.file.metadata


# --- names -----------------------------------------------------------------------------------------------------------

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
_GEMMA_INSIDE = _INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_OLMO_INSIDE = _INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_STARCODER_INSIDE = _INSIDE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_SHARED_INSIDE = _INSIDE | {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_OSS_INSIDE = _INSIDE | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_SEED_INSIDE = _INSIDE | {"post_attention_layernorm": "post_attention_norm"}
_PHI2_TOP = {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"}
_PHI2_INSIDE = _INSIDE | {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_PHI_INSIDE = _INSIDE | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
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
_WHOLE = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    "self_attn.sinks": ("attn_sinks.weight",),
}
"""Parameters that are no module's `weight` or `bias`."""


def _same_rows(name: str, rows: int, config: Any) -> Order | None:
    """For most architectures: rows are in transformers' order."""
    del name, rows, config
    return None


def _rows_of_pairs(name: str, rows: int, config: Any) -> Order | None:
    """For architecture llama: files rotate neighbours, transformers rotates halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return None
    here = np.arange(rows).reshape(count, 2, rows // count // 2)  # [head, half, i] is the model's row
    return np.ascontiguousarray(here.swapaxes(1, 2)).reshape(-1)


def _rows_by_part(name: str, rows: int, config: Any) -> Order | None:
    """For architecture gptneox: files hold the queries of all heads, then keys, then values; transformers those of one
    head after the other."""
    if ".query_key_value." not in name:
        return None
    heads = config.num_attention_heads
    here = np.arange(rows).reshape(heads, 3, rows // heads // 3)  # [head, part, i] is the model's row
    return np.ascontiguousarray(here.swapaxes(0, 1)).reshape(-1)


def _rows_of_groups(name: str, rows: int, config: Any) -> Order | None:
    """For architecture falcon: files hold all queries, then keys, then values; transformers the queries, the key and
    the value of one group after the other."""
    if ".query_key_value." not in name:
        return None
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    here = np.arange(rows).reshape(groups, config.num_attention_heads // groups + 2, -1)  # [group, head, i]
    return np.concatenate([here[:, part].reshape(-1) for part in (slice(None, -2), -2, -1)])


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF: the transformers classes, the names of its parameters, and how its tensors differ."""

    model: str
    config: str
    options: Callable[[Keys], dict[str, Any]]
    """The options of the configuration class."""
    layers: str = "model.layers."
    top: Mapping[str, str] = field(default_factory=lambda: _TOP, repr=False)
    inside: Mapping[str, str] = field(default_factory=lambda: _INSIDE, repr=False)
    rows: Callable[[str, int, Any], Order | None] = _same_rows
    """The model's row for each row of the file, by parameter, rows and configuration; None if the order is the same."""
    one_in_norms: bool = False
    """Whether the file's norms contain the 1 that transformers' model adds to them."""
    beside: frozenset[str] = frozenset()
    """Tensors that are no parameters."""
    transposed: bool = False
    """Whether transformers keeps linears as (in, out), in `Conv1D`. The file has (out, in), as everywhere."""
    alternating: bool = False
    """Whether transformers keeps experts as (experts, in, out), with the outputs of gate and up by turns."""

    def names(self, parameter: str) -> tuple[str, ...]:
        """GGUF's names for the parts of a parameter. WeightsError if it has no name for it."""
        module, _, kind = parameter.rpartition(".")
        if module in self.top:
            return (f"{self.top[module]}.{kind}",)
        number, _, inside = parameter.removeprefix(self.layers).partition(".")
        if inside in _WHOLE:
            return tuple(f"blk.{number}.{part}" for part in _WHOLE[inside])
        part = self.inside.get(inside.rpartition(".")[0])
        if part is None:
            raise WeightsError(f"the parameter '{parameter}' of {self.model} has no name in GGUF files")
        return (f"blk.{number}.{part}.{kind}",)

    def offset(self, parameter: str) -> float:
        """What transformers' parameter is, less the file's tensor."""
        return -1.0 if self.one_in_norms and parameter.endswith("norm.weight") else 0.0


# --- configurations --------------------------------------------------------------------------------------------------


def configured(architecture: Architecture, keys: Keys, held: TensorTotals) -> Any:
    """The configuration of the model. WeightsError names the key, or what transformers' class refuses."""
    file, options = keys.file, architecture.options(keys)
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path} lacks the tensor 'token_embd.weight'")
    table = file.tensors["token_embd.weight"].shape
    if len(table) != 2:
        raise WeightsError(f"{file.path}: 'token_embd.weight' has the shape {list(table)}, which is no table")
    options |= {
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{
            f"{kind}_token_id": _token(file, f"tokenizer.ggml.{key}_token_id")
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }
    kind = getattr(transformers(), architecture.config)
    return configuration(kind, {"model_type": kind.model_type, **options}, file.path, held)


def _token(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and type(value) is not int:
        raise WeightsError(f"{file.path}: the key '{key}' is {shown(value)}, no token")
    return value


def _heads(keys: Keys) -> tuple[int, int, int]:
    """The number of heads, the dim of each, and the model's width."""
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    dim = keys.count("attention.key_length", max(width // heads, 1))
    if dim % 2:
        raise WeightsError(f"{keys.file.path}: heads of {dim}: rotary positions need an even size")
    if keys.count("attention.value_length", dim) != dim:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.attention.value_length is {keys.number('attention.value_length')}, "
            f"and heads have {dim}"
        )
    return heads, dim, width


def _even_heads(keys: Keys, model: str) -> tuple[int, int, int]:
    """The same for models whose heads together are as wide as the model."""
    heads, dim, width = _heads(keys)
    if dim * heads != width:
        raise WeightsError(f"{keys.file.path}: {heads} heads of {dim} are not the width {width} of {model}")
    return heads, dim, width


def _sizes(keys: Keys, heads: int, width: int) -> dict[str, Any]:
    """What configurations of models with RMS norms share."""
    return {
        **_sizes_beside_norms(keys, heads, width),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
    }


def _sizes_beside_norms(keys: Keys, heads: int, width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
    }


def _turned(keys: Keys, dim: int) -> int:
    """How many numbers of each head are rotated."""
    turned = keys.count("rope.dimension_count", dim)
    if turned > dim or turned % 2:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.rope.dimension_count is {turned}, and heads have {dim}"
        )
    return turned


def _wholly_turned(keys: Keys, dim: int) -> None:
    if keys.count("rope.dimension_count", dim) != dim:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.rope.dimension_count is {keys.number('rope.dimension_count')}, and "
            f"heads have {dim}"
        )


NEUTRAL_SCALING = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys of rope.scaling that change results, for which transformers has no parameter of the same meaning."""


def _rope(keys: Keys, *, takes_attn_factor: bool = False) -> dict[str, Any]:
    """transformers' rope_parameters; WeightsError for an unsupported kind of scaling."""
    for name, neutral in NEUTRAL_SCALING.items():
        if takes_attn_factor and name == "attn_factor":
            continue
        if float(keys.number(f"rope.scaling.{name}", neutral)) != neutral:
            raise WeightsError(
                f"{keys.file.path}: {keys.architecture}.rope.scaling.{name} is {keys.number(f'rope.scaling.{name}')}; "
                f"only {neutral:g} is supported. Compile the folder that the file was made from"
            )
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    kind = keys.text("rope.scaling.type") or ("linear" if keys.has("rope.scaling.factor") else "none")
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": float(keys.number("rope.scaling.factor"))}
    elif kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "factor": float(keys.number("rope.scaling.factor")),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if keys.has(f"rope.scaling.yarn_{name}"):
                found[name] = float(keys.number(f"rope.scaling.yarn_{name}"))
    elif kind != "none":
        raise WeightsError(f"{keys.file.path}: rope.scaling.type is {shown(kind)}; supported are none, linear and yarn")
    return found


def _partial_rope(keys: Keys, dim: int) -> dict[str, Any]:
    """The same for models that rotate a part of each head."""
    return {**_rope(keys), "partial_rotary_factor": _turned(keys, dim) / dim}


def _experts(keys: Keys, option: str) -> dict[str, Any]:
    """How many experts there are, by the configuration's name for it, and how many of them serve a token."""
    return {option: keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _rms_options(keys: Keys) -> dict[str, Any]:
    """Llama, Mistral and the Qwen models with heads of any size."""
    heads, dim, width = _heads(keys)
    _wholly_turned(keys, dim)
    return {**_sizes(keys, heads, width), "head_dim": dim, "rope_parameters": _rope(keys)}


def _llama_biases(keys: Keys) -> dict[str, Any]:
    return {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_down.bias"),
    }


def _llama(keys: Keys) -> dict[str, Any]:
    return _rms_options(keys) | _llama_biases(keys)


def _mistral(keys: Keys) -> dict[str, Any]:
    return _rms_options(keys) | {"sliding_window": keys.count("attention.sliding_window")}


def _mixtral(keys: Keys) -> dict[str, Any]:
    window = {"sliding_window": keys.count("attention.sliding_window")} if keys.has("attention.sliding_window") else {}
    return _rms_options(keys) | _experts(keys, "num_local_experts") | window


def _qwen2(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "Qwen2ForCausalLM")
    _wholly_turned(keys, dim)
    return {**_sizes(keys, heads, width), "rope_parameters": _rope(keys)}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return _rms_options(keys) | {"attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _qwen3(keys) | {
        **_experts(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's rule for every file of this architecture
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return _qwen2(keys) | {
        **_experts(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp's rule for every file of this architecture
    }


def _olmo2(keys: Keys) -> dict[str, Any]:
    if keys.has("attention.sliding_window"):
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.attention.sliding_window: OLMo 3 is not read from GGUF files; "
            "compile its folder"
        )
    heads, dim, width = _even_heads(keys, "Olmo2ForCausalLM")
    _wholly_turned(keys, dim)
    return {**_sizes(keys, heads, width), "rope_parameters": _rope(keys)}


def _granite(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "GraniteForCausalLM")
    _wholly_turned(keys, dim)
    return {
        **_llama_biases(keys),
        **_sizes(keys, heads, width),
        "attention_multiplier": keys.fp32("attention.scale", dim**-0.5),
        "embedding_multiplier": keys.fp32("embedding_scale", 1.0),
        "residual_multiplier": keys.fp32("residual_scale", 1.0),
        "logits_scaling": keys.fp32("logit_scale", 1.0),
        "rope_parameters": _rope(keys),
    }


def _smollm3(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "SmolLM3ForCausalLM")
    _wholly_turned(keys, dim)
    rest = {"no_rope_layer_interval": 4, "rope_parameters": _rope(keys)}  # llama.cpp's rule for every file of it
    return {**_llama_biases(keys), **_sizes(keys, heads, width), **rest}


def _seed_oss(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


def _ernie(keys: Keys) -> dict[str, Any]:
    return _rms_options(keys) | {"use_bias": keys.has_tensor("blk.0.attn_q.bias")}


def _olmoe(keys: Keys) -> dict[str, Any]:
    return _qwen2(keys) | {
        **_experts(keys, "num_experts"),
        "norm_topk_prob": False,  # llama.cpp's rule for every file of this architecture
    }


def _olmo(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "OlmoForCausalLM")
    _wholly_turned(keys, dim)
    clamp = {"clip_qkv": keys.fp32("attention.clamp_kqv")} if keys.has("attention.clamp_kqv") else {}
    return {**_sizes_beside_norms(keys, heads, width), **clamp, "rope_parameters": _rope(keys)}


def _cohere(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "CohereForCausalLM")
    _wholly_turned(keys, dim)
    return {
        **_sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "logit_scale": keys.fp32("logit_scale"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": _rope(keys),
    }


def _phi2(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "PhiForCausalLM")
    return {
        **_sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "rope_parameters": _partial_rope(keys, dim),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "StableLmForCausalLM")
    if keys.has_tensor("blk.0.attn_q_norm.weight"):
        raise WeightsError(
            f"{keys.file.path}: norms of each head (StableLM 2 12B) are not read from GGUF files; compile its folder"
        )
    return {
        **_sizes_beside_norms(keys, heads, width),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "rope_parameters": _partial_rope(keys, dim),
    }


def _nemotron(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "NemotronForCausalLM")
    return {
        **_llama_biases(keys),
        **_sizes_beside_norms(keys, heads, width),
        "head_dim": dim,
        "norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "rope_parameters": _partial_rope(keys, dim),
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "Starcoder2ForCausalLM")
    _wholly_turned(keys, dim)
    return {
        **_sizes_beside_norms(keys, heads, width),
        "norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None,
        "rope_parameters": _rope(keys),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _heads(keys)
    _wholly_turned(keys, dim)
    rope = _rope(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as gpt-oss was trained; no key says so
    return {
        **_sizes(keys, heads, width),
        "head_dim": dim,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        **_experts(keys, "num_local_experts"),
        "sliding_window": keys.count("attention.sliding_window"),  # of every other layer, from the first on
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": rope,
    }


_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Gemma's models of 27 B scale queries by the width per head, the others by the head's dim; no key says which, and
llama.cpp tells them apart by the number of layers."""


def _gemma(keys: Keys) -> dict[str, Any]:
    return _rms_options(keys)


def _gemma2(keys: Keys) -> dict[str, Any]:
    found = _rms_options(keys)
    is_27b = found["num_hidden_layers"] == _LAYERS_OF_27B.get(keys.architecture)
    return found | {
        "query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"] if is_27b else found["head_dim"],
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.fp32("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.fp32("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    found = _gemma2(keys)
    rope = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", 10000.0))}
    return found | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": found["final_logit_softcapping"] if keys.has("final_logit_softcapping") else None,
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": rope},
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "Phi3ForCausalLM")
    turned = _turned(keys, dim)
    rope = {**_rope(keys, takes_attn_factor=True), "partial_rotary_factor": turned / dim}
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    if keys.has_tensor(LONG_FACTORS) or keys.has_tensor(SHORT_FACTORS):
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(keys.file, LONG_FACTORS, turned // 2),
            "short_factor": _factors(keys.file, SHORT_FACTORS, turned // 2),
            "original_max_position_embeddings": original,
        }
        if keys.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = keys.fp32("rope.scaling.attn_factor")
    window = {"sliding_window": keys.count("attention.sliding_window")} if keys.has("attention.sliding_window") else {}
    return {
        **_sizes(keys, heads, width), **window, "rope_parameters": rope, "original_max_position_embeddings": original,
    }  # fmt: skip


def _factors(file: GgufFile, name: str, count: int) -> list[float]:
    """The values of one of longrope's tensors. WeightsError for a wrong number of them, and for zeros."""
    if name not in file.tensors:
        raise WeightsError(f"{file.path} lacks the tensor '{name}'")
    tensor = file.tensors[name]
    if tensor.shape != (count,):
        raise WeightsError(f"'{name}' in {file.path} has the shape {list(tensor.shape)}, the model {count} frequencies")
    return [float(value) for value in divisors(file, name)]


def divisors(file: GgufFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tensor of divisors of frequencies. WeightsError for one that divides by zero or is not finite."""
    values = np.array(file.tensors[name].values())
    with np.errstate(divide="ignore"):
        if not (np.isfinite(values).all() and np.isfinite(1 / values).all()):
            raise WeightsError(f"'{name}' in {file.path} holds a factor that is zero or not finite")
    return values


def _gpt2(keys: Keys) -> dict[str, Any]:
    heads, _, width = _even_heads(keys, "GPT2LMHeadModel")
    return {
        "n_embd": width,
        "n_inner": keys.count("feed_forward_length", 4 * width),
        "n_layer": keys.count("block_count"),
        "n_head": heads,
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.fp32("attention.layer_norm_epsilon"),
    }


def _neox(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "GPTNeoXForCausalLM")
    return {
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_eps": keys.fp32("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": _partial_rope(keys, dim),
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    heads, dim, width = _even_heads(keys, "FalconForCausalLM")
    _wholly_turned(keys, dim)
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
        "rope_parameters": _rope(keys),
    }


# --- the table -------------------------------------------------------------------------------------------------------

_FREQUENCIES, _LONGROPE = frozenset({ROPE_FACTORS}), frozenset({LONG_FACTORS, SHORT_FACTORS})
_MISTRAL = Architecture("MistralForCausalLM", "MistralConfig", _mistral, rows=_rows_of_pairs, beside=_FREQUENCIES)
_MIXTRAL = Architecture("MixtralForCausalLM", "MixtralConfig", _mixtral, rows=_rows_of_pairs, beside=_FREQUENCIES)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _llama, rows=_rows_of_pairs, beside=_FREQUENCIES),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _qwen2, beside=_FREQUENCIES),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _qwen3, beside=_FREQUENCIES),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _qwen3_moe),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _qwen2_moe, inside=_SHARED_INSIDE),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", _olmo2, inside=_OLMO_INSIDE),
    "arcee": Architecture("ArceeForCausalLM", "ArceeConfig", _llama, rows=_rows_of_pairs, beside=_FREQUENCIES),
    "seed_oss": Architecture("SeedOssForCausalLM", "SeedOssConfig", _seed_oss, inside=_SEED_INSIDE),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "Ernie4_5Config", _ernie),
    "olmo": Architecture("OlmoForCausalLM", "OlmoConfig", _olmo, rows=_rows_of_pairs),
    "olmoe": Architecture("OlmoeForCausalLM", "OlmoeConfig", _olmoe),
    "command-r": Architecture("CohereForCausalLM", "CohereConfig", _cohere),
    "phi2": Architecture("PhiForCausalLM", "PhiConfig", _phi2, top=_PHI2_TOP, inside=_PHI2_INSIDE),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", _granite, rows=_rows_of_pairs, beside=_FREQUENCIES),
    "smollm3": Architecture("SmolLM3ForCausalLM", "SmolLM3Config", _smollm3, rows=_rows_of_pairs, beside=_FREQUENCIES),
    "stablelm": Architecture("StableLmForCausalLM", "StableLmConfig", _stablelm),
    "nemotron": Architecture("NemotronForCausalLM", "NemotronConfig", _nemotron, one_in_norms=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "Starcoder2Config", _starcoder2, inside=_STARCODER_INSIDE),
    "gpt-oss": Architecture("GptOssForCausalLM", "GptOssConfig", _gpt_oss, inside=_OSS_INSIDE, alternating=True),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", _gemma, one_in_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", _gemma2, inside=_GEMMA_INSIDE, one_in_norms=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", _gemma3, inside=_GEMMA_INSIDE, one_in_norms=True),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", _phi3, inside=_PHI_INSIDE, beside=_LONGROPE),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config", _gpt2, layers="transformer.h.", top=_GPT2_TOP, inside=_GPT2_INSIDE,
        transposed=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _neox, layers="gpt_neox.layers.", top=_NEOX_TOP, inside=_NEOX_INSIDE,
        rows=_rows_by_part,
    ),
    "falcon": Architecture(
        "FalconForCausalLM", "FalconConfig", _falcon, layers="transformer.h.", top=_FALCON_TOP, inside=_FALCON_INSIDE,
        rows=_rows_of_groups,
    ),
}  # fmt: skip
"""By `general.architecture`."""


def architecture_of(keys: Keys) -> Architecture:
    """The architecture of a file; files of arch llama are of three kinds."""
    if keys.architecture == "llama" and keys.count("expert_count", 0, least=0):
        return _MIXTRAL
    if keys.architecture == "llama" and keys.has("attention.sliding_window"):
        return _MISTRAL
    return ARCHITECTURES[keys.architecture]


__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "Architecture", "Keys", "architecture_of", "configured",
           "divisors", "required"]  # fmt: skip
