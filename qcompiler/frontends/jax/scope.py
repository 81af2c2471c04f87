"""The interface for builders of StableHLO operators, and the table of them.

A builder is a function `(scope, node) -> value`, or a tuple of values, registered by `@lowers("stablehlo.add")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from xdsl.ir import Block, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.frontends.common.loops import Loops, Number, Shape, combine
from qcompiler.frontends.common.scalars import FLOATS, Scalars, opmath
from qcompiler.frontends.jax.graph import Node, Value
from qcompiler.ir import build, qc, types
from qcompiler.ir.module import set_path
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, Expr, Range, dim
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES, WeightStore

V = SSAValue
Result = V | tuple[V, ...]
BuildFn = Callable[["Scope", Node], Result]

BUILDERS: dict[str, BuildFn] = {}
"""Every operator with a lowering."""


def lowers(*names: str) -> Callable[[BuildFn], BuildFn]:
    """Registers a builder for operators, by their full names."""

    def register(function: BuildFn) -> BuildFn:
        for name in names:
            assert name not in BUILDERS, name
            BUILDERS[name] = function
        return function

    return register


@dataclass
class Scope(Loops):
    """The function under construction. `at(node)` gives a scope whose ops have the node's place as their path."""

    block: Block
    ranges: Mapping[str, Range]
    weights: WeightStore
    values: dict[Value, V] = field(default_factory=dict)
    path: str = ""

    def __post_init__(self) -> None:
        self.builder = build.with_path(InsertPoint.at_end(self.block), self.path)

    def at(self, path: str) -> Scope:
        return Scope(self.block, self.ranges, self.weights, self.values, path)

    def value(self, value: Value) -> V:
        """The SSA value; what is known at compile time becomes a constant where it is first read."""
        if value not in self.values:
            assert value.known is not None, f"{value} has no value yet"
            self.values[value] = self._constant(value)
        return self.values[value]

    def _constant(self, value: Value) -> V:
        known = value.known
        assert known is not None
        if known.dtype == object:
            entries = [self.reshape(self.cast(self.symbolic(_size(e)), value.dtype), [1]) for e in known.reshape(-1)]
            return self.reshape(build.concat(self.builder, entries, 0), value.shape)
        stored = signed(known).astype(NUMPY_DTYPES[value.dtype], copy=False)
        flat = stored.reshape(-1)
        if flat.size and _uniform(flat):
            return self.full(number(flat[0]), value.shape, value.dtype)
        if not flat.size:
            return self.full(0, value.shape, value.dtype)
        thin = _without_repeats(stored)  # a mask for all heads is folded as one for each
        key = f"constant.{len(self.weights)}"
        self.weights.add_array(key, np.ascontiguousarray(thin), ())
        op = qc.ConstOp(key, types.tensor(thin.shape, value.dtype))
        set_path(op, key)
        self.block.add_op(op)
        return build.broadcast_to(self.builder, op.result, value.shape)

    def dim(self, size: Dim | Expr) -> Dim:
        return dim(size).to_dim()

    def take(self, x: V, index: V, axis: int) -> V:
        """numpy.take: an index of any rank replaces the axis."""
        shape = shape_of(x.type)
        out = (*shape[:axis], *shape_of(index.type), *shape[axis + 1 :])
        return self.insert(qc.GatherOp(x, index, types.tensor(out, tensor_dtype(x.type)), axis=axis))

    def along(self, x: V, index: V, axis: int) -> V:
        """numpy.take_along_axis."""
        type_ = types.tensor(shape_of(index.type), tensor_dtype(x.type))
        return self.insert(qc.GatherOp(x, index, type_, axis=axis, mode="along"))

    def operand(self, value: Value) -> V | Number:
        """The SSA value, or the number of a constant with one value everywhere: bodies hold numbers themselves."""
        known = splat(value)
        return known if known is not None else self.value(value)

    def elementwise(self, node: Node, body: Callable[..., V], *, compute: DType | None = None) -> V:
        """A loop over operands of one shape, computed in the first operand's opmath and rounded once."""
        inputs = [self.operand(v) for v in node.operands]
        chosen = compute if compute is not None else opmath(node.operands[0].dtype)
        return self.pointwise(inputs, body, compute=chosen, result=node.result.dtype, shape=node.result.shape)


def _size(entry: object) -> Dim:
    return dim(entry if isinstance(entry, Expr) else int(entry)).to_dim()  # type: ignore[call-overload]


def _without_repeats(stored: np.ndarray) -> np.ndarray:
    """The array with size 1 along each axis on which the bytes of its entries repeat: 0.0 and -0.0 are two values."""
    for axis, size in enumerate(stored.shape):
        first = stored.take([0], axis)
        if size > 1 and bool((_bytes(stored) == _bytes(first)).all()):
            stored = first
    return stored


def _uniform(flat: np.ndarray) -> bool:
    """Whether all entries have the same bytes: 0.0 and -0.0 are two values."""
    whole = _bytes(flat)
    return bool((whole == whole[0]).all())


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of each entry, in a last axis of their own."""
    return np.ascontiguousarray(array)[..., None].view(np.uint8)


def splat(value: Value) -> Number | None:
    """The number that a signed or floating constant has everywhere, also behind broadcasts and conversions."""
    known, owner = value.known, value.owner
    if known is not None:
        flat = known.reshape(-1)
        plain = known.dtype != object and not value.unsigned and flat.size > 0
        return number(flat[0]) if plain and _uniform(flat) else None
    if owner is not None and owner.op in ("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim"):
        return splat(owner.operands[0])
    return None


def signed(known: np.ndarray) -> np.ndarray:
    """Unsigned integers as the signed ones of the same bits, except bytes."""
    kind = known.dtype
    return known.view(kind.str.replace("u", "i")) if kind.kind == "u" and kind.itemsize > 1 else known


def number(entry: object) -> Number:
    """A NumPy scalar as a Python number."""
    value = entry.item() if isinstance(entry, np.generic) else entry
    return value if isinstance(value, int | float | bool) else float(value)  # type: ignore[arg-type]


__all__ = [
    "BUILDERS", "FLOATS", "BuildFn", "Dim", "Loops", "Number", "Result", "Scalars", "Scope", "Sequence", "Shape", "V",
    "combine", "lowers", "number", "opmath", "signed", "splat",
]  # fmt: skip
