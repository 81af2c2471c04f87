"""Comparisons of exported graphs that are not functional yet: whether two are equal, and what they write in place."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from qcompiler.frontends.torch.capture.writes import is_written


def equal(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether two programs are equal: nodes in order, with equal constants. Inputs that nothing reads do not count.

    A constant made from a Python number (`torch.tensor(self.step)`) has the same name in both graphs, so values are
    compared, too.
    """
    return _nodes(one.graph_module, one) == _nodes(other.graph_module, other)


def _nodes(module: fx.GraphModule, program: ExportedProgram) -> list[Any]:
    """Each node as a tuple of plain values: an operand is the number of a node, a constant is its values."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    numbers: dict[fx.Node, int] = {}
    listed: list[Any] = []

    def numbered(each: fx.Node) -> Any:
        return _Operand(numbers[each])

    for node in module.graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        numbers[node] = len(listed)
        operands = fx.node.map_arg((node.args, node.kwargs), numbered)
        target: Any = node.target
        if node.op == "placeholder":
            spec = specs.get(node.name)
            value = node.meta.get("val")
            form = (value.dtype, str(value.shape)) if isinstance(value, torch.Tensor) else None
            target = (spec.kind, spec.target, form) if spec is not None else node.name
            if spec is not None and spec.kind == InputKind.CONSTANT_TENSOR:
                target = (spec.kind, _values(program.constants.get(str(spec.target))))
        elif node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            target = _nodes(inner, program) if isinstance(inner, fx.GraphModule) else _values(inner)
        listed.append((node.op, target, str(operands)))
    return listed


class _Operand:
    """A node as an operand, by its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _values(constant: Any) -> Any:
    if not isinstance(constant, torch.Tensor):
        return str(constant)
    known = not constant.is_meta and not isinstance(constant, torch._subclasses.FakeTensor)
    return (str(constant.dtype), tuple(constant.shape), constant.tolist() if known else None)


def _buffers(program: ExportedProgram) -> dict[str, fx.Node]:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {str(s.target): nodes[s.arg.name] for s in program.graph_signature.input_specs if s.kind in kinds}


def _copies(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is torch.ops.aten.clone.default]


def read(program: ExportedProgram) -> set[str]:
    """Targets of the buffers that any node reads as an operand."""
    return {target for target, node in _buffers(program).items() if node.users}


def written(program: ExportedProgram, states: Set[str]) -> set[str]:
    """Targets of the buffers that an operator writes in place; for `states` this means the copies in their places."""
    found = set()
    for target, node in _buffers(program).items():
        held = _copies(node) if target in states else [node]
        if any(is_written(each) for each in held):
            found.add(target)
    return found


def unread(program: ExportedProgram, states: Set[str]) -> set[str]:
    """The states that are written at the end of each call and read by no call."""
    nodes = _buffers(program)
    return {s for s in states if s in nodes and not any(copy.users for copy in _copies(nodes[s]))}
