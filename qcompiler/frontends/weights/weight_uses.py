"""A graph's uses of a weight: the forms of a linear, and their normalisation to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from qcompiler.frontends.torch.common.empty_weights import is_empty

aten = torch.ops.aten
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share storage: tied parameters."""
    storage = tensor.untyped_storage()
    place = storage._cdata if is_empty(tensor) else storage.data_ptr()  # a fake's storage has no address
    return (place, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def reads(nodes: Sequence[fx.Node]) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """(linear, its input) for each linear whose weight is one of these nodes."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for user in node.users:
            x = user.args[0] if user.target is aten.linear.default else next(iter(as_linear(user, node)), None)
            if isinstance(x, fx.Node) and user.target is not aten.embedding.default:
                found[user] = x
    return tuple(found.items())


def as_linear(user: fx.Node, weight: fx.Node) -> tuple[Any, ...]:
    """The arguments (x, W, bias) of the linear that `user` is, if it is `x @ weight (+ bias)`; else ()."""
    args = user.args
    if user.target in (aten.mm.default, aten.matmul.default) and args[1] is weight and args[0] is not weight:
        return (args[0], weight)
    if user.target is aten.addmm.default and args[2] is weight and weight not in args[:2] and not user.kwargs:
        bias = args[0]
        assert isinstance(bias, fx.Node)
        if bias.meta["val"].ndim == 1 and bias.meta["val"].shape[0] != 1:
            return (args[1], weight, bias)
    return ()


def join_transposes(graph: fx.Graph, tensor: torch.Tensor, nodes: Sequence[fx.Node]) -> None:
    """Turns `x @ W.t()` into `linear(x, W)`, for programs whose linears were decomposed before."""
    if tensor.ndim != 2:
        return
    for node in nodes:
        for view in [u for u in node.users if u.target in _TRANSPOSES]:
            dims = view.args[1:] if view.target is not aten.permute.default else view.args[1]
            if view.target is not aten.t.default and [int(d) % 2 for d in dims] not in ([1, 0], [0, 1]):  # type: ignore[union-attr,arg-type]
                continue
            if view.target is aten.permute.default and [int(d) % 2 for d in dims] == [0, 1]:  # type: ignore[union-attr,arg-type]
                continue
            for user in list(view.users):
                arguments = as_linear(user, view)
                if arguments:
                    replace_by_linear(graph, user, arguments[0], node, *arguments[2:])
            if not view.users:
                graph.erase_node(view)


def replace_by_linear(graph: fx.Graph, user: fx.Node, *arguments: Any) -> None:
    with graph.inserting_before(user):
        linear = graph.call_function(aten.linear.default, arguments)
    linear.meta = dict(user.meta)
    user.replace_all_uses_with(linear)
    graph.erase_node(user)


__all__ = ["as_linear", "join_transposes", "reads", "replace_by_linear", "storage_key"]
