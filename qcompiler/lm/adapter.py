"""PEFT's adapters on a language model: merged into its weights before they are quantised, or kept beside them.

    merge=True     y = W' x                          W' = W + scaling * B @ A (LoRA, DoRA), which is then quantised
    merge=False    y = W x + scaling * B (A x)       W quantised, or as its file stores it; A and B in floating point

The model is as it was when the context ends.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from qcompiler.errors import AdapterError
from qcompiler.frontends.quantise.lora_adapter import LoraLayer, listed, read_adapter
from qcompiler.frontends.quantise.merge_lora import merged_rows
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import FileWeights, Identity, InFile


@contextlib.contextmanager
def adapted(model: nn.Module, weights: FileWeights | None, adapter: str | Path | None, merge: bool) -> Iterator[Any]:
    """Inside, the model has the adapter; yields the source of its weights (None: its own parameters).

    AdapterError lists all targets that do not exist, have other shapes, or cannot be adapted in that way.
    """
    if adapter is None:
        yield weights
        return
    layers = _Targets(model, weights, adapter, merge).checked()
    with contextlib.ExitStack() as stack:
        if merge and weights is not None:
            tensors = {f"{layer.path}.weight": layer for layer, _ in layers}
            linears = {layer.path: isinstance(module, nn.Linear) for layer, module in layers}
            yield weights.replaced(
                {name: _Merged(weights.tensors[name], each, linears[each.path]) for name, each in tensors.items()}
            )
            return
        for layer, module in layers:
            stack.enter_context(_merged(layer, module) if merge else _beside(layer, module))
        yield weights


@dataclass(frozen=True)
class _Targets:
    """The modules that an adapter names."""

    model: nn.Module
    weights: FileWeights | None
    adapter: str | Path
    merge: bool

    def checked(self) -> list[tuple[LoraLayer, Any]]:
        from transformers.pytorch_utils import Conv1D

        modules = dict(self.model.named_modules(remove_duplicate=False))
        found, problems = [], []
        for each in read_adapter(self.adapter, None):
            module = modules.get(each.path)
            # As peft: a Conv1D is (in, out) whatever fan_in_fan_out says. A square one would be merged the wrong way.
            layer = replace(each, transposed=True) if isinstance(module, Conv1D) else each
            why = "is no linear or embedding of the model" if module is None else self._unfit(layer, module)
            if why:
                problems.append(f"'{layer.path}' {why}")
            else:
                found.append((layer, module))
        if problems:
            raise AdapterError(
                f"the adapter in {self.adapter} does not fit {type(self.model).__name__}: {listed(problems)}"
            )
        return found

    def _unfit(self, layer: LoraLayer, module: Any) -> str:
        """Why a module cannot be adapted; "" if it can."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            return "is no linear or embedding of the model"
        expected = layer.shape(outputs_first=isinstance(module, nn.Linear))
        if tuple(weight.shape) != expected:
            return f"is {list(weight.shape)}, and the adapter's is {list(expected)}"
        return self._unfit_for_merging(layer, weight) if self.merge else _unfit_beside(layer, module)

    def _unfit_for_merging(self, layer: LoraLayer, weight: torch.Tensor) -> str:
        name = f"{layer.path}.weight"
        parameters = self.model.named_parameters(remove_duplicate=False)
        tied = [other for other, each in parameters if each is weight and other != name]
        if tied:
            return (
                f"shares its weight with '{tied[0]}', which merging would change: merge=False keeps the adapter apart"
            )
        if self.weights is None:
            return ""
        item = self.weights.tensors.get(name)
        if item is None:
            return f"has no tensor '{name}' in {self.weights.path}: merge=False keeps the adapter apart"
        if item.codes is not None:
            return (
                f"is stored as codes ({item.codes.format}) in {item.codes.where}: merge=False keeps the adapter apart; "
                "qc.merge_lora merges it into codes"
            )
        return ""


def _unfit_beside(layer: LoraLayer, module: Any) -> str:
    if layer.magnitude is not None:
        return "is a DoRA, which scales the rows of the sum: merge=True merges it"
    if not isinstance(module, nn.Linear):
        return f"is {type(module).__name__}, and only linears take a path beside them: merge=True merges it"
    return ""


# --- merged ----------------------------------------------------------------------------------------------------------


def _sum(layer: LoraLayer, values: torch.Tensor, *, outputs_first: bool) -> torch.Tensor:
    """The merged weight in fp32."""
    plain = to_numpy(values.detach().float().cpu().contiguous())
    rows, cols = plain.shape
    made = merged_rows(layer, lambda first, stop: plain[first:stop], rows, cols, outputs_first=outputs_first)
    return torch.from_numpy(made(0, rows))


@contextlib.contextmanager
def _merged(layer: LoraLayer, module: Any) -> Iterator[None]:
    """Puts the merged weight in the place of a module's own."""
    own = module.weight
    made = _sum(layer, own, outputs_first=isinstance(module, nn.Linear)).to(own.device, own.dtype)
    module.weight = nn.Parameter(made, requires_grad=False)
    try:
        yield
    finally:
        module.weight = own


@dataclass(frozen=True)
class _Merged:
    """A tensor of a file with an adapter's update; `view` computes it anew each time."""

    base: InFile
    layer: LoraLayer
    is_linear: bool
    dtype: None = None
    """None: there are no values that could be mapped."""
    codes: None = field(default=None)
    is_made: bool = True

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def view(self) -> torch.Tensor:
        return _sum(self.layer, self.base.view(), outputs_first=self.is_linear)

    def identity(self) -> Identity:
        digest = hashlib.sha256(repr((self.layer.scaling, self.layer.transposed)).encode())
        for part in (self.layer.a, self.layer.b, self.layer.magnitude):
            digest.update(b"" if part is None else np.ascontiguousarray(part).tobytes())
        return {**self.base.identity(), "adapter": digest.hexdigest()}

    def release(self) -> None:
        self.base.release()


# --- beside ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _beside(layer: LoraLayer, module: Any) -> Iterator[None]:
    """Adds two small products to a linear. The factors are buffers, which recipes leave in floating point."""
    own, dtype = module.forward, module.weight.dtype
    had = "forward" in vars(module)
    module.register_buffer("lora_A", torch.from_numpy(layer.a.copy()).to(dtype), persistent=False)
    module.register_buffer("lora_B", torch.from_numpy(layer.b * np.float32(layer.scaling)).to(dtype), persistent=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        low = functional.linear(x, module.get_buffer("lora_A"))
        full: torch.Tensor = own(x)
        return full + functional.linear(low, module.get_buffer("lora_B"))

    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = own
        else:
            del module.__dict__["forward"]
        for name in ("lora_A", "lora_B"):
            delattr(module, name)


__all__ = ["adapted"]
