"""Where the values of a model's parameters come from: the module itself, or nowhere.

`insert-qdq` asks a source for one tensor at a time and lets go of it before it asks for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from qcompiler.errors import WeightsError
from qcompiler.frontends.empty_weights import is_empty
from qcompiler.frontends.torch_values import to_numpy


class WeightSource(Protocol):
    """Values by the paths of parameters."""

    valued: bool
    """False if there are no values at all: weights are sizes, and nothing is encoded."""

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The values of a stored tensor, row-major, in the dtype of `tensor`: its shape and dtype are the model's.

        `targets` are all of its paths (several if tied).  WeightsError if there are no values.
        """


class ModuleWeights:
    """The values that the module's own tensors hold."""

    valued = True

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> npt.NDArray[Any]:
        if is_empty(tensor):
            raise WeightsError(
                f"the parameter '{targets[0]}' holds no values (it is a fake or meta tensor): name the folder that "
                'holds them, weights="path/of/safetensors", or compile for plan and sizes only, weights="none"'
            )
        return to_numpy(tensor)


class NoValues:
    """No values: `weights="none"`."""

    valued = False

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> npt.NDArray[Any]:
        del tensor
        raise WeightsError(f"'{targets[0]}' was asked for its values, but the model is compiled without any")


__all__ = ["ModuleWeights", "NoValues", "WeightSource"]
