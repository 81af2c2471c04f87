"""Linalg on tensors as the `Graph` of the JAX road: one node for each view, product and loop.

    tensor.collapse_shape, expand_shape        stablehlo.reshape
    linalg.transpose, tensor.extract_slice     stablehlo.transpose, slice
    linalg.matmul, linalg.generic of a product stablehlo.dot_general (generics.py)
    other linalg.generic                       mlir.pointwise, mlir.fold (loops.py)
    tensor.dim, arith on sizes                 known at compile time: b, 8*b

Nodes have StableHLO's names where they mean the same, so that weights are found, quantised and lowered by what is there
for JAX. A destination (`outs`) only gives a shape, or the start of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qcompiler.errors import UnsupportedOperatorError
from qcompiler.frontends.jax.fold import fold, scalar_of
from qcompiler.frontends.jax.graph import NUMPY, Graph, Node, Value, user_place
from qcompiler.frontends.jax.scope import splat
from qcompiler.frontends.mlir import loops as _loops  # noqa: F401  # registers builders
from qcompiler.frontends.mlir.constants import Constants
from qcompiler.frontends.mlir.dense import dense_array, scalar_number
from qcompiler.frontends.mlir.model import MlirModel
from qcompiler.frontends.mlir.scalars import SCALARS
from qcompiler.frontends.mlir.types import check_size, parse_type
from qcompiler.plan.dims import Dim, dim, product

Values = dict[Any, Value]
Shape = Sequence[Dim]
MAX_NODES = 100_000
"""Texts with more operators are refused, as functions of JAX are: each becomes code."""
_NO_CASTS = ("linalg.generic", "linalg.map", "linalg.reduce", "linalg.select")
DYNAMIC = -(1 << 63)
"""MLIR's mark of a size that is an operand."""


class LinalgReader:
    """Reads ops one by one, by their `rules`. `values` are those of the block that is read."""

    def __init__(self, model: MlirModel, graph: Graph, constants: Constants, rules: Mapping[str, Rule]) -> None:
        self.model, self.graph, self.constants, self.rules = model, graph, constants, rules
        self.count = 0
        self.noted: set[str] = set()

    def function(self, function: Any, arguments: list[Value]) -> list[Value]:
        """The values that a function returns."""
        block = function.regions[0].blocks[0]
        values: Values = dict(zip(block.arguments, arguments, strict=True))
        for each in block.operations:
            op = each.operation
            if op.name == "func.return":
                return [values[value] for value in op.operands]
            operands = [values[value] for value in op.operands]
            values.update(zip(op.results, self.read(op, operands, values), strict=True))
        raise UnsupportedOperatorError(f"a function of {self.model.file} has no func.return")

    def read(self, op: Any, operands: list[Value], values: Values) -> list[Value]:
        """The values of an op's results."""
        self.counted()
        for result in op.results:
            if str(result.type).startswith(("tensor", "memref", "vector")):
                parse_type(str(result.type), f"the result of {op.name} ({self.line(op)})")
        self._check_cast(op, operands)
        rule = self.rules.get(op.name)
        if rule is not None:
            return rule(self, op, operands, values)
        if op.name in SCALARS:
            return [self.scalar(op, operands)]
        raise self.unsupported(
            op, "it has no lowering. Write it with linalg.generic and tensor ops (mlir-opt "
            "--linalg-generalize-named-ops), or compute it outside of the program"
        )  # fmt: skip

    def _check_cast(self, op: Any, operands: Sequence[Value]) -> None:
        """Named ops of linalg cast their inputs to the type of the result. Casts of signed numbers are what is read."""
        if "cast" in op.attributes and "unsigned" in str(op.attributes["cast"]):
            raise self.unsupported(op, "a cast of unsigned numbers; write it as linalg.generic with arith.extui")
        named = op.name.startswith("linalg.") and op.name not in _NO_CASTS
        if named and operands[-1].type != "i1" and any(value.type == "i1" for value in operands):
            raise self.unsupported(op, "a cast of a signed truth value, which is -1; write it as linalg.generic")

    def counted(self) -> None:
        """Counts an op. UnsupportedOperatorError for too many: calls of calls multiply."""
        self.count += 1
        if self.count > MAX_NODES:
            raise UnsupportedOperatorError(
                f"{self.model.file} has more than {MAX_NODES} operators, with those of calls"
            )

    # --- places ---

    def line(self, op: Any) -> str:
        location = str(op.location)
        own = user_place(location)
        return f"{Path(own[0]).name}:{own[1]}" if own is not None else self.model.line(location)

    def unsupported(self, op: Any, why: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(f"{op.name} ({self.line(op)}): {why}")

    def note(self, what: str, why: str) -> None:
        """A line of the report, once."""
        if what not in self.noted:
            self.noted.add(what)
            self.graph.notes.append((what, why))

    # --- making values ---

    def _fresh(self) -> str:
        self.count += 1
        return str(self.count)

    def node(self, name: str, operands: Sequence[Value], shape: Shape, kind: str, op: Any, **attrs: Any) -> Value:
        """The value of a new node."""
        check_size(tuple(n if isinstance(n, int) else None for n in shape), f"{op.name} ({self.line(op)})")
        line = self.line(op)
        made = Node(name, list(operands), attrs, line=line, source=line)
        made.results = [Value(tuple(shape), kind, owner=made, name=self._fresh())]
        known = fold(made, self.graph.ranges)
        if known is not None:
            made.result.known = known
        self.graph.nodes.append(made)
        return made.result

    def known(self, entry: Any, kind: str = "i64") -> Value:
        """A size or a number of rank 0."""
        size = dim(entry).to_dim() if not isinstance(entry, float | bool) else entry
        if isinstance(size, str):
            boxed = np.empty((), object)
            boxed[()] = dim(size)
            return Value((), kind, boxed, name=self._fresh())
        return Value((), kind, np.array(size).astype(NUMPY[kind]), name=self._fresh())

    def scalar(self, op: Any, operands: list[Value]) -> Value:
        """An op of arith on sizes or numbers of rank 0, or on tensors."""
        if op.name == "arith.select" and scalar_of(operands[0]) is not None:
            return operands[1] if scalar_of(operands[0]) else operands[2]
        try:
            node = SCALARS[op.name](op, operands)
        except UnsupportedOperatorError as error:
            raise UnsupportedOperatorError(f"{error} ({self.line(op)})") from None
        kind = element_of(str(op.results[0].type))
        return self.node(node.op, operands, operands[-1].shape, kind, op, **node.attrs)

    def size(self, value: Value, op: Any) -> Dim:
        """The size that a value is."""
        found = scalar_of(value)
        if found is None:
            raise self.unsupported(op, "a size depends on values, or is no expression of the sizes of arguments")
        return dim(found).to_dim()

    def result_shape(self, op: Any, sizes: Sequence[Value], number: int = 0) -> list[Dim]:
        """The declared shape with the `?` from operands, in order."""
        declared, _ = parse_type(str(op.results[number].type), op.name)
        given = iter(sizes)
        return [self.size(next(given), op) if size is None else size for size in declared]

    def refined(self, op: Any, shape: Shape, number: int = 0) -> list[Dim]:
        """`shape`, which must agree with the declared one."""
        declared, _ = parse_type(str(op.results[number].type), op.name)
        if len(declared) != len(shape):
            raise self.unsupported(op, f"its result has {len(declared)} dimensions, and {len(shape)} are computed")
        for have, want in zip(shape, declared, strict=True):
            if want is not None and want != have:
                raise self.unsupported(
                    op, f"the text says that the size {have} is {want}: give the argument that size, or fix the text"
                )
        return list(shape)

    # --- views ---

    def reshape(self, value: Value, shape: Shape, op: Any) -> Value:
        if tuple(shape) == value.shape:
            return value
        if product(list(shape)) != product(list(value.shape)):
            raise self.unsupported(op, f"{list(value.shape)} does not reshape to {list(shape)}")
        return self.node("stablehlo.reshape", [value], shape, value.type, op)

    def transpose(self, value: Value, order: Sequence[int], op: Any) -> Value:
        if list(order) == list(range(value.rank)):
            return value
        shape = [value.shape[axis] for axis in order]
        return self.node("stablehlo.transpose", [value], shape, value.type, op, permutation=list(order))

    def broadcast(self, value: Value, shape: Shape, axes: Sequence[int], op: Any) -> Value:
        return self.node("stablehlo.broadcast_in_dim", [value], shape, value.type, op, broadcast_dimensions=list(axes))

    def convert(self, value: Value, kind: str, op: Any) -> Value:
        return value if value.type == kind else self.node("stablehlo.convert", [value], value.shape, kind, op)

    def slice(self, value: Value, offsets: Shape, sizes: Shape, steps: Sequence[int], op: Any) -> Value:
        """One entry in each `steps` along each axis."""
        if list(sizes) == list(value.shape) and all(o == 0 for o in offsets) and all(s == 1 for s in steps):
            return value
        plain = all(isinstance(n, int) for n in (*offsets, *sizes))
        for offset, size, step, have in zip(offsets, sizes, steps, value.shape, strict=True):
            low, _ = (dim(have) - dim(offset) - (dim(size) - 1) * step).tight_bounds(self.graph.ranges)
            if step < 1 or dim(offset).tight_bounds(self.graph.ranges)[0] < 0 or (low < 1 and size != 0):
                raise self.unsupported(op, f"it reads {size} entries from {offset}, step {step}, of {have}")
        if not plain:
            return self.node(
                "mlir.slice",
                [value],
                sizes,
                value.type,
                op,
                offsets=list(offsets),
                sizes=list(sizes),
                steps=list(steps),
            )
        stops = [int(o) + (int(n) - 1) * s + 1 if n else int(o) for o, n, s in zip(offsets, sizes, steps, strict=True)]
        return self.node(
            "stablehlo.slice", [value], sizes, value.type, op,
            start_indices=[int(o) for o in offsets], limit_indices=stops, strides=list(steps),
        )  # fmt: skip

    # --- constants ---

    def constant(self, op: Any, text: str, type_: str) -> Value:
        """A constant from the text of its attribute."""
        if not type_.startswith("tensor<"):
            kind = element_of(type_)
            number = scalar_number(text)
            if kind not in NUMPY:
                raise self.unsupported(op, f"a constant of the type {type_}")
            return Value((), kind, np.array(number).astype(NUMPY[kind]), name=self._fresh())
        shape, kind = parse_type(type_, f"a constant ({self.line(op)})")
        sizes, where = tuple(size for size in shape if size is not None), f" ({self.line(op)})"
        if text.startswith("dense_resource<"):
            return self.constants.resource(text, sizes, kind, where)
        self.constants.check_splat(sizes, where)
        return self.constants.dense((text, kind), dense_array(text, sizes, kind, where), sizes, kind)


def element_of(text: str) -> str:
    """The element type of a scalar or tensor type; sizes are i64."""
    if text.startswith("tensor<"):
        return parse_type(text, "a value")[1]
    return "i64" if text == "index" else text


def is_zero(value: Value) -> bool:
    """Whether a value is 0 everywhere."""
    number = splat(value)
    return number is not None and float(number) == 0


Rule = Callable[[LinalgReader, Any, list[Value], Values], list[Value]]
