"""`rotate-online`: a Hadamard transform in front of the second linear of an MLP, undone by its columns.

    before   x = silu(gate(u)) * up(u)        y = linear(x, W)
    after    x as before;  t = qc.hadamard(x, block)    y = linear(t, W H)         H symmetric, H H = 1

Nothing can be folded into the linears that make x, since a nonlinear operator lies between: so the transform of the
activations stays in the graph, as an operator with a kernel of its own.  It spreads an outlier of a channel over its
run of columns, the largest power of two that divides them.

The place is found by structure: going back from the linear's input over pointwise operators and views, every way ends
at the output of a linear, and at least one operator on the way is not linear.  An input that comes from a norm or from
attention is none.

Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear
from qcompiler.frontends.quantise.rewrites.channels import shape_of
from qcompiler.frontends.quantise.rewrites.moved_weights import MovedWeights, Transformed
from qcompiler.frontends.quantise.rewrites.scale_groups import described, why_fixed
from qcompiler.frontends.torch.qc_ops import torch_hadamard  # noqa: F401  (it registers the operator)
from qcompiler.frontends.weights.weight_uses import as_linear, reads
from qcompiler.plan.kinds.hadamard import block_of

aten = torch.ops.aten
ONLINE: Final = "rotate-online"
LEAST = 16
"""Columns of the smallest run that is worth it: an outlier becomes a quarter of its size in each of them."""

_BENDS = (
    aten.gelu.default, aten.silu.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default,
    aten.leaky_relu.default, aten.hardtanh.default, aten.clamp.default, aten.pow.Tensor_Scalar, aten.elu.default,
    aten.hardswish.default, aten.softplus.default,
)  # fmt: skip
"""Pointwise operators that are not linear; so is a product of two values that depend on the input."""
_KEEPS = (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.add.Scalar,
    aten.sub.Tensor, aten.neg.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.to.dtype,
    aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.dropout.default, aten.alias.default,
    aten.detach.default,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Place:
    """A quantised weight whose linears read transformed inputs, in runs of `block` columns."""

    weight: GraphWeight
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    block: int

    @property
    def axis(self) -> int:
        """The dimension of the model's tensor that holds the columns."""
        return 0 if self.weight.transposed else 1


def find_places(weights: Sequence[GraphWeight]) -> tuple[list[Place], dict[str, str]]:
    """The places of a graph, and for each other linear behind an MLP (by its path) why it is none."""
    places, reasons = [], {}
    for weight in weights:
        if not is_quantised_linear(weight) or weight.codes is not None:
            continue
        found, path = reads(weight.nodes), weight.targets[0]
        if not found or not all(_is_inner(x) for _, x in found):
            continue
        block = block_of(weight.shape[1])
        why = why_fixed(weight, {linear for linear, _ in found})
        if not why and block < LEAST:
            why = f"its {weight.shape[1]} columns are runs of {block}, and {LEAST} are the least that spread an outlier"
        if why:
            reasons[path] = why
        else:
            places.append(Place(weight, found, block))
    return places, reasons


def _is_inner(x: fx.Node) -> bool:
    """Whether a value is made pointwise from outputs of linears, and not by linear operators alone."""
    bends, seen, todo = False, set[fx.Node](), [x]
    while todo:
        node = todo.pop()
        if node in seen or node.op == "get_attr":
            continue
        seen.add(node)
        if node.target is aten.linear.default or _is_product_with_parameter(node):
            continue
        held = [each for each in node.all_input_nodes if each.op != "get_attr" and _holds_numbers(each)]
        if node.op != "call_function" or not held:
            return False
        if (node.target is aten.mul.Tensor and len(held) == 2) or node.target in _BENDS:
            bends = True
        elif node.target not in _KEEPS and "getitem" not in str(node.target):
            return False
        todo += held
    return bends


def _holds_numbers(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def _is_product_with_parameter(node: fx.Node) -> bool:
    return any(as_linear(node, each) for each in node.all_input_nodes if each.op == "placeholder")


def transform(tensors: GraphTensors, source: MovedWeights, places: Sequence[Place]) -> list[fx.Node]:
    """Inserts the transforms, one for each x, and changes the columns. Returns the new nodes, for `undo`."""
    made: dict[tuple[fx.Node, int], fx.Node] = {}
    for place in places:
        for linear, x in place.reads:
            if (x, place.block) not in made:
                made[x, place.block] = _transformed(tensors.graph, linear, x, place.block)
            linear.replace_input_with(x, made[x, place.block])
        source.change(ONLINE, place.weight.targets[0], Transformed(place.axis, place.block))
    return list(made.values())


def undo(graph: fx.Graph, made: Sequence[fx.Node]) -> None:
    """Takes the operators out again."""
    for node in made:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)


def _transformed(graph: fx.Graph, linear: fx.Node, x: fx.Node, block: int) -> fx.Node:
    with graph.inserting_after(x):
        node = graph.call_function(torch.ops.qc.hadamard.default, (x, block))
    node.meta = {key: value for key, value in linear.meta.items() if key != "val"}
    with x.meta["val"].fake_mode:
        node.meta["val"] = torch.ops.qc.hadamard(x.meta["val"], block)
    return node


def told(place: Place) -> str:
    """For the report."""
    x = place.reads[0][1]
    columns = shape_of(x)[-1]
    runs = f"runs of {place.block} of its {columns}" if place.block != columns else f"all {columns}"
    return f"a Hadamard transform of {runs} columns in front of it, behind {described(x)}"


__all__ = ["LEAST", "ONLINE", "Place", "find_places", "told", "transform", "undo"]
