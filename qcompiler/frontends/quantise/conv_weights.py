"""How insert-qdq stores the weights of convolutions: as the matrices of their products, in every format.

    conv2d, conv1d       (O, C, kh, kw)      stored (O, kh*kw*C)           a column is a tap, then a channel
    g groups             (O, C/g, kh, kw)    stored (g, kh*kw*C/g, O/g)    one matrix for each group
    one channel a group  (O, 1, kh, kw)      stored (kh, kw, 1, O)         a row for each tap
    transposed           (C, O, kh, kw)      stored (O, kh*kw*C)           the kernel rotated: that of a plain conv2d

Channels come last because activations are stored channels-last: the part of a window along a row of the image is then
contiguous in memory, and the values that share a block of a format belong to neighbouring channels of one tap.  The
graph sees the original weight through a view and a permutation, so it still runs in eager torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
GROUPED = "weight of a grouped convolution: its kernels read plain numbers"
"""The reason in the ledger."""


@dataclass(frozen=True)
class ConvWeight:
    """A weight of shape (O, C/groups, *kernel) that only convolutions with `groups` groups read.

    A `transposed` one, of shape (C, O, *kernel), has one group.
    """

    shape: tuple[int, ...]
    groups: int
    transposed: bool = False

    @property
    def depthwise(self) -> bool:
        """One input channel for each group."""
        return self.groups > 1 and self.shape[1] == 1

    @property
    def quantizes(self) -> bool:
        """Whether it is stored as one matrix, which any format can encode."""
        return self.groups == 1

    @property
    def columns(self) -> int:
        """The number of products summed for one element of the result."""
        return math.prod(self.shape) // self.shape[1 if self.transposed else 0]

    @property
    def text(self) -> str:
        """A description of how the stored tensor differs from the model's."""
        return f"conv groups={self.groups}" + (" transposed" if self.transposed else "")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        out, depth, *kernel = self.shape
        if self.transposed:
            return (depth, self.columns)
        if self.groups == 1:
            return (out, self.columns)
        return (*kernel, 1, out) if depth == 1 else (self.groups, self.columns, out // self.groups)

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """The values in stored order, row-major."""
        return self.moved(weight).reshape(self.stored_shape).contiguous()

    def moved(self, weight: torch.Tensor) -> torch.Tensor:
        """The values in stored order: a view if possible."""
        rank = weight.ndim
        if self.transposed:
            return weight.flip(tuple(range(2, rank))).permute(1, *range(2, rank), 0)
        if self.groups == 1:
            return weight.permute(0, *range(2, rank), 1)
        if self.depthwise:
            return weight.permute(*range(2, rank), 1, 0)
        split = weight.reshape(self.groups, self.shape[0] // self.groups, *self.shape[1:])
        return split.permute(0, *range(3, rank + 1), 2, 1)

    def steps(self) -> list[tuple[Any, list[int]]]:
        """The ATen operators, each with its one argument, that restore the weight from the stored tensor."""
        out, depth, *kernel = self.shape
        rank = len(self.shape)
        if self.transposed:
            wide, order = [depth, *kernel, out], [rank - 1, *range(rank - 1)]
            turned = (aten.flip.default, list(range(2, rank)))
            return [(aten.view.default, wide), (aten.permute.default, order), turned]
        if self.groups == 1:
            return [(aten.view.default, [out, *kernel, depth]), (aten.permute.default, _last_to_second(rank))]
        if self.depthwise:
            return [(aten.permute.default, [rank - 1, rank - 2, *range(rank - 2)])]
        wide = [self.groups, *kernel, depth, out // self.groups]
        order = [0, rank, rank - 1, *range(1, rank - 1)]
        return [(aten.view.default, wide), (aten.permute.default, order), (aten.reshape.default, list(self.shape))]


def _last_to_second(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def conv_weight(tensor: torch.Tensor, nodes: Sequence[fx.Node]) -> ConvWeight | None:
    """How a tensor with these placeholders is used, if all its uses are as the weight of one kind of convolution."""
    users = [(node, user) for node in nodes for user in node.users]
    if tensor.ndim not in (3, 4) or not users:
        return None
    kinds: set[tuple[int, bool]] = set()
    for node, user in users:
        if (
            user.target is not aten.convolution.default
            or user.args[1] is not node
            or node in (user.args[0], user.args[2])
        ):
            return None
        kinds.add((int(user.args[8]), bool(user.args[6])))  # type: ignore[arg-type]
    if len(kinds) != 1:
        return None
    groups, transposed = kinds.pop()
    return None if transposed and groups > 1 else ConvWeight(tuple(tensor.shape), groups, transposed)


def restore(graph: fx.Graph, weight: ConvWeight, placeholders: Sequence[fx.Node], path: str) -> None:
    """Inserts the steps that restore the weight between each placeholder and the convolutions that read it.

    The placeholders' own values become those of the stored tensor.
    """
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    for placeholder in placeholders:
        before = placeholder.meta["val"]
        value = placeholder.meta["val"] = weight.stored(before)
        node = placeholder
        users = list(placeholder.users)
        for target, argument in weight.steps():
            with graph.inserting_after(last):
                node = last = graph.call_function(target, (node, argument))
            value = target(value, argument)
            node.meta["val"] = value
            node.meta["nn_module_stack"] = {"": (path, "")}
        for user in users:
            user.replace_input_with(placeholder, node)


__all__ = ["GROUPED", "ConvWeight", "conv_weight", "restore"]
