"""GGUF files of small random models, written by the `gguf` package, and the models that their tensors mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from torch import nn

from qcompiler import formats

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
ARCHS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def build(kind: str, **options: Any) -> nn.Module:
    """A random model of `Llama`, `Qwen3`, …, with weights large enough that its logits differ between tokens."""
    torch.manual_seed(0)
    sizes = {**SIZES, **options}
    of_even_heads = ("Qwen2", "Qwen2Moe", "Phi3", "GPTNeoX", "GPT2", "Olmo2", "Starcoder2", "Granite", "SmolLM3",
                     "StableLm", "Olmo", "Olmoe", "Cohere", "Phi")  # fmt: skip
    if kind in of_even_heads:
        sizes.pop("head_dim")
    if kind == "GPT2":
        sizes = {
            "n_embd": 256,
            "n_layer": 2,
            "n_head": 8,
            "n_inner": 512,
            "n_positions": 128,
            "vocab_size": 96,
            **options,
        }
    if kind == "Falcon":
        left_out = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")
        sizes = {name: value for name, value in sizes.items() if name not in left_out} | {"ffn_hidden_size": 512}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.use_cache = False
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind.removesuffix('Text')}{suffix}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.5)
            else:
                parameter.uniform_(0.7, 1.3)
    return model


def rows_for_llama_cpp(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q and k: the halves of a head become neighbours."""
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rows_for_falcon(rows: np.ndarray, heads: int, groups: int) -> np.ndarray:
    """As llama.cpp's converter writes them: queries of all groups, then their keys, then their values."""
    parts = rows.reshape(groups, heads // groups + 2, -1)
    queries, keys, values = parts[:, :-2], parts[:, [-2]], parts[:, [-1]]
    return np.concatenate([queries.reshape(-1), keys.reshape(-1), values.reshape(-1)])


def _key_heads(config: Any) -> int:
    if hasattr(config, "num_kv_heads"):  # Falcon's
        return int(config.num_kv_heads) if config.new_decoder_architecture else 1
    return int(config.num_key_value_heads)


@dataclass
class Written:
    """A file, the model with the values that it means, and of each tensor (by GGUF's name) the stored bytes."""

    path: Path
    model: nn.Module
    raw: dict[str, bytes]
    names: dict[str, dict[str, torch.Tensor]]
    """Of each parameter what it is in the file, by names there."""


def quantized(values: np.ndarray, kind: Type) -> np.ndarray:
    """By the `gguf` package where it encodes the type, else by our encoder; bytes per row."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        name = next(n for n in formats.names() if n.upper() == kind.name)
        packed = formats.get(name).encode(values.reshape(-1, values.shape[-1]))
        return packed.data.reshape(*values.shape[:-1], -1)


def _pieces(name: str, parameter: torch.Tensor, arch: str, table: gguf.TensorNameMap) -> dict[str, torch.Tensor]:
    """What of a parameter has which name; of gate and up, which transformers joins, one each."""
    number, _, inside = name.removeprefix("model.layers.").partition(".")
    if arch == "gpt-oss" and inside.startswith("mlp.experts."):
        kind = "bias" if inside.endswith("bias") else "weight"
        values = parameter.data if kind == "bias" else parameter.data.transpose(1, 2)
        if "down" in inside:
            return {f"blk.{number}.ffn_down_exps.{kind}": values}
        return {f"blk.{number}.ffn_{part}_exps.{kind}": values[:, i::2] for i, part in enumerate(("gate", "up"))}
    if inside == "self_attn.sinks":
        return {f"blk.{number}.attn_sinks.weight": parameter.data}
    if inside == "mlp.experts.gate_up_proj":
        gate, up = parameter.data.chunk(2, dim=1)
        return {f"blk.{number}.ffn_gate_exps.weight": gate, f"blk.{number}.ffn_up_exps.weight": up}
    if inside == "mlp.experts.down_proj":
        return {f"blk.{number}.ffn_down_exps.weight": parameter.data}
    found = table.get_name(name.replace("mlp.gate.", "block_sparse_moe.gate."), try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return {found: parameter.data}


Change = Callable[[torch.Tensor], torch.Tensor]


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


def changes(name: str, arch: str, config: Any) -> tuple[Change, Change]:
    """What llama.cpp's converter does to a parameter, and the inverse."""
    heads = {"q_proj": config.num_attention_heads}
    heads["k_proj"] = getattr(config, "num_key_value_heads", 0)
    count = heads.get(name.split(".")[-2])
    if arch in ("llama", "granite", "smollm3", "arcee", "olmo") and count:
        return _moved(lambda rows: rows_for_llama_cpp(rows, count))
    if arch == "gptneox" and "query_key_value" in name:
        heads_ = config.num_attention_heads
        return _moved(lambda rows: rows.reshape(heads_, 3, -1).swapaxes(0, 1).reshape(-1))
    if arch == "falcon" and "query_key_value" in name:
        return _moved(lambda rows: rows_for_falcon(rows, config.num_attention_heads, _key_heads(config)))
    one_in_norms = arch.startswith("gemma") or arch == "nemotron"
    if one_in_norms and name.endswith("norm.weight"):
        return lambda values: values + 1, lambda values: values - 1
    if name.endswith("shared_expert_gate.weight"):
        return lambda values: values[0], lambda values: values[None]
    if arch == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc"):
        return (lambda values: values.T, lambda values: values.T) if name.endswith("weight") else (_same, _same)
    return _same, _same


def _moved(order: Callable[[np.ndarray], np.ndarray]) -> tuple[Change, Change]:
    def there(values: torch.Tensor) -> torch.Tensor:
        return values[torch.from_numpy(order(np.arange(len(values))))]

    def back(values: torch.Tensor) -> torch.Tensor:
        return values[torch.from_numpy(np.argsort(order(np.arange(len(values)))))]

    return there, back


def _keys(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """The configuration, as llama.cpp's converter writes it."""
    width, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or width // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    wide = ("intermediate_size", "ffn_hidden_size", "n_inner")
    writer.add_feed_forward_length(next(getattr(config, name) for name in wide if getattr(config, name, None)))
    writer.add_head_count(heads)
    if arch not in ("gpt2", "gptneox"):
        writer.add_head_count_kv(_key_heads(config))
    if arch in ("gpt2", "gptneox", "starcoder2", "falcon", "stablelm", "nemotron", "phi2", "command-r"):
        eps = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in eps if hasattr(config, name)))
    elif arch == "olmo":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if arch == "command-r":
        writer.add_logit_scale(config.logit_scale)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if dim != width // heads or arch.startswith("gemma"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if arch not in ("gpt2", "falcon"):
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if not arch.startswith("gemma"):
            writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss", "starcoder2") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    elif getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "gpt-oss" or hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.to_dict().get("rope_parameters", {}).get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def write(
    path: Path,
    model: nn.Module,
    arch: str,
    kind_of: Callable[[str], Type],
    tensors: Mapping[str, np.ndarray] | None = None,
    **more: Any,
) -> Written:
    """`kind_of` gives the type for a name of GGUF; vectors are f32. `tensors` and the keys `more` stand beside."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    _keys(writer, config, arch)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    for name, value in more.items():
        getattr(writer, name)(value)
    table = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    raw: dict[str, bytes] = {}
    names: dict[str, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            names[name] = pieces = _pieces(name, parameter, arch, table)
            for found, values in pieces.items():
                there, back = changes(name, arch, config)
                changed = np.ascontiguousarray(there(values).numpy())
                kind = kind_of(found) if values.ndim > 1 else Type.F32
                data = quantized(changed, kind)
                writer.add_tensor(found, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
                meant = gguf.quants.dequantize(data, kind) if kind != Type.F32 else data
                values.copy_(back(torch.from_numpy(np.array(meant, np.float32)).reshape(changed.shape)))
                raw[found] = data.tobytes()
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model, raw, names)
