"""Builds the model that a file describes, without values, and never larger than the file can fill.

A configuration is a few numbers, and each may be 2^62: building that many layers would kill the machine.  So

* every integer in it is bounded by the largest dimension of the files' tensors (or a limit for context lengths),
* counts that must be positive are, and no number is NaN or infinite,
* while the model is built, its parameters are counted, and the build stops if they exceed what the files can hold.

transformers may raise any error for other odd values; this module turns the errors of its configurations and
constructors into WeightsErrors, in one place.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import transformers
from qcompiler.frontends.torch.common.empty_weights import Room, empty_weights

PACKING = 32
"""Maximum elements per stored number: the bits of a word of codes, of which each has at least one bit."""
LEAST_SIZE = 1 << 16
"""Integers up to this are allowed whatever the file holds: kernels of a convolution, numbers of tokens, flags."""
LONGEST_CONTEXT = 1 << 25
"""Maximum context length in tokens, and rows of a table of n-grams. Llama 4 has 10,485,760, Qwen 4 20,000,000."""
MORE_PARAMETERS = 64
"""Parameters that a model may have in addition to those in the files: tied ones."""
MAX_DEPTH = 16
MAX_VALUES = 100_000
"""Maximum values in a configuration: transformers writes and compares it as text. ImageNet-21k has 44,000 labels."""

_CONTEXTS = re.compile(r"position|context|ctx|length|seq|window|token|_id(s|x)?$|seed|ngram")

_COUNTS = re.compile(
    r"(num|n)_(attention_|key_value_|kv_|query_|decoder_attention_|encoder_attention_)?heads?(_kv)?|vocab_size"
    r"|hidden_size|n_embd|d_model|(original_)?max_position_embeddings|n_positions"
)
"""Keys of counts that are 1 or more. Other counts are 0 in some published configurations."""
_POSITIVE = re.compile(
    r"rope_theta|rope_local_base_freq|rotary_emb_base|factor|(low|high)_freq_factor|(short|long)_factor"
)
_NOT_NEGATIVE = re.compile(r"(.*_)?(eps|epsilon)|head_dim")
"""GLM 5 Next has a head_dim of 0: no column of its heads is rotated."""
_INFINITE = re.compile(r".*limit")
"""Keys whose value may be infinite: time_step_limit is, in published configurations."""

_IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
"""Keys that say how a model computes, and not what."""

_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
    ImportError, OSError, NameError, MemoryError,
)  # fmt: skip
"""Errors of transformers and torch for values that make no model: dtypes and shapes that torch refuses, names missing
in a table, packages that a model class needs.  `_errors` adds huggingface_hub's own."""


@dataclass(frozen=True)
class TensorTotals:
    """The tensors of a file: their number, the largest dimension, and their bytes."""

    tensors: int
    largest: int
    nbytes: int

    @staticmethod
    def of(tensors: Iterable[tuple[tuple[int, ...], int]]) -> TensorTotals:
        """From shapes and bytes."""
        known = list(tensors)
        largest = max((max(shape, default=1) for shape, _ in known), default=1)
        return TensorTotals(len(known), largest, sum(nbytes for _, nbytes in known))

    @property
    def largest_size(self) -> int:
        return max(LEAST_SIZE, PACKING * self.largest)

    def room(self, where: Path) -> Room:
        """The limits of a model with these tensors: every code has at least one bit."""
        parameters, elements = self.tensors + MORE_PARAMETERS, 8 * self.nbytes + LEAST_SIZE
        return Room(
            parameters,
            elements,
            f"the configuration in {where} describes a model of more than {parameters} parameters or {elements:,} "
            f"elements, and its files hold {self.tensors} tensors of {self.nbytes:,} bytes: some of them "
            "are missing, or they are another model's",
        )


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub import errors

    return (*_ERRORS, errors.StrictDataclassError)


def check_numbers(described: Mapping[str, Any], where: Path, held: TensorTotals) -> None:
    """WeightsError, with its name, for a number that no model with these tensors can have."""
    for count, (name, value) in enumerate(_values(described, "", 0, where)):
        if count > MAX_VALUES:
            raise WeightsError(f"{where} holds more than {MAX_VALUES:,} values; that is no configuration")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        wrong = _wrong(name.rpartition(".")[2], value)
        if wrong is not None:
            raise WeightsError(f"{where} says {name} is {shown(value)}, and it must be {wrong}: correct it in the file")
        limit = LONGEST_CONTEXT if _CONTEXTS.search(name) else held.largest_size
        if isinstance(value, int) and abs(value) > limit:
            raise WeightsError(
                f"{where} says {name} is {shown(value)}; its tensors have dimensions up to {held.largest:,}, and so "
                f"the limit is {limit:,}"
            )


def _wrong(key: str, value: float) -> str | None:
    """What a value of this key must be, if this one is not."""
    if isinstance(value, float) and not math.isfinite(value) and (math.isnan(value) or not _INFINITE.fullmatch(key)):
        return "a finite number"
    if _COUNTS.fullmatch(key) and value < 1:
        return "1 or more"
    if _POSITIVE.fullmatch(key) and value <= 0:
        return "above 0"
    if _NOT_NEGATIVE.fullmatch(key) and value < 0:
        return "0 or more"
    return None


def _values(value: Any, name: str, depth: int, where: Path) -> Iterator[tuple[str, Any]]:
    """All values with the path of their keys; the values of nested lists and objects follow."""
    value = _number(value)
    yield name, value
    if depth > MAX_DEPTH:
        raise WeightsError(f"{where} is nested deeper than {MAX_DEPTH} at {name[:100]}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key != "quantization_config":
                yield from _values(item, f"{name}.{key}".strip("."), depth + 1, where)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _values(item, name, depth + 1, where)


def configuration(kind: Any, described: Mapping[str, Any], where: Path, held: TensorTotals) -> Any:
    """An instance of the configuration class `kind`. WeightsError names what the class refuses."""
    check_numbers(described, where, held)
    try:
        return kind.from_dict(_as_transformers_takes_it(described))
    except _errors() as error:
        raise _refused(where, f"{kind.__name__} refuses the configuration", error) from error


_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _number(value: Any) -> Any:
    """The number that transformers writes as an object, since JSON has none for it: {"__float__": "Infinity"}."""
    if isinstance(value, Mapping) and set(value) == {"__float__"} and isinstance(value["__float__"], str):
        return _TAGGED.get(value["__float__"], value)
    return value


def _as_transformers_takes_it(value: Any) -> Any:
    """A configuration, and those inside of it, with numbers for what stands for them, and without names of kernels.

    transformers takes such a name for a repository, and would download its code and run it.
    """
    value = _number(value)
    if isinstance(value, list):
        return [_as_transformers_takes_it(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: each if key == "quantization_config" else _as_transformers_takes_it(each)
        for key, each in value.items()
        if not _IMPLEMENTATIONS.fullmatch(str(key))
    }


def model_class(name: Any, where: Path) -> Any:
    """The class of transformers with that name. WeightsError if it is not one of its models."""
    found = None
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
        try:
            found = getattr(transformers(), name, None)
        except _errors() as error:  # its module needs a missing package
            raise _refused(where, f"the model class {name} cannot be imported", error) from error
    if not (isinstance(found, type) and issubclass(found, transformers().PreTrainedModel)):
        raise WeightsError(f"{where} names the architecture {shown(name)}; transformers has to know it as a model")
    return found


def config_class(name: Any, where: Path) -> Any:
    """The configuration class of a `model_type`. WeightsError for one that transformers does not know.

    Code in a checkpoint (`auto_map`) is never used.
    """
    known = transformers().CONFIG_MAPPING
    if not isinstance(name, str) or name not in known:
        raise WeightsError(f"{where} says model_type is {shown(name)}, which transformers does not know")
    try:
        return known[name]
    except _errors() as error:
        raise _refused(where, f"the configuration class of {name} cannot be imported", error) from error


def hollow(model: Any, config: Any, dtype: torch.dtype, where: Path, held: TensorTotals) -> nn.Module:
    """A model of that class without values, ready to compile. WeightsError if the configuration describes none."""
    config.use_cache = False  # programs return tensors
    config.dtype = dtype
    try:
        with empty_weights(held.room(where)):
            module: nn.Module = model(config)
        computed = [(m, name, m._buffers[name]) for m in module.modules() for name in m._non_persistent_buffers_set]
        module = module.eval().to(dtype)
        _keep_in_fp32(module, dtype)
    except _errors() as error:
        raise _refused(where, f"{model.__name__} cannot be built from the configuration", error) from error
    for owner, name, buffer in computed:  # rotary frequencies keep their precision, as in from_pretrained
        owner._buffers[name] = buffer
    generation = getattr(module, "generation_config", None)
    if generation is not None:  # a call makes no cache of its own, but a wrapper with a static cache may
        generation.use_cache = True
    return module


def _keep_in_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers that transformers keeps in fp32 whatever the model's type is, such as the biases by which
    DeepSeek's routers choose experts."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    parts = {part for each in module.modules() for kind in lists for part in getattr(each, kind, None) or ()}
    if not parts:
        return
    named = re.compile("|".join(rf"(?:^|\.){part}(?:$|\.)" for part in sorted(parts)))
    for path, owner in module.named_modules():
        for kept in (owner._parameters, owner._buffers):
            for name, tensor in kept.items():
                if tensor is None or tensor.dtype != dtype or not named.search(f"{path}.{name}"):
                    continue
                wide = tensor.detach().float()
                is_parameter = isinstance(tensor, nn.Parameter)
                kept[name] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide


def _refused(where: Path, what: str, error: BaseException) -> WeightsError:
    text = " ".join(str(error).split())
    return WeightsError(f"{where}: {what}: {type(error).__name__}: {text[:300]}")


__all__ = ["TensorTotals", "check_numbers", "config_class", "configuration", "hollow", "model_class"]
