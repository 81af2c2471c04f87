"""The interface for builders of ATen operators: values by fx node, types from the trace, common forms of IR.

A builder is a function `(scope, node, a) -> result`, registered for its overloads by `@lowers(aten.add.Tensor, …)`; `a`
holds the call's arguments by schema name, with defaults.  It returns one SSA value, or a tuple for several results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from xdsl.ir import Block, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.errors import UnsupportedOperatorError
from qcompiler.frontends.common.loops import Loops, Number, Shape, broadcast_shapes, combine
from qcompiler.frontends.common.scalars import Scalars, opmath
from qcompiler.frontends.torch.common.origins import describe, place
from qcompiler.frontends.torch.common.symbols import Symbols
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.ir import build
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, Range
from qcompiler.plan.kernel import DType

Args = Mapping[str, Any]
Result = SSAValue | tuple[SSAValue | None, ...]
BuildFn = Callable[["Scope", fx.Node, Args], Result]

BUILDERS: dict[Any, BuildFn] = {}
"""Every ATen overload with a builder. All others are decomposed by torch, or are an error."""


def lowers(*overloads: Any) -> Callable[[BuildFn], BuildFn]:
    """Registers a builder."""

    def register(function: BuildFn) -> BuildFn:
        for overload in overloads:
            assert overload not in BUILDERS, overload
            BUILDERS[overload] = function
        return function

    return register


@dataclass
class Scope(Loops):
    """The function under construction. `at(node)` gives a scope whose ops have the node's module path."""

    block: Block
    symbols: Symbols
    ranges: Mapping[str, Range]
    values: dict[fx.Node, Result] = field(default_factory=dict)
    path: str = ""

    def __post_init__(self) -> None:
        self.builder = build.with_path(InsertPoint.at_end(self.block), self.path)

    def at(self, node: fx.Node) -> Scope:
        return Scope(self.block, self.symbols, self.ranges, self.values, place(node))

    def unsupported(self, node: fx.Node, why: str) -> UnsupportedOperatorError:
        """The error for a case of a known operator that has no lowering."""
        return UnsupportedOperatorError(f"{node.target}: {why}{describe(node)}")

    # --- types of the trace ---

    def shape(self, value: Any) -> Shape:
        """The shape of a node's only tensor, or of an SSA value."""
        if isinstance(value, SSAValue):
            return shape_of(value.type)
        return self.symbols.shape(value.meta["val"].shape)

    def dtype(self, value: Any) -> DType:
        if isinstance(value, SSAValue):
            return tensor_dtype(value.type)
        return dtype_name(value.meta["val"].dtype)

    def dim(self, value: Any) -> Dim:
        """An argument that is a size: an int, or a node that computes one from input shapes."""
        return self.symbols.dim(value.meta["val"] if isinstance(value, fx.Node) else value)

    # --- values ---

    def value(self, argument: Any) -> SSAValue:
        """The SSA value of a node that is a tensor, or a rank-0 tensor for a symbolic number."""
        if isinstance(argument, SSAValue):
            return argument
        found = self.values.get(argument)
        if isinstance(found, SSAValue):
            return found
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.SymInt):
            return self.symbolic(self.dim(argument))
        raise UnsupportedOperatorError(f"the argument {argument} is no tensor that import knows{_of(argument)}")

    def unary(self, node: fx.Node, x: Any, body: Callable[[Scalars, SSAValue], SSAValue]) -> SSAValue:
        """A function of one tensor with the trace's result type; computed in that type's opmath."""
        result = self.dtype(node)
        return self.pointwise([self.value(x)], body, compute=opmath(result), result=result, common=result)


def _of(argument: Any) -> str:
    return describe(argument) if isinstance(argument, fx.Node) else ""


def bind(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by schema name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound.update(zip((a.name for a in schema), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def overload(node: fx.Node) -> str:
    """`add.Tensor`"""
    return str(getattr(node.target, "__name__", node.target))


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def normalize_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes of a reduction, non-negative and ascending; None or empty means all."""
    if axes is None or (isinstance(axes, list | tuple) and not axes):
        return tuple(range(rank))
    return listed_axes(axes, rank)


def listed_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes, non-negative and ascending, of an operator for which an empty list means no axes (`flip`, `squeeze`)."""
    listed = axes if isinstance(axes, list | tuple) else [axes]
    return tuple(sorted(axis % max(rank, 1) for axis in listed if rank))


__all__ = [
    "BUILDERS", "Args", "BuildFn", "Number", "Result", "Scope", "Shape", "bind", "broadcast_shapes",
    "combine", "is_tensor", "listed_axes", "lowers", "normalize_axes", "overload",
]  # fmt: skip
