"""The model that a file describes, built without values, and never larger than the file can fill.

A configuration is a few numbers, and each can be 2^62: a list of so many layers ends a machine.  So

* every integer of it is bounded by the largest dimension that the files' tensors have (or a context length's limit),
* while the model is built, its parameters are counted, and more than the files can hold end it.

What transformers makes of other values is its own affair: the errors that its configurations and constructors raise for
them become WeightsErrors here, in one place.
"""

from __future__ import annotations

import functools
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
"""Most elements that share one stored number: bits of a word of codes, of which none has less than one."""
LEAST_SIZE = 1 << 16
"""Integers up to here are fine whatever the file holds: kernels of a convolution, numbers of tokens, flags."""
LONGEST_CONTEXT = 1 << 24
"""Tokens. Llama 4 says 10,485,760."""
MORE_PARAMETERS = 64
"""Parameters that a model may have beside those that the files name: tied ones."""
MAX_DEPTH = 16
MAX_VALUES = 100_000
"""In a configuration: transformers writes and compares it as text. Labels of ImageNet-21k are 44,000."""

_CONTEXTS = re.compile(r"position|context|ctx|length|seq|window|token|_id(s|x)?$|seed")

_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
    ImportError, OSError, NameError, MemoryError,
)  # fmt: skip
"""What transformers and torch raise for values that make no model: dtypes and shapes that torch refuses, names that no
table has, packages that a model class would need.  `_errors` adds huggingface_hub's own."""


@dataclass(frozen=True)
class Held:
    """What the tensors of a file are: their number, the largest dimension, and their bytes."""

    tensors: int
    largest: int
    nbytes: int

    @staticmethod
    def of(tensors: Iterable[tuple[tuple[int, ...], int]]) -> Held:
        """Of shapes and bytes."""
        known = list(tensors)
        largest = max((max(shape, default=1) for shape, _ in known), default=1)
        return Held(len(known), largest, sum(nbytes for _, nbytes in known))

    @property
    def largest_size(self) -> int:
        return max(LEAST_SIZE, PACKING * self.largest)

    def room(self, where: Path) -> Room:
        """What a model of these tensors may have: no code has less than a bit."""
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


def check_sizes(described: Mapping[str, Any], where: Path, held: Held) -> None:
    """WeightsError for an integer that no model of these tensors has, by its name."""
    for count, (name, value) in enumerate(_values(described, "", 0, where)):
        if count > MAX_VALUES:
            raise WeightsError(f"{where} holds more than {MAX_VALUES:,} values; that is no configuration")
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        limit = LONGEST_CONTEXT if _CONTEXTS.search(name) else held.largest_size
        if abs(value) > limit:
            raise WeightsError(
                f"{where} says {name} is {shown(value)}; its tensors have dimensions up to {held.largest:,}, and so "
                f"the limit is {limit:,}"
            )


def _values(value: Any, name: str, depth: int, where: Path) -> Iterator[tuple[str, Any]]:
    """All values with the path of their keys, those of lists and objects behind them."""
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


def configuration(kind: Any, described: Mapping[str, Any], where: Path, held: Held) -> Any:
    """An instance of the configuration class `kind`. WeightsError names what it refuses."""
    check_sizes(described, where, held)
    try:
        return kind.from_dict(dict(described))
    except _errors() as error:
        raise _refused(where, f"{kind.__name__} refuses the configuration", error) from error


def model_class(name: Any, where: Path) -> Any:
    """The class of transformers with that name. WeightsError for what is none of its models."""
    found = None
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
        try:
            found = getattr(transformers(), name, None)
        except _errors() as error:  # its module needs a package that is not there
            raise _refused(where, f"the model class {name} cannot be imported", error) from error
    if not (isinstance(found, type) and issubclass(found, transformers().PreTrainedModel)):
        raise WeightsError(f"{where} names the architecture {shown(name)}; transformers has to know it as a model")
    return found


def config_class(name: Any, where: Path) -> Any:
    """The configuration class of a `model_type`. WeightsError for one that transformers does not know.

    Code that a checkpoint brings (`auto_map`) is never looked at.
    """
    known = transformers().CONFIG_MAPPING
    if not isinstance(name, str) or name not in known:
        raise WeightsError(f"{where} says model_type is {shown(name)}, which transformers does not know")
    try:
        return known[name]
    except _errors() as error:
        raise _refused(where, f"the configuration class of {name} cannot be imported", error) from error


def hollow(model: Any, config: Any, dtype: torch.dtype, where: Path, held: Held) -> nn.Module:
    """A model of that class without values, ready to be compiled. WeightsError where the configuration gives none."""
    config.use_cache = False  # programs return tensors
    config.dtype = dtype
    try:
        with empty_weights(held.room(where)):
            module: nn.Module = model(config)
        computed = [(m, name, m._buffers[name]) for m in module.modules() for name in m._non_persistent_buffers_set]
        module = module.eval().to(dtype)
    except _errors() as error:
        raise _refused(where, f"{model.__name__} cannot be built from the configuration", error) from error
    for owner, name, buffer in computed:  # frequencies of rotary embeddings keep their precision, as in from_pretrained
        owner._buffers[name] = buffer
    generation = getattr(module, "generation_config", None)
    if generation is not None:  # a call makes no cache of its own, but a wrapper with a static one may be put around
        generation.use_cache = True
    return module


def _refused(where: Path, what: str, error: BaseException) -> WeightsError:
    text = " ".join(str(error).split())
    return WeightsError(f"{where}: {what}: {type(error).__name__}: {text[:300]}")


__all__ = ["Held", "check_sizes", "config_class", "configuration", "hollow", "model_class"]
