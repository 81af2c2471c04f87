"""GGUF files of small random models, written by the `gguf` package, and the models that their tensors mean.

These are of the architectures llama, qwen2, qwen3 and phi3, with any sizes; recorded.py has every architecture, with
the sizes of a record.
"""

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
    if kind in ("Qwen2", "Phi3"):
        sizes.pop("head_dim")
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.use_cache = False
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.uniform_(0.7, 1.3)
    return model


def rows_for_llama_cpp(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q and k: the halves of a head become neighbours."""
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


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


def _pieces(name: str, parameter: torch.Tensor, table: gguf.TensorNameMap) -> dict[str, torch.Tensor]:
    """What of a parameter has which name; of gate and up, which transformers joins, one each."""
    number, _, inside = name.removeprefix("model.layers.").partition(".")
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
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if arch == "llama" and count:
        return _moved(lambda rows: rows_for_llama_cpp(rows, count))
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
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if dim != width // heads:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if arch == "phi3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


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
            names[name] = pieces = _pieces(name, parameter, table)
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
