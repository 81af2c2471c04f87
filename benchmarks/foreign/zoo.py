"""The type of a foreign model, and the list of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Made:
    """A model in eval mode, and one call of it."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Foreign:
    """A model by name: `package` has the code, `make` builds it. Random weights unless `real`."""

    package: str
    name: str
    make: Callable[[], Made]
    real: bool = False

    @property
    def key(self) -> str:
        return f"{self.package}/{self.name}"


def enliven(module: nn.Module) -> nn.Module:
    """Random weights that keep activations alive: constant parameters get values, statistics get a spread."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if not value.is_floating_point() or value.numel() < 2:
                continue
            if name.endswith("running_var"):
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
            elif name.endswith("running_mean") or (isinstance(value, nn.Parameter) and float(value.std()) == 0):
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return module.eval()


def every() -> list[Foreign]:
    """All models: real weights first, then families in turn, so that an interrupted run has some of each."""
    from foreign import language, packages, vision

    turns = itertools.zip_longest(*language.FAMILIES, *vision.FAMILIES)
    return [*packages.MODELS, *(model for turn in turns for model in turn if model is not None)]
