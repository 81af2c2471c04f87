"""Parameters that a graph did not have: a bias for a linear, and a copy of a tied weight.

Both are placeholders beside the weight, with a spec of their own, as export would have made them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.rewrites.moved_weights import MovedWeights
from qcompiler.frontends.weights.weight_uses import as_linear

aten = torch.ops.aten


def give_bias(tensors: GraphTensors, source: MovedWeights, linear: fx.Node, weight: GraphWeight) -> str:
    """The path of a linear's bias. A linear without one gets zeros; the graph computes the same."""
    held = bias_of(linear, weight)
    if held is not None:
        return str(next(spec.target for spec in tensors.specs if spec.arg.name == held.name))
    beside = next(node for node in weight.nodes if node in linear.all_input_nodes)
    module = weight.targets[0].rpartition(".")[0]
    target = _free(tensors, f"{module}.bias" if module else "bias")
    value = beside.meta["val"]
    count = value.shape[1] if weight.transposed else value.shape[0]
    node = _placeholder(tensors, beside, f"{beside.name}_bias", target, value.new_empty(count))
    tensors.state[target] = torch.nn.Parameter(_zeros(weight.tensor, count), requires_grad=False)
    source.made.add(target)
    if linear.target is aten.linear.default:
        linear.args = (*linear.args[:2], node)
        return target
    with tensors.graph.inserting_after(linear):  # x @ W of any rank
        added = tensors.graph.call_function(aten.add.Tensor, (linear, node))
    added.meta = dict(linear.meta)
    linear.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    return target


def bias_of(linear: fx.Node, weight: GraphWeight) -> fx.Node | None:
    """The bias of a linear in any of its forms."""
    arguments = linear.args
    if linear.target is not aten.linear.default:
        arguments = next((found for node in weight.nodes if (found := as_linear(linear, node))), ())
    bias = arguments[2] if len(arguments) > 2 else None
    return bias if isinstance(bias, fx.Node) else None


def untie(
    tensors: GraphTensors, source: MovedWeights, weight: GraphWeight, linears: Sequence[fx.Node]
) -> tuple[str, str]:
    """Gives `linears` a tensor of their own. The paths of the other uses' tensor, and of the linears'.

    Both keep the values of the source; the packed weights hold them twice.
    """
    paths = {path: str(path).rpartition(".")[0] for path in weight.targets}
    stack = [path for path, _ in (linears[0].meta.get("nn_module_stack") or {}).values()]
    named = [at for at, path in enumerate(weight.targets) if paths[path] and paths[path] in stack]
    if len(weight.nodes) > 1:
        second = named[-1] if named else len(weight.nodes) - 1
        node, target = weight.nodes[second], weight.targets[second]
        first = 1 if second == 0 else 0
    else:
        first = 0
        target = _free(tensors, f"{weight.targets[0]}_untied")
        node = _placeholder(
            tensors, weight.nodes[0], f"{weight.nodes[0].name}_untied", target, weight.nodes[0].meta["val"]
        )
        tensors.state[target] = tensors.state[weight.targets[0]]
    for user in weight.users:
        for each in weight.nodes:
            user.replace_input_with(each, node if user in linears else weight.nodes[first])
    tensors.untied |= {*weight.targets, target}
    for path in (*weight.targets, target):
        source.origins[path] = tuple(weight.targets)
    return weight.targets[first], target


def _placeholder(tensors: GraphTensors, beside: fx.Node, name: str, target: str, value: torch.Tensor) -> fx.Node:
    with tensors.graph.inserting_after(beside):
        node: fx.Node = tensors.graph.placeholder(name)
    node.meta["val"] = value
    place = next(at for at, spec in enumerate(tensors.specs) if spec.arg.name == beside.name)
    tensors.specs.insert(place + 1, InputSpec(InputKind.PARAMETER, TensorArgument(node.name), target))
    return node


def _free(tensors: GraphTensors, target: str) -> str:
    while target in tensors.state:
        target += "_made"
    return target


def _zeros(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=like.dtype)


__all__ = ["bias_of", "give_bias", "untie"]
