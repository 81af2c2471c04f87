"""The arithmetic of linears with quantised weights: `QuantConfig(compute=…)`, as types of decoded weights.

    before   dequantize = qc.dequantize(w, "nf4:block=64", [384, 384], f32)
             linear = aten.linear(x, dequantize, bias)
    after    dequantize = qc.dequantize(w, "nf4:block=64", [384, 384], bf16)
             linear = qc.linear(x, dequantize, bias)

    "bf16"      x and the weight's elements are rounded to bf16; products are exact, sums in fp32
    "exact"     the weight's elements and x as they are; products and sums in fp32
    "int8"      rows of int8 times integer codes (activations.py)

A recipe that says nothing keeps the model's type: bf16 in a model of bf16, as in torch. Linears that multiply integers
already are left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from qcompiler.frontends.quantise.activations import is_decoded
from qcompiler.frontends.torch.qc_ops import torch_linear  # noqa: F401  (registers the operator)

aten = torch.ops.aten
TYPES = {"bf16": torch.bfloat16, "exact": torch.float32}


def choose_arithmetic(graph: fx.Graph, compute: str, path_of: Callable[[fx.Node], str]) -> list[tuple[str, str]]:
    """Gives the decoded weights of linears the type of `compute`; returns (the weight's path, what was done) for each.

    A weight that something else reads as well (a tied embedding) is decoded twice, from the same codes.
    """
    wanted, made, done = TYPES[compute], dict[fx.Node, fx.Node](), list[tuple[str, str]]()
    integers = {node.args[1] for node in graph.nodes if _multiplies_integers(node)}
    for node in list(graph.nodes):
        if node.target is not aten.linear.default or not is_decoded(node.args[1]):
            continue
        x, weight = node.args[:2]
        if weight in integers or weight.args[3] == wanted:
            continue
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if weight not in made:
            made[weight] = _decoded_as(graph, weight, wanted)
        with graph.inserting_before(node):
            other = graph.call_function(torch.ops.qc.linear.default, (x, made[weight], bias))
        other.meta = dict(node.meta)
        node.replace_all_uses_with(other)
        graph.erase_node(node)
        done.append((path_of(weight), f"{compute} arithmetic, x is {str(x.meta['val'].dtype).removeprefix('torch.')}"))
    for weight in made:
        if not weight.users:
            graph.erase_node(weight)
    return done


def _multiplies_integers(node: fx.Node) -> bool:
    """Whether a linear reads int8 rows. What else reads its weight are the columns of outliers (LLM.int8)."""
    x = node.args[0] if node.target is aten.linear.default else None
    return isinstance(x, fx.Node) and x.target is torch.ops.qc.dequantize_rows.default


def _decoded_as(graph: fx.Graph, weight: fx.Node, dtype: torch.dtype) -> fx.Node:
    with graph.inserting_after(weight):
        node = graph.call_function(torch.ops.qc.dequantize.default, (*weight.args[:3], dtype))
    node.meta = dict(weight.meta)
    with weight.meta["val"].fake_mode:
        node.meta["val"] = weight.meta["val"].to(dtype)
    return node


__all__ = ["TYPES", "choose_arithmetic"]
