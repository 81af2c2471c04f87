"""One architecture of GGUF files: transformers' classes for it, the names of its parameters, and their order of rows.

Sources: the names of gguf-py 0.19 (constants.py, tensor_mapping.py), what llama.cpp's converter changes in tensors, and
the values that llama.cpp's src/models fill in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import Order, transformers
from qcompiler.frontends.checkpoints.described_model import TensorTotals, configuration
from qcompiler.frontends.checkpoints.gguf_architectures.keys import Keys
from qcompiler.frontends.checkpoints.gguf_files import GgufFile

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
WHOLE = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
}
"""Parameters that are no module's `weight` or `bias`."""
LOGARITHM = "A_log"
"""A decay's logarithm, of which files hold -exp(A_log): the decay itself."""
JOINED = "in_proj_qkvz.weight"
"""Queries, keys, values and gates of delta nets, which files have in two tensors (`rows_of_key_heads`)."""
TIME_STEP = "dt_proj.weight"
"""Mamba multiplies the columns of a channel with it, as no linear does: codes of it are decoded."""
CONVOLUTION = "conv1d.weight"
"""The filters of a recurrence, which some files have in three tensors: of queries, keys and values."""
INDEX = "indexer.index_qk_proj.weight"
"""Queries and keys of an index, which files have in two tensors."""
LATENT = "self_attn.kv_b_proj.weight"
"""Keys and values of all heads from one short vector. Files hold the key matrix transposed: (heads, short, key)."""


def same_rows(name: str, rows: int, config: Any) -> Order | None:
    """For most architectures: rows are in transformers' order."""
    del name, rows, config
    return None


def rows_of_pairs(name: str, rows: int, config: Any) -> Order | None:
    """For architecture llama: files rotate neighbours, transformers rotates halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return None
    here = np.arange(rows).reshape(count, 2, rows // count // 2)  # [head, half, i] is the model's row
    return np.ascontiguousarray(here.swapaxes(1, 2)).reshape(-1)


def rows_by_part(name: str, rows: int, config: Any) -> Order | None:
    """For architecture gptneox: files hold the queries of all heads, then keys, then values; transformers those of one
    head after the other."""
    if ".query_key_value." not in name:
        return None
    heads = config.num_attention_heads
    here = np.arange(rows).reshape(heads, 3, rows // heads // 3)  # [head, part, i] is the model's row
    return np.ascontiguousarray(here.swapaxes(0, 1)).reshape(-1)


def rows_of_groups(name: str, rows: int, config: Any) -> Order | None:
    """For architecture falcon: files hold all queries, then keys, then values; transformers the queries, the key and
    the value of one group after the other."""
    if ".query_key_value." not in name:
        return None
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    here = np.arange(rows).reshape(groups, config.num_attention_heads // groups + 2, -1)  # [group, head, i]
    return np.concatenate([here[:, part].reshape(-1) for part in (slice(None, -2), -2, -1)])


def _tiled(config: Any, count: int) -> Order:
    """The model's place for each place of the file, of `count` numbers of value heads.

    In transformers' models the value heads of one key head are neighbours: [key, value, i].  Files hold the first one
    of every key head, then the second ones: [value, key, i]."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    here = np.arange(count).reshape(keys, values // keys, -1)
    return np.ascontiguousarray(here.swapaxes(0, 1)).reshape(-1)


_OF_VALUE_HEADS = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
_BEHIND_KEYS = ("in_proj_qkv.weight", "conv1d.weight")
"""Of Qwen 3.5's delta nets: rows that belong to value heads; rows of queries and keys, then those of values."""


def rows_of_tiles(name: str, rows: int, config: Any) -> Order | None:
    """For architecture qwen35: rows of value heads as `_tiled` has them."""
    inside = name.partition(".linear_attn.")[2]
    if inside in _OF_VALUE_HEADS:
        return _tiled(config, rows)
    if inside in _BEHIND_KEYS:
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate([np.arange(before), before + _tiled(config, rows - before)])
    return None


def columns_of_tiles(name: str, columns: int, config: Any) -> Order | None:
    """For architecture qwen35: the output's weight reads the value heads in the file's order."""
    return _tiled(config, columns) if name.endswith(".linear_attn.out_proj.weight") else None


def rows_of_key_heads(config: Any) -> list[Order]:
    """For architecture qwen3next: the model's rows for `attn_qkv` and for `attn_gate`.

    The model has queries, key, values and gates of one key head after the other; files have queries of all heads, then
    keys, then values, and gates in a tensor of their own."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // heads * config.linear_value_head_dim
    here = np.arange(heads * 2 * (dim + wide)).reshape(heads, -1)  # [key head, row]
    q, k, v, z = np.split(here, [dim, 2 * dim, 2 * dim + wide], axis=1)
    return [np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)]


def no_factor(name: str, size: int, config: Any) -> float:
    """For most architectures: files have the model's numbers."""
    del name, size, config
    return 1.0


def factor_of_latent_norms(name: str, size: int, config: Any) -> float:
    """For architecture dots3note: the model multiplies its short vectors with a factor that follows from their size,
    which files have in the norms before."""
    is_latent = name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight"))
    return math.sqrt(config.hidden_size / size) if is_latent else 1.0


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF: the transformers classes, the names of its parameters, and how its tensors differ."""

    model: str
    config: str
    options: Callable[[Keys], dict[str, Any]]
    """The options of the configuration class."""
    layers: str = "model.layers."
    top: Mapping[str, str] = field(default_factory=lambda: TOP, repr=False)
    inside: Mapping[str, str] = field(default_factory=lambda: INSIDE, repr=False)
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: WHOLE, repr=False)
    """Parameters and buffers that are no module's `weight` or `bias`: the tensors that they consist of. By the name in
    a layer, or by the whole name."""
    stacked: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Lists of equal modules, whose weights the file has one after the other in one tensor."""
    in_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Parameters of one number, which files keep in a key, for each layer."""
    lists: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Buffers of whole numbers, which files keep in a key, for the one layer that has them."""
    tables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Buffers of whole numbers below an attribute of the configuration, which files have as a tensor."""
    rows: Callable[[str, int, Any], Order | None] = same_rows
    """The model's row for each row of the file, by parameter, rows and configuration; None if the order is the same."""
    columns: Callable[[str, int, Any], Order | None] = same_rows
    """The same for columns."""
    factor: Callable[[str, int, Any], float] = no_factor
    """What a parameter's numbers are multiplied with in the file, by parameter, its last size and configuration."""
    one_in_norms: bool = False
    """Whether the file's norms contain the 1 that transformers' model adds to them (but for norms with a gate)."""
    beside: frozenset[str] = frozenset()
    """Tensors that are no parameters."""
    transposed: bool = False
    """Whether transformers keeps linears as (in, out), in `Conv1D`. The file has (out, in), as everywhere."""
    experts: Literal["", "alternating", "halves", "matrices"] = ""
    """How transformers keeps experts as (experts, in, out): outputs of gate and up by turns, or those of gate first; or
    as matrices (experts · inner, outer), whatever the direction.  "": it keeps them as (experts, out, in), as the file
    does."""

    def names(self, parameter: str) -> tuple[str, ...]:
        """GGUF's names for the parts of a parameter. WeightsError if it has no name for it."""
        module, _, kind = parameter.rpartition(".")
        if module in self.top:
            return (f"{self.top[module]}.{kind}",)
        if parameter in self.whole:
            return self.whole[parameter]
        number, inside = self.place(parameter)
        if inside in self.whole:
            return tuple(f"blk.{number}.{part}" for part in self.whole[inside])
        part = self.inside.get(inside.rpartition(".")[0])
        if part is None:
            raise WeightsError(f"the parameter '{parameter}' of {self.model} has no name in GGUF files")
        return (f"blk.{number}.{part}.{kind}",)

    def slice_of(self, parameter: str) -> tuple[str, int] | None:
        """The tensor of a list of modules and the parameter's number in it; None for other parameters."""
        modules, _, number = parameter.removesuffix(".weight").rpartition(".")
        return (self.stacked[modules], int(number)) if modules in self.stacked else None

    def place(self, parameter: str) -> tuple[str, str]:
        """The number of a parameter's layer, and its name inside of the layer."""
        number, _, inside = parameter.removeprefix(self.layers).partition(".")
        return number, inside

    def offset(self, parameter: str) -> float:
        """The number to add to the file's tensor to get transformers' parameter."""
        is_norm = parameter.endswith("norm.weight") or ".ple.norm_" in parameter
        is_changed = is_norm and not parameter.endswith("linear_attn.norm.weight")
        return -1.0 if self.one_in_norms and is_changed else 0.0


def configured(architecture: Architecture, keys: Keys, held: TensorTotals) -> Any:
    """The configuration of the model. WeightsError names the key, or what transformers' class refuses."""
    file, options = keys.file, architecture.options(keys)
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path} lacks the tensor 'token_embd.weight'")
    table = file.tensors["token_embd.weight"].shape
    if len(table) != 2:
        raise WeightsError(f"{file.path}: 'token_embd.weight' has the shape {list(table)}, which is no table")
    tokens = {
        f"{kind}_token_id": _token(file, f"tokenizer.ggml.{key}_token_id")
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    options = {
        **tokens, **options, "vocab_size": table[0], "tie_word_embeddings": "output.weight" not in file.tensors
    }  # fmt: skip
    kind = getattr(transformers(), architecture.config)
    return configuration(kind, {"model_type": kind.model_type, **options}, file.path, held)


def _token(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and type(value) is not int:
        raise WeightsError(f"{file.path}: the key '{key}' is {shown(value)}, no token")
    return value
