"""Runs an exported graph in eager torch over inputs for calibration, and shows the inputs of chosen linears."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from qcompiler.errors import ArgumentDtypeError, ArgumentShapeError, ArgumentStructureError, CalibrationError

Env = dict[fx.Node, Any]
"""The values that are alive in the run of one input."""
Values = Mapping[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Watched:
    """A weight whose inputs are looked at: its path, K, its uses (node, the node's input x), and its placeholders."""

    path: str
    cols: int
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    nodes: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Rounded:
    """Operands that the quantised program rounds: pairs (linear, x), and what becomes of the values of such an x."""

    reads: frozenset[tuple[fx.Node, fx.Node]]
    values: Callable[[torch.Tensor], torch.Tensor]


class GraphRun:
    """An exported graph that runs over inputs: one after the other (`feed`), or all node by node (`together`)."""

    def __init__(
        self,
        program: ExportedProgram,
        watched: Sequence[Watched],
        values: Values,
        *,
        kept: Collection[fx.Node] = (),
        rounded: Rounded | None = None,
    ) -> None:
        """`values` gives the tensor of each placeholder that is no input. The values of `kept` nodes are not dropped
        after their last use."""
        self.program, self.watched, self.values, self.rounded = program, watched, values, rounded
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        specs = program.graph_signature.input_specs
        placeholders = {n.name: n for n in self.nodes if n.op == "placeholder"}
        self.inputs = [placeholders[s.arg.name] for s in specs if s.kind == InputKind.USER_INPUT]
        self.reads: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
        for each in watched:
            for node, x in each.reads:
                self.reads.setdefault(node, []).append((each.path, x))
        last = {node: node for node in self.nodes if node.op == "call_function"}
        for node in self.nodes:
            for used in node.all_input_nodes if node.op != "output" else ():  # nothing is returned
                last[used] = node
        self.done: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            if used not in kept:
                self.done.setdefault(node, []).append(used)

    def keep(self, nodes: Collection[fx.Node]) -> None:
        """The values of these nodes are not dropped after their last use."""
        self.done = {node: [each for each in used if each not in nodes] for node, used in self.done.items()}

    def leaves(self, given: Any) -> list[Any]:
        """The flat arguments of one input, in the graph's order."""
        args: tuple[Any, ...]
        if isinstance(given, Mapping):
            args, kwargs = (), dict(given)
        else:
            args, kwargs = (tuple(given) if isinstance(given, tuple | list) else (given,)), {}
        in_spec = self.program.call_spec.in_spec
        names = list(in_spec.children()[1].context)
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != in_spec:
            raise ArgumentStructureError(
                f"an input for calibration has the structure {spec}, and the model was exported with {in_spec}. Give a "
                "tensor for one argument, a tuple for several, and a dict where the example inputs are `kwargs`"
            )
        for node, leaf in zip(self.inputs, leaves, strict=True):
            expected = node.meta.get("val")
            if isinstance(expected, torch.Tensor):
                _check(node.name, expected, leaf)
        return leaves

    def feed(self, leaves: Sequence[Any], see: Callable[[str, torch.Tensor], None]) -> None:
        """Runs the graph once. `see` gets the path of each watched weight and the input of a linear that reads it."""
        self.together([leaves], lambda path, x: see(path, x[0]))

    def together(self, inputs: Sequence[Sequence[Any]], see: Callable[[str, list[torch.Tensor]], None]) -> None:
        """Runs the graph over all inputs, one node at a time. `see` gets the inputs of a linear before it runs, so that
        the values of its weight may change.

        A value lives until its last use, once for each input; a weight is read when it is used.
        """
        envs = [self.begun(leaves) for leaves in inputs]
        with torch.no_grad():
            for node in self.nodes:
                for path, x in self.reads.get(node, ()):
                    see(path, [env[x] if x in env else self.values[x.name]() for env in envs])
                self.step(node, envs)

    def begun(self, leaves: Sequence[Any]) -> Env:
        """The values before the first node."""
        return dict(zip(self.inputs, leaves, strict=True))

    def step(self, node: fx.Node, envs: Sequence[Env], values: Values | None = None) -> None:
        """Computes one node for each input, and drops what is not read any more. `values` replaces the run's own."""
        if node.op == "get_attr":
            held = getattr(self.program.graph_module, str(node.target))
            for env in envs:
                env[node] = held
        elif node.op == "call_function":
            self._call(node, envs, self.values if values is None else values)
        for used in self.done.get(node, ()):
            for env in envs:
                env.pop(used, None)

    def _call(self, node: fx.Node, envs: Sequence[Env], values: Values) -> None:
        stored = [each for each in node.all_input_nodes if each not in envs[0]]
        weights = {each: values[each.name]() for each in stored}
        for env in envs:

            def value(each: fx.Node, env: Env = env) -> Any:
                held = env[each] if each in env else weights[each]
                return self.rounded.values(held) if self.rounded and (node, each) in self.rounded.reads else held

            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            try:
                with torch.no_grad():
                    env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except (IndexError, RuntimeError, ValueError) as error:
                raise CalibrationError(f"an input for calibration fails in {node.target}: {error}") from error


def _check(name: str, expected: torch.Tensor, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != expected.dtype:
        kind = str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise ArgumentDtypeError(f"an input for calibration has {kind} for '{name}', the model takes {expected.dtype}")
    fixed = [size if isinstance(size, int) else None for size in expected.shape]
    if leaf.ndim != len(fixed) or any(a not in (None, b) for a, b in zip(fixed, leaf.shape, strict=False)):
        wanted = [size if size is not None else "any" for size in fixed]
        raise ArgumentShapeError(
            f"an input for calibration has {list(leaf.shape)} for '{name}', the model takes {wanted}; name dimensions "
            "that vary by dynamic_shapes"
        )


__all__ = ["Env", "GraphRun", "Rounded", "Values", "Watched"]
