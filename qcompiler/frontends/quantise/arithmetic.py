"""The arithmetic of linears, convolutions and experts with quantised weights: `QuantConfig(compute=…)`, as types of
decoded weights.

    before   dequantize = qc.dequantize(w, "nf4:block=64", [384, 384], f32)
             linear = aten.linear(x, dequantize, bias)
    after    dequantize = qc.dequantize(w, "nf4:block=64", [384, 384], bf16)
             linear = qc.linear(x, dequantize, bias)

    "bf16"      x and the weight's elements are rounded to bf16; products are exact, sums in fp32
    "exact"     the weight's elements and x as they are; products and sums in fp32
    "int8"      rows of int8 times integer codes (activations.py)

A convolution becomes `qc.convolution` in the same way; the views through which it sees its weight (conv_weights.py) are
made once more, of the new type. `qc.grouped_linear` rounds x to the type of its weight, so it stays. A recipe that says
nothing keeps the model's type: bf16 in a model of bf16, as in torch. What multiplies integers already is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from qcompiler.frontends.quantise.activations import decoded_weight
from qcompiler.frontends.torch.qc_ops import torch_linear  # noqa: F401  (registers the operators)

aten = torch.ops.aten
TYPES = {"bf16": torch.bfloat16, "exact": torch.float32}
_EXPERTS = torch.ops.qc.grouped_linear.default
PRODUCTS = {
    aten.linear.default: torch.ops.qc.linear.default,
    aten.convolution.default: torch.ops.qc.convolution.default,
    _EXPERTS: _EXPERTS,
}
"""For each operator whose arithmetic is chosen, the one that rounds x to the type of its weight."""


def choose_arithmetic(graph: fx.Graph, compute: str, path_of: Callable[[fx.Node], str]) -> list[tuple[str, str]]:
    """Gives the decoded weights of linears, convolutions and experts the type of `compute`; returns (the weight's path,
    what was done) for each.

    A weight that something else reads as well (a tied embedding) is decoded twice, from the same codes.
    """
    wanted, made, done = TYPES[compute], dict[fx.Node, fx.Node](), list[tuple[str, str]]()
    products = [(node, weight) for node in graph.nodes if (weight := product_weight(node)) is not None]
    integers = {weight for node, weight in products if _multiplies_integers(node)}
    for node, weight in products:
        if weight in integers or weight.args[3] == wanted:
            continue
        x, seen = node.args[:2]
        rest = node.args[2:] or (node.kwargs.get("bias"),)
        typed = _typed(graph, seen, wanted, made)
        with graph.inserting_before(node):
            other = graph.call_function(PRODUCTS[node.target], (x, typed, *rest))
        other.meta = dict(node.meta)
        node.replace_all_uses_with(other)
        graph.erase_node(node)
        done.append((path_of(weight), f"{compute} arithmetic, x is {str(x.meta['val'].dtype).removeprefix('torch.')}"))
    for each in reversed(made):  # views before what they are views of
        if not each.users:
            graph.erase_node(each)
    return done


def product_weight(node: fx.Node) -> fx.Node | None:
    """The decoded weight of a linear, a convolution or experts; None for any other node."""
    return decoded_weight(node) if node.target in PRODUCTS else None


def _multiplies_integers(node: fx.Node) -> bool:
    """Whether a product reads int8 rows. What else reads its weight are the columns of outliers (LLM.int8)."""
    x: Any = node.args[0]
    while node.target is aten.convolution.default and x.target is aten.permute.default:  # pixels as they were
        x = x.args[0]
    return bool(x.target is torch.ops.qc.dequantize_rows.default)


def _typed(graph: fx.Graph, seen: Any, dtype: torch.dtype, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """A decoded weight, or a view of one, in type `dtype`. `made` are those made so far, by their originals."""
    if seen not in made:
        if seen.target is torch.ops.qc.dequantize.default:
            args = (*seen.args[:3], dtype)
        else:
            args = (_typed(graph, seen.args[0], dtype, made), *seen.args[1:])
        with graph.inserting_after(seen):
            node = graph.call_function(seen.target, args)
        node.meta = dict(seen.meta)
        with seen.meta["val"].fake_mode:
            node.meta["val"] = seen.meta["val"].to(dtype)
        made[seen] = node
    return made[seen]


__all__ = ["PRODUCTS", "TYPES", "choose_arithmetic", "product_weight"]
