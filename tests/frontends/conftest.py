"""Helpers of the frontend tests: torch functions as modules, and the interpreter's answer as torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.ir.interpreter import run


def as_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_torch(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def interpret(result: ImportResult, *tensors: torch.Tensor) -> list[torch.Tensor]:
    result.module.verify()
    states = {k: v.copy() for k, v in result.states.items()}
    return [as_torch(a) for a in run(result.module, result.weights, [as_numpy(t) for t in tensors], states=states)]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2, in f64."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    a, b = found.double(), wanted.double()
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _name_of(result: ImportResult, index: int) -> str:
    """Where a result stands in the output tree: the name in a table of functions."""
    tree = result.signature.outputs
    if tree["kind"] != "dict":
        return str(index)
    return next(k for k, item in zip(tree["keys"], tree["items"], strict=True) if f"'index': {index}}}" in str(item))


@pytest.fixture
def distance() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """`relative_error` for tests that cannot import this file."""
    return relative_error


@pytest.fixture
def errors() -> Callable[[Any, Any], list[float]]:
    """Relative errors of the interpreter's arrays against torch tensors."""
    return lambda found, wanted: [relative_error(as_torch(f), w) for f, w in zip(found, wanted, strict=True)]


@pytest.fixture
def check() -> Callable[..., ImportResult]:
    """Imports `model` for `tensors` and compares the interpreter with eager torch, at other sizes too."""

    def compare(
        model: nn.Module,
        *tensors: torch.Tensor,
        tolerance: float = 1e-5,
        dynamic: Any = None,
        others: tuple[tuple[torch.Tensor, ...], ...] = (),
        quant: Any = None,
    ) -> ImportResult:
        model = model.eval()
        result = import_torch(model, tensors, {}, quant, dynamic)
        for call in (tensors, *others):
            with torch.no_grad():
                wanted = torch.utils._pytree.tree_leaves(result.quantized.module(*call) if quant else model(*call))
            found = interpret(result, *call)
            assert len(found) == len(wanted)
            errors = {i: relative_error(f, w) for i, (f, w) in enumerate(zip(found, wanted, strict=True))}
            bad = {_name_of(result, i): e for i, e in errors.items() if e > tolerance}
            assert not bad, bad
        return result

    return compare


@pytest.fixture
def interpreted() -> Callable[..., list[torch.Tensor]]:
    """`interpreted(result, *tensors)`: what the interpreter makes of an imported module."""
    return interpret
