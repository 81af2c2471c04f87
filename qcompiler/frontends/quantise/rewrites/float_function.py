"""Runs the float graph before and after a rewrite: whether it still computes the same function.

    before      outputs of the graph as it was
    response    how far outputs move if each value of each parameter moves to a neighbouring number of its type
    after       may be BOUND * response away, and half a step of the type of the largest output

A rewrite rounds each weight anew, and each product of the graph has another rounding.  One rounding is at most half the
distance to a neighbour.  So `response` measures what roundings of the weights do to the outputs of this model, with
these inputs: nothing is assumed about depth, norms or the size of values.  A wrong scale, a missed reader or a value
that overflowed moves outputs by far more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from qcompiler.frontends.quantise.graph_run import GraphRun
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import FLOATS, GraphWeight
from qcompiler.frontends.torch.common.empty_weights import is_empty

BOUND = 8
"""Roundings of activations count, too: each operator has one, as each weight has. Rewrites of the models in the tests
move outputs by up to 2.5 responses."""

CHECKED = 4
"""Inputs that are run before and after."""

Outputs = list[list[torch.Tensor]]


class FloatFunction:
    """What the graph of `tensors` computes for some inputs (model inputs, as for `GraphRun.leaves`)."""

    def __init__(self, tensors: GraphTensors, weights: Sequence[GraphWeight], inputs: Sequence[Any]) -> None:
        self.tensors, self.inputs = tensors, list(inputs[:CHECKED])
        self.before = self._run(weights, moved=False)
        moved = self._run(weights, moved=True)
        self.response = [
            [_distance(a, b) for a, b in zip(first, second, strict=True)]
            for first, second in zip(self.before, moved, strict=True)
        ]

    @property
    def outputs(self) -> int:
        """The number of floating-point results: without one, nothing can be compared."""
        return len(self.before[0]) if self.before else 0

    def difference(self, weights: Sequence[GraphWeight]) -> tuple[float, str]:
        """The largest share of its bound that the graph's outputs have moved by, and a message if that is over 1."""
        worst = 0.0
        for before, after, responses in zip(self.before, self._run(weights, moved=False), self.response, strict=True):
            for a, b, response in zip(before, after, responses, strict=True):
                finite = a[a.isfinite()]
                largest = float(finite.abs().max()) if finite.numel() else 0.0
                bound = BOUND * response + torch.finfo(a.dtype).eps / 2 * largest
                moved = _distance(a, b)
                worst = max(worst, moved / bound if bound else (0.0 if not moved else float("inf")))
        why = f"outputs moved by {worst:.3g} times what roundings of the weights may do" if worst > 1 else ""
        return worst, why

    def _run(self, weights: Sequence[GraphWeight], *, moved: bool) -> Outputs:
        """The floating-point results for each input; with `moved`, of parameters that are a rounding away."""
        program = self.tensors.program
        returned = program.graph.output_node().args[0]
        specs = program.graph_signature.output_specs
        wanted = [
            node
            for node, spec in zip(returned, specs, strict=True)
            if spec.kind == OutputKind.USER_OUTPUT and isinstance(node, torch.fx.Node) and _is_float(node)
        ]
        read = _neighbour if moved else _as_it_is
        values = {
            node.name: functools.partial(read, self.tensors, weight) for weight in weights for node in weight.nodes
        }
        run = GraphRun(program, [], values, kept=wanted)
        found: Outputs = []
        for given in self.inputs:
            env = run.begun(run.leaves(given))
            for node in run.nodes:
                run.step(node, [env])
            found.append([env[node] if node in env else values[node.name]() for node in wanted])
        return found


def example_inputs(tensors: GraphTensors) -> list[Any]:
    """The inputs that the model was exported with, if they have values."""
    args, kwargs = tensors.program.example_inputs or ((), {})
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    if not leaves or any(isinstance(leaf, torch.Tensor) and is_empty(leaf) for leaf in leaves):
        return []
    return [tuple(args) if not kwargs else dict(kwargs)] if not (args and kwargs) else []


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS


def _as_it_is(tensors: GraphTensors, weight: GraphWeight) -> torch.Tensor:
    return tensors.value(weight)


def _neighbour(tensors: GraphTensors, weight: GraphWeight) -> torch.Tensor:
    """Each value of a parameter moved up or down to the next number of its type."""
    values = tensors.value(weight)
    if not weight.is_parameter or values.dtype not in FLOATS:
        return values
    generator = torch.Generator().manual_seed(len(weight.targets[0]))
    up = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.bool)
    edge = torch.where(up, torch.inf, -torch.inf).to(values.dtype)
    return torch.nextafter(values, edge)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is not finite and the other is not the same."""
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a.double() - b.double()).abs())
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0


__all__ = ["BOUND", "CHECKED", "FloatFunction", "example_inputs"]
