"""`from_gguf`: the model that a GGUF file describes, with the file's own codes as its weights.

    llama.block_count, llama.attention.head_count, …      LlamaConfig; with llama.expert_count MixtralConfig
    blk.3.attn_q.weight           (q4_K)                  model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_gate_exps.weight    (experts, rows, cols)   model.layers.3.mlp.experts.gate_up_proj, with ffn_up_exps

llama.cpp rotates pairs of neighbours where transformers rotates halves.  So its files of arch llama hold the rows of q
and k in another order: row (head, i, half) there is row (head, half, i) here.  In every format of GGUF a row consists
of whole blocks, so codes move and do not change.

Sources: the names of gguf-py 0.19 (tensor_mapping.py), the order of rows and the meaning of `rope_freqs` from
llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qcompiler.errors import WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import (
    Checkpoint,
    CodesInFile,
    Order,
    ValuesInFile,
    gathered,
    transformers,
)
from qcompiler.frontends.checkpoints.described_model import TensorTotals, configuration, hollow, model_class
from qcompiler.frontends.checkpoints.gguf_files import FLOATS, GgufFile, GgufTensor, Metadata, type_name
from qcompiler.frontends.weights.weight_source import FileWeights, InFile, StoredCodes

_TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of plain values of weights, by GGUF's number of the type."""

ROPE_FACTORS = "rope_freqs.weight"
"""The divisors of the rotary embedding's frequencies (Llama 3.1's scaling)."""


@dataclass(frozen=True)
class _Architecture:
    """The transformers classes of an architecture of GGUF, and facts that its files lack."""

    model: str
    config: str
    permuted: bool = False
    """Whether rows of q and k are in llama.cpp's order."""
    head_dim: bool = True
    """Whether the configuration has one."""
    bias: bool = False
    """Whether the configuration has fields for the biases of attention and MLP."""


_LLAMA = _Architecture("LlamaForCausalLM", "LlamaConfig", permuted=True, bias=True)
_MISTRAL = _Architecture("MistralForCausalLM", "MistralConfig", permuted=True)
_MIXTRAL = _Architecture("MixtralForCausalLM", "MixtralConfig", permuted=True)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": _Architecture("Qwen2ForCausalLM", "Qwen2Config", head_dim=False),
    "qwen3": _Architecture("Qwen3ForCausalLM", "Qwen3Config", bias=True),
}

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}


def from_gguf(path: str | Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """The model of a GGUF file: Llama, Mistral and Mixtral (arch llama), Qwen2, Qwen3.

    Quantised tensors keep their codes, byte for byte; they are mapped, and never decoded as a whole.  `dtype` is the
    model's compute type, to which plain tensors are converted: by default bf16 or fp16 if most elements of the file's
    matrices have that type, else fp32.

    WeightsError for a damaged file (`GgufFile`), an architecture or a key that is not known, and for tensors that are
    missing, unexpected, or of a wrong shape.
    """
    file = GgufFile(path)
    name = _required(file, "general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise WeightsError(
            f"{file.path} is of the architecture {shown(name)}; there are: {', '.join(ARCHITECTURES)}. Other models: "
            "build the module yourself, and give its weights as safetensors (docs/large-models.md)"
        )
    keys = _Keys(file, name)
    architecture = _architecture(name, keys)
    held = TensorTotals.of((tensor.shape, tensor.nbytes) for tensor in file.tensors.values())
    config = _config(file, keys, architecture, held)
    model = model_class(architecture.model, file.path)
    module = hollow(model, config, dtype if dtype is not None else _most(file), file.path, held)
    _scale_frequencies(file, module)
    tensors = _Names(file, config, architecture).tensors(module)
    return Checkpoint(module, GgufWeights(file, tensors), config, file.path)


class GgufWeights(FileWeights):
    """The tensors of a GGUF file under the names of a transformers model."""

    def __init__(self, file: GgufFile, tensors: Mapping[str, InFile]) -> None:
        super().__init__(file.path, tensors)
        self.file = file


# --- the configuration -----------------------------------------------------------------------------------------------


def _required(file: GgufFile, key: str) -> Any:
    if key not in file.metadata:
        raise WeightsError(f"{file.path} lacks the key '{key}'; it may be no file of a language model")
    return file.metadata[key]


@dataclass(frozen=True)
class _Keys:
    """The keys of one architecture: `llama.block_count` is `block_count`."""

    file: GgufFile
    architecture: str

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; WeightsError if it is missing without a default, or not a single number."""
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default) if default is not None else _required(self.file, full)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise WeightsError(
                f"{self.file.path}: the key '{full}' is {shown(value)}, no number; models whose layers differ are not "
                "read"
            )
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A count of at least `least`; WeightsError for anything else. `check_sizes` refuses counts that are too
        large."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < least:
            raise WeightsError(f"{self.file.path}: the key '{self.architecture}.{key}' is {value}, no number of things")
        return value

    def text(self, key: str) -> str | None:
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is not None and not isinstance(value, str):
            raise WeightsError(f"{self.file.path}: the key '{self.architecture}.{key}' is {shown(value)}, no text")
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    @property
    def metadata(self) -> Metadata:
        return self.file.metadata


def _architecture(name: str, keys: _Keys) -> _Architecture:
    if name == "llama" and keys.count("expert_count", 0, least=0):
        return _MIXTRAL
    if name == "llama" and keys.has("attention.sliding_window"):
        return _MISTRAL
    return ARCHITECTURES[name]


def _config(file: GgufFile, keys: _Keys, architecture: _Architecture, held: TensorTotals) -> Any:
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path} lacks the tensor 'token_embd.weight'")
    dim = keys.count("attention.key_length", max(width // heads, 1))
    if dim % 2:
        raise WeightsError(f"{file.path}: heads of {dim}: rotary positions need an even size")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, dim) != dim:
            raise WeightsError(f"{file.path}: {keys.architecture}.{key} is {keys.number(key)}, and heads have {dim}")
    table = file.tensors["token_embd.weight"].shape
    if len(table) != 2:
        raise WeightsError(f"{file.path}: 'token_embd.weight' has the shape {list(table)}, which is no table")
    options: dict[str, Any] = {
        "vocab_size": table[0],
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": float(np.float32(keys.number("attention.layer_norm_rms_epsilon"))),
        "rope_parameters": _rope(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{
            f"{kind}_token_id": _token(file, f"tokenizer.ggml.{key}_token_id")
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }
    if architecture.head_dim:
        options["head_dim"] = dim
    elif dim * heads != width:
        raise WeightsError(f"{file.path}: {heads} heads of {dim} are not the width {width} of {architecture.model}")
    if architecture.bias:
        options["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture is _LLAMA:
        options["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if architecture is _MISTRAL or (architecture is _MIXTRAL and keys.has("attention.sliding_window")):
        options["sliding_window"] = keys.count("attention.sliding_window")
    if architecture is _MIXTRAL:
        options["num_local_experts"] = keys.count("expert_count")
        options["num_experts_per_tok"] = keys.count("expert_used_count")
    kind = getattr(transformers(), architecture.config)
    return configuration(kind, {"model_type": kind.model_type, **options}, file.path, held)


def _token(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and type(value) is not int:
        raise WeightsError(f"{file.path}: the key '{key}' is {shown(value)}, no token")
    return value


def _rope(keys: _Keys) -> dict[str, Any]:
    """transformers' rope_parameters; WeightsError for an unsupported kind of scaling."""
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
    elif kind != "none":
        raise WeightsError(f"{keys.file.path}: rope.scaling.type is {shown(kind)}; supported are none, linear and yarn")
    return found


def _scale_frequencies(file: GgufFile, module: nn.Module) -> None:
    """Divides the rotary embedding's frequencies by the file's factors, if it has them."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return
    rotary: Any = module.get_submodule("model.rotary_emb")
    if tensor.shape != tuple(rotary.inv_freq.shape):
        raise WeightsError(
            f"'{ROPE_FACTORS}' in {file.path} has the shape {list(tensor.shape)}, the model {rotary.inv_freq.numel()} "
            "frequencies"
        )
    factors = torch.from_numpy(tensor.values().copy())
    if not bool(torch.isfinite(1 / factors).all()):
        raise WeightsError(f"'{ROPE_FACTORS}' in {file.path} holds a factor that is zero or not finite")
    rotary.inv_freq = rotary.inv_freq / factors
    rotary.original_inv_freq = rotary.inv_freq.clone()


def _most(file: GgufFile) -> torch.dtype:
    """bf16 or fp16 if most elements of the matrices are; else fp32."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            dtype = _TORCH.get(tensor.type, torch.float32)
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


# --- the tensors -----------------------------------------------------------------------------------------------------


def names_in_file(name: str, model: str) -> tuple[str, ...]:
    """GGUF's names for the parts of a parameter of a model class. WeightsError if it has no name for it."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return (f"{_TOP[module]}.{kind}",)
    number, _, inside = name.removeprefix("model.layers.").partition(".")
    if inside in _EXPERTS:
        return tuple(f"blk.{number}.{part}" for part in _EXPERTS[inside])
    part = _IN_LAYER.get(inside.rpartition(".")[0])
    if part is None:
        raise WeightsError(f"the parameter '{name}' of {model} has no name in GGUF files")
    return (f"blk.{number}.{part}.{kind}",)


def rows_in_model(name: str, rows: int, config: Any) -> Order | None:
    """For architecture llama: the model's row for each row of the file; None if the order is the same."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return None
    here = np.arange(rows).reshape(count, 2, rows // count // 2)  # [head, half, i] is the model's row
    return np.ascontiguousarray(here.swapaxes(1, 2)).reshape(-1)


@dataclass(frozen=True)
class _Names:
    """Maps parameters of the model to tensors of the file, with the order of their rows."""

    file: GgufFile
    config: Any
    architecture: _Architecture

    def tensors(self, module: nn.Module) -> dict[str, InFile]:
        """By parameter. WeightsError for tensors that no parameter reads, and for parameters without tensors."""
        found: dict[str, InFile] = {}
        used: set[str] = {ROPE_FACTORS}
        for name, parameter in module.named_parameters():  # tied ones once
            parts = self._parts(name)
            used.update(parts)
            missing = [part for part in parts if part not in self.file.tensors]
            if missing:
                raise WeightsError(f"{self.file.path} lacks '{missing[0]}', the parameter '{name}' of the model")
            tensors = [self.file.tensors[part] for part in parts]
            _check_shape(self.file, name, tuple(parameter.shape), tensors)
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                orders = self._expert_orders(tensors)
            else:
                orders = [self._order(name, tensors[0])]
            found[name] = _item(name, tuple(parameter.shape), tensors, orders)
        extra = sorted(set(self.file.tensors) - used)
        if extra:
            raise WeightsError(
                f"{self.file.path} holds {len(extra)} tensors that {self.architecture.model} does not have: "
                + ", ".join(map(shown, extra[:10]))
            )
        return found

    def _parts(self, name: str) -> tuple[str, ...]:
        return names_in_file(name, self.architecture.model)

    def _order(self, name: str, tensor: GgufTensor) -> Order | None:
        return rows_in_model(name, tensor.shape[0], self.config) if self.architecture.permuted else None

    def _expert_orders(self, tensors: list[GgufTensor]) -> list[Order | None]:
        """The orders that put gate and up of each expert one after the other."""
        if len(tensors) == 1:
            return [None]
        experts, rows = tensors[0].shape[:2]
        places = np.arange(experts * 2 * rows).reshape(experts, 2, rows)
        return [np.ascontiguousarray(places[:, part]).reshape(-1) for part in range(2)]


def _check_shape(file: GgufFile, name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> None:
    """WeightsError unless the parts, concatenated along the last but one dimension, have the model's shape."""
    first = tensors[0].shape
    fits = all(len(t.shape) == len(shape) and t.shape == first for t in tensors)
    joined = first if len(tensors) == 1 or not fits else (*first[:-2], sum(t.shape[-2] for t in tensors), first[-1])
    if not fits or joined != shape:
        raise WeightsError(
            f"{' and '.join(f'{t.name!r}' for t in tensors)} in {file.path} has the shape "
            f"{' and '.join(str(list(t.shape)) for t in tensors)}, and '{name}' of the model {list(shape)}"
        )


def _item(name: str, shape: tuple[int, ...], tensors: list[GgufTensor], orders: list[Order | None]) -> InFile:
    kinds = {tensor.type for tensor in tensors}
    if len(kinds) > 1:
        raise WeightsError(
            f"'{name}' of the model is {' and '.join(t.name for t in tensors)} in {tensors[0].file.path}, of different "
            f"types ({', '.join(type_name(k) for k in sorted(kinds))}); quantise both to one type"
        )

    def identity() -> dict[str, Any]:
        return {"parts": [tensor.identity() for tensor in tensors]}

    def release() -> None:
        for tensor in tensors:
            tensor.release()

    fmt = tensors[0].format
    if fmt is not None:
        codes = _codes(fmt, math.prod(shape[:-1]), shape[-1], tensors, orders)
        return CodesInFile(name, shape, codes, identity, release)
    number = tensors[0].type
    if number not in _TORCH:
        raise WeightsError(
            f"'{tensors[0].name}' in {tensors[0].file.path} is {FLOATS[number].name}, which no weight is"
        )
    return ValuesInFile(name, shape, _TORCH[number], _values(number, tensors, orders), identity, release)


def _codes(fmt: Format, rows: int, cols: int, tensors: list[GgufTensor], orders: list[Order | None]) -> StoredCodes:
    where = f"{tensors[0].file.path} ({' and '.join(tensor.name for tensor in tensors)})"
    if len(tensors) == 1 and orders[0] is None:
        return StoredCodes(where, fmt, rows, cols, tensors[0].packed, mapped=True)

    def read() -> PackedTensor:
        return gathered(fmt, cols, [(t.packed(), order) for t, order in zip(tensors, orders, strict=True)])

    return StoredCodes(where, fmt, rows, cols, read)


def _values(number: int, tensors: list[GgufTensor], orders: list[Order | None]) -> Callable[[], torch.Tensor]:
    """Plain values: a view of the file, or a copy with rows in the model's order."""

    def rows_of(tensor: GgufTensor) -> torch.Tensor:
        bytes_ = torch.from_numpy(tensor.bytes()).view(_TORCH[number])
        return bytes_.reshape(tensor.shape[0], -1) if len(tensor.shape) == 1 else bytes_.reshape(-1, tensor.cols)

    def make() -> torch.Tensor:
        if len(tensors) == 1 and orders[0] is None:
            return rows_of(tensors[0])
        made = torch.empty(
            sum(tensor.rows if len(tensor.shape) > 1 else tensor.shape[0] for tensor in tensors),
            tensors[0].cols if len(tensors[0].shape) > 1 else 1,
            dtype=_TORCH[number],
        )
        for tensor, order in zip(tensors, orders, strict=True):
            made[slice(None) if order is None else torch.from_numpy(order)] = rows_of(tensor)
        return made

    return make


__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "GgufWeights", "from_gguf", "names_in_file", "rows_in_model"]
