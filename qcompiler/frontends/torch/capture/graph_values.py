"""The value of every node of an exported graph in eager torch, for comparing programs with the model that they are of.

The graph is the oracle (quantised weights decoded, computed in torch) or the float model, exported anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from qcompiler.errors import ArgumentError
from qcompiler.frontends.common.imported import Compared, GraphValues, NodeValue
from qcompiler.frontends.torch.capture import eager_graph
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.common.origins import place, source_line
from qcompiler.frontends.torch.common.values import to_numpy


def compared(program: ExportedProgram, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compared:
    """Runs the quantised graph, and the float model, exported anew for these arguments, if it is not None.

    Arguments are tensors or arrays. ArgumentError for a model that is none of torch's.
    """
    given, named = pytree.tree_map(_tensor, (tuple(args), dict(kwargs)))
    oracle = graph_values(program, given, named)
    if model is None:
        return Compared(oracle, None)
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ArgumentError(f"model={type(model).__name__}: give the float model, a torch.nn.Module")
    return Compared(oracle, graph_values(export_model(model, given, named).program, given, named))


def graph_values(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphValues:
    """Runs the graph once. Its buffers keep their values.

    Values of integers and booleans are left out: they have no error in decibels.
    """
    module = eager_graph.runnable(program)
    watched = _Watched(module)
    with torch.no_grad(), _kept(module):
        leaves = pytree.tree_leaves(_ordered(module, args, kwargs))
        results = watched.run(*leaves, enable_io_processing=False)
    flat = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return GraphValues(tuple(watched.found), tuple(to_numpy(leaf) for leaf in flat))


Lines = dict[str, tuple[tuple[str, tuple[str, ...]], ...]]


def lines_of(program: ExportedProgram) -> Lines:
    """The model's source lines by module path, in the order of the graph, each with the operators that it became."""
    found: dict[str, dict[str, list[str]]] = {}
    for node in program.graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.meta.get("val"), torch.Tensor)
            and (line := source_line(node))
        ):
            ops = found.setdefault(place(node), {}).setdefault(line, [])
            if (name := _op(node)) not in ops:
                ops.append(name)
    return {path: tuple((line, tuple(ops)) for line, ops in lines.items()) for path, lines in found.items()}


class _Watched(fx.Interpreter):
    """Keeps a copy of each result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[NodeValue] = []

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            # A copy: a later operator may write to the tensor in place.
            array = to_numpy(value.detach().clone())
            self.found.append(NodeValue(node.name, _op(node), place(node), source_line(node), array))
        return value


def _op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")


@contextmanager
def _kept(module: fx.GraphModule) -> Iterator[None]:
    """Gives buffers their values back: a graph writes its states into them."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()} if _writes(module) else {}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.copy_(before[name])


def _writes(module: fx.GraphModule) -> bool:
    return any(node.target is torch.ops.aten.copy_.default for node in module.graph.nodes)


def _ordered(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments in the structure of the graph, with keywords in its order. ArgumentError for another structure."""
    spec = module._in_spec
    names = list(spec.children()[1].context)
    if set(names) != set(kwargs):
        raise ArgumentError(
            f"the model was exported with the keyword arguments {names}, and {list(kwargs)} were given: give the "
            "inputs as in the example of qcompile"
        )
    given = (args, {name: kwargs[name] for name in names})
    if pytree.tree_structure(given) != spec:
        raise ArgumentError(
            f"the inputs have the structure {pytree.tree_structure(given)}, and the model was exported with {spec}: "
            "give them as in the example of qcompile"
        )
    return given


def _tensor(value: Any) -> Any:
    """An array of NumPy as a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value if value.flags.writeable else value.copy())


__all__ = ["Lines", "compared", "graph_values", "lines_of"]
