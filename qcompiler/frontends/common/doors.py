"""Which frontend a call of `qcompile` goes to; nothing is imported to find out."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from qcompiler.errors import MissingDependencyError


def is_jax_call(model: Any, args: Any, kwargs: Any) -> bool:
    """Whether `model` is a function for JAX: a callable that is no model of torch, with no tensor of torch among its
    example arguments. MissingDependencyError if it is, and JAX is not installed."""
    if not is_plain_function(model) or not _looks_like_arguments(args, kwargs):
        return False
    if _has_torch_tensor((args, kwargs)):
        return False
    if importlib.util.find_spec("jax") is None:
        raise MissingDependencyError(
            f"'{getattr(model, '__name__', type(model).__name__)}' is a function, and functions are compiled through "
            "JAX, which is not installed: pip install 'qcompiler[jax]'. For PyTorch, give an nn.Module and tensors"
        )
    return True


def is_mlir(model: Any) -> bool:
    """Whether `model` is what `qc.from_mlir` returns."""
    return type(model).__module__ == "qcompiler.frontends.mlir.model"


def is_plain_function(model: Any) -> bool:
    """Whether `model` is callable, and neither a class nor a model of torch or of this package."""
    if not callable(model) or isinstance(model, type | str | os.PathLike):
        return False
    if any(kind.__module__.partition(".")[0] in ("torch", "transformers") for kind in type(model).__mro__):
        return False
    return not type(model).__module__.startswith("qcompiler.")


def _looks_like_arguments(args: Any, kwargs: Any) -> bool:
    """Tuples of arguments; anything else is refused with a message of its own."""
    return isinstance(args, tuple | list) and (kwargs is None or isinstance(kwargs, Mapping)) and bool(args or kwargs)


def _has_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_torch_tensor(each) for each in value.values())
    return isinstance(value, tuple | list) and any(_has_torch_tensor(each) for each in value)
