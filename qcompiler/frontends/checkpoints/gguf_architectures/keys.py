"""What the keys of a GGUF file say about a model: sizes, heads, rotary positions, experts.

The functions return options of transformers' configurations.  What a file does not say, llama.cpp has in its code; each
such constant stands beside the model it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_files import GgufFile, Metadata

ROPE_FACTORS = "rope_freqs.weight"
"""The divisors of the rotary embedding's frequencies (Llama 3.1's scaling)."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same for longrope: for texts beyond the length that the model was first trained for, and for shorter ones."""
FREQUENCIES, LONGROPE = frozenset({ROPE_FACTORS}), frozenset({LONG_FACTORS, SHORT_FACTORS})


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

    def counts(self, key: str) -> list[int]:
        """A count for each layer, or one for all of them. WeightsError for anything else."""
        full = f"{self.architecture}.{key}"
        if isinstance(self.metadata.get(full), list | tuple):
            found = self.layers(full, int) or []
            if min(found) < 1:
                raise WeightsError(f"{self.file.path}: the key '{full}' is {shown(found)}, no numbers of things")
            return found
        return [self.count(key)] * self.blocks()

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

    def blocks(self) -> int:
        """The file's blocks. WeightsError for more than it has tensors: lists of that length are made of it."""
        found = self.count("block_count")
        if found > len(self.file.tensors):
            raise WeightsError(
                f"{self.file.path}: the key '{self.architecture}.block_count' is {found}, and the file has "
                f"{len(self.file.tensors)} tensors"
            )
        return found

    def model_layers(self) -> int:
        """The layers of the model: the file's blocks without those that predict further tokens."""
        found = self.blocks() - self.count("nextn_predict_layers", 0, least=0)
        if found < 1:
            raise WeightsError(
                f"{self.file.path}: the key '{self.architecture}.nextn_predict_layers' leaves none of "
                f"{self.blocks()} blocks to the model"
            )
        return found

    def refuse(self, key: str, *allowed: Any) -> None:
        """WeightsError for a key whose value changes results and that the model class cannot follow."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is not None and value not in allowed:
            raise WeightsError(
                f"{self.file.path}: the key '{self.architecture}.{key}' is {shown(value)}, which transformers' model "
                "cannot express; compile the folder that the file was made from"
            )

    def layers(self, full: str, kind: type) -> list[Any] | None:
        """The key `full` as a value of `kind` (bool, int or float) for each layer, with or without those that predict
        further tokens; None without the key.

        WeightsError for anything else."""
        value = self.metadata.get(full)
        if value is None:
            return None
        count = self.blocks()
        counts = (count, self.model_layers())
        if not isinstance(value, list | tuple) or len(value) not in counts or any(type(e) is not kind for e in value):
            raise WeightsError(
                f"{self.file.path}: the key '{full}' is {shown(value)}, and not {count} values of the type "
                f"{kind.__name__}, one for each layer"
            )
        return list(value)

    def flags(self, key: str) -> list[bool] | None:
        """A flag for each layer, which some converters write as 0 and 1; None without the key.

        WeightsError for anything else."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            numbers = self.layers(full, int) or []
            if not set(numbers) <= {0, 1}:
                raise WeightsError(f"{self.file.path}: the key '{full}' is {shown(value)}, no flags")
            return [bool(each) for each in numbers]
        return self.layers(full, bool)

    def rows(self, tensor: str) -> int:
        """The rows of a matrix. WeightsError if the file has no such matrix."""
        found = self.file.tensors.get(tensor)
        if found is None or len(found.shape) != 2:
            raise WeightsError(f"{self.file.path} lacks the matrix '{tensor}'")
        return found.shape[0]

    @property
    def metadata(self) -> Metadata:
        return self.file.metadata


def heads_of(keys: Keys) -> tuple[int, int, int]:
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


def even_heads(keys: Keys, model: str) -> tuple[int, int, int]:
    """As `heads_of`; WeightsError for heads that together are not as wide as the model."""
    heads, dim, width = heads_of(keys)
    if dim * heads != width:
        raise WeightsError(f"{keys.file.path}: {heads} heads of {dim} are not the width {width} of {model}")
    return heads, dim, width


def whole_heads(keys: Keys, model: str) -> tuple[int, int]:
    """The number of heads and the width, as `even_heads` checks them, of a model that rotates whole heads."""
    heads, dim, width = even_heads(keys, model)
    wholly_turned(keys, dim)
    return heads, width


def sizes(keys: Keys, heads: int, width: int) -> dict[str, Any]:
    """What configurations of models with RMS norms share."""
    return {
        **sizes_beside_norms(keys, heads, width),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
    }


def sizes_beside_norms(keys: Keys, heads: int, width: int, *, wide: str = "feed_forward_length") -> dict[str, Any]:
    """As `sizes`, without the epsilon of the norms; `wide` is the key for the width of the MLP."""
    return {
        "hidden_size": width,
        "intermediate_size": keys.count(wide),
        "num_hidden_layers": keys.model_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
    }


def sizes_of_layers(keys: Keys, heads: int, width: int) -> dict[str, Any]:
    """As `sizes`, for models whose files may give a list with one value per layer; the first value counts."""
    return {
        "hidden_size": width,
        "intermediate_size": keys.counts("feed_forward_length")[0],
        "num_hidden_layers": keys.model_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.counts("attention.head_count_kv")[0],
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.fp32("attention.layer_norm_rms_epsilon"),
    }


def turned(keys: Keys, dim: int, key: str = "rope.dimension_count") -> int:
    """How many numbers of each head are rotated."""
    turned = keys.count(key, dim)
    if turned > dim or turned % 2:
        raise WeightsError(f"{keys.file.path}: {keys.architecture}.{key} is {turned}, and heads have {dim}")
    return turned


def share(rotated: int, dim: int) -> float:
    """transformers' partial_rotary_factor for so many rotated numbers: it takes int(dim * factor)."""
    factor = rotated / dim
    return factor if int(dim * factor) == rotated else (rotated + 0.5) / dim


def wholly_turned(keys: Keys, dim: int) -> None:
    if keys.count("rope.dimension_count", dim) != dim:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.rope.dimension_count is {keys.number('rope.dimension_count')}, and "
            f"heads have {dim}"
        )


NEUTRAL_SCALING = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys of rope.scaling that change results, for which transformers has no parameter of the same meaning."""


def rope_of(keys: Keys, *, reads: tuple[str, ...] = ()) -> dict[str, Any]:
    """transformers' rope_parameters; WeightsError for an unsupported kind of scaling.

    `reads` names what the caller reads itself: keys of NEUTRAL_SCALING, "freq_base_swa", or "longrope".
    """
    has_factors = keys.has_tensor(LONG_FACTORS) or keys.has_tensor(SHORT_FACTORS)
    for name, neutral in NEUTRAL_SCALING.items():
        is_read = name in reads and (name != "attn_factor" or has_factors)
        if not is_read and float(keys.number(f"rope.scaling.{name}", neutral)) != neutral:
            raise WeightsError(
                f"{keys.file.path}: {keys.architecture}.rope.scaling.{name} is {keys.number(f'rope.scaling.{name}')}; "
                f"only {neutral:g} is supported. Compile the folder that the file was made from"
            )
    base = float(keys.number("rope.freq_base", 10000.0))
    keys.refuse("rope.scale_linear", 0, 1)
    keys.refuse("attention.causal", True)
    if "freq_base_swa" not in reads:
        keys.refuse("rope.freq_base_swa", base)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
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
    elif kind != "none" and not (kind == "longrope" and "longrope" in reads and has_factors):
        raise WeightsError(f"{keys.file.path}: rope.scaling.type is {shown(kind)}; supported are none, linear and yarn")
    return found


def partial_rope(keys: Keys, dim: int) -> dict[str, Any]:
    """As `rope_of`, for models that rotate a part of each head."""
    return {**rope_of(keys), "partial_rotary_factor": share(turned(keys, dim), dim)}


def experts_of(keys: Keys, option: str) -> dict[str, Any]:
    """How many experts there are, by the configuration's name for it, and how many of them serve a token."""
    return {option: keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def rms_options(keys: Keys, *, reads: tuple[str, ...] = ()) -> dict[str, Any]:
    """Llama, Mistral and the Qwen models with heads of any size. `reads` is as for `rope_of`."""
    heads, dim, width = heads_of(keys)
    wholly_turned(keys, dim)
    return {**sizes(keys, heads, width), "head_dim": dim, "rope_parameters": rope_of(keys, reads=reads)}


def attention_bias(keys: Keys) -> dict[str, Any]:
    """Whether the projections of attention have biases, as llama.cpp sees it: by the tensor."""
    return {"attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


def biases(keys: Keys) -> dict[str, Any]:
    return attention_bias(keys) | {"mlp_bias": keys.has_tensor("blk.0.ffn_down.bias")}


def longrope(keys: Keys, rotated: int, original: int) -> dict[str, Any]:
    """What the file's own divisors of frequencies change in rope_parameters: nothing if it has none. `original` is the
    length that the model was first trained for."""
    if not (keys.has_tensor(LONG_FACTORS) or keys.has_tensor(SHORT_FACTORS)):
        return {}
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": factors(keys.file, LONG_FACTORS, rotated // 2),
        "short_factor": factors(keys.file, SHORT_FACTORS, rotated // 2),
        "original_max_position_embeddings": original,
    }
    if keys.has("rope.scaling.attn_factor"):
        found["attention_factor"] = keys.fp32("rope.scaling.attn_factor")
    return found


def factors(file: GgufFile, name: str, count: int) -> list[float]:
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


def window(keys: Keys) -> dict[str, Any]:
    """The sliding window, if the file has one. Some converters write 0 for none."""
    found = keys.count("attention.sliding_window", 0, least=0)
    return {"sliding_window": found or None}


def layer_types(keys: Keys, period: int, *, whole_first: bool = False, required: bool = False) -> dict[str, Any]:
    """The window, and the type of each layer. Without a pattern in the file, one layer of each `period` has no window:
    the last, or with `whole_first` the first. WeightsError if a `required` window is missing."""
    layers, key = keys.model_layers(), "attention.sliding_window_pattern"
    if not required and not keys.count("attention.sliding_window", 0, least=0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    is_period = type(keys.metadata.get(f"{keys.architecture}.{key}")) is int
    pattern = None if is_period else keys.flags(key)
    if is_period:
        period = keys.count(key)
    if pattern is None:
        pattern = [each % period != (0 if whole_first else period - 1) for each in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern[:layers]]
    return {"sliding_window": keys.count("attention.sliding_window"), "layer_types": kinds}


def rope_of_windows(keys: Keys) -> dict[str, Any]:
    """Rotary positions of models whose layers with a window have a base of their own."""
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    return {
        "full_attention": rope_of(keys, reads=("freq_base_swa",)),
        "sliding_attention": {"rope_type": "default", "rope_theta": float(base)},
    }


def routing(keys: Keys, gating: str) -> None:
    """WeightsError unless the scores of experts are the `gating` that the model class computes."""
    kinds = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
    usual = {kind: number for number, kind in kinds.items()}
    number = keys.count("expert_gating_func", usual[gating])
    if kinds.get(number) != gating:
        raise WeightsError(
            f"{keys.file.path}: {keys.architecture}.expert_gating_func is {number} "
            f"({kinds.get(number, 'not known')}); this architecture is read with {gating} only"
        )


def expert_scale(keys: Keys) -> float:
    """What sums of experts are multiplied with. As in llama.cpp, 0 is none."""
    return keys.fp32("expert_weights_scale", 1.0) or 1.0
