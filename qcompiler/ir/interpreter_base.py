"""Shared parts of the interpreter's rules: values, the frame of one function call, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation, SSAValue

from qcompiler import formats
from qcompiler.errors import InterpreterError
from qcompiler.ir.interpreter_scalar import held_dtype, numpy_dtype
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor_dtype
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.weights import WeightStore

Array = npt.NDArray[Any]
"""A tensor's values. A scalar or an index has rank 0; a quantised tensor is its packed bytes (uint8, rank 1)."""

Unpack = Callable[[FormatRef | None, str, DType, tuple[int, ...], npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]
"""(format, layout, dtype, shape, bytes in that layout) -> canonical bytes."""


@dataclass
class Frame:
    """One call of a function: values of symbols, constants, states, and decoded weights."""

    symbols: Mapping[str, int]
    weights: WeightStore
    states: MutableMapping[str, Array] | None = None
    unpack: Unpack | None = None
    constants: Mapping[str, Array] = field(default_factory=dict)
    """What `@init` computed."""
    decoded: dict[tuple[int, DType], tuple[Array, Array]] = field(default_factory=dict)
    """(id of packed bytes, the type they decode to) -> (those bytes, kept alive; their values in f32)."""
    updates: dict[str, Array] = field(default_factory=dict)
    """States to be written when the call ends."""
    values: Mapping[SSAValue, Array] = field(default_factory=dict)
    """The values of the function so far: bodies of loops may read whole tensors."""

    def size(self, entry: int | str) -> int:
        """The value of a dim."""
        return entry if isinstance(entry, int) else dim(entry).evaluate(self.symbols)

    def shape(self, type_: Attribute) -> tuple[int, ...]:
        """The concrete shape of a tensor type."""
        return tuple(self.size(entry) for entry in shape_of(type_))

    def canonical(
        self, format_: FormatRef | None, layout: str, dtype: DType, shape: tuple[int, ...], data: Array
    ) -> Array:
        """Converts bytes to the canonical layout."""
        if layout == "canonical":
            return data
        if self.unpack is None:
            raise InterpreterError(f"constants in layout '{layout}' need the `unpack` argument of the interpreter")
        return self.unpack(format_, layout, dtype, shape, data)

    def packed(self, type_: QTensorType, data: Array) -> formats.PackedTensor:
        """A quantised tensor as a `PackedTensor` of its format."""
        reference, shape = type_.format.ref, type_.shape
        layout = type_.layout.layout_name.data
        rows, cols = shape[0], int(np.prod(shape[1:]))
        canonical = self.canonical(reference, layout, type_.dtype, shape, data)
        fmt = formats.get(reference.name, **reference.params)
        return formats.from_bytes(fmt, rows, cols, np.ascontiguousarray(canonical))

    def decode(self, type_: QTensorType, data: Array) -> Array:
        """The f32 values of a quantised tensor, rounded to its element type and widened again."""
        known = self.decoded.get((id(data), type_.dtype))
        if known is not None:
            return known[1]
        packed = self.packed(type_, data)
        values = round_to(packed.format.decode(packed).reshape(type_.shape), type_.dtype).astype(np.float32)
        self.decoded[id(data), type_.dtype] = (data, values)
        return values


Rule = Callable[[Any, Sequence[Array], Frame], Sequence[Array]]
RULES: dict[type[Operation], Rule] = {}
"""One rule per op class: (op, operands, frame) -> results."""

_R = TypeVar("_R", bound=Rule)


def rule(*classes: type[Operation]) -> Callable[[_R], _R]:
    """Registers a function as the rule of one or more op classes."""

    def register(function: _R) -> _R:
        for each in classes:
            RULES[each] = function
        return function

    return register


def round_to(values: Array, dtype: DType) -> Array:
    """One rounding (nearest even) to an element type; see `held_dtype`."""
    return values.astype(held_dtype(dtype), copy=False)


def accumulator(*operands: Array) -> np.dtype[Any]:
    """The type an op accumulates in: f32, f64 if an operand is f64, or the operands' own type for integers."""
    if all(x.dtype.kind in "iub" for x in operands):
        return np.result_type(*operands)
    return np.dtype(np.float64 if any(x.dtype == np.float64 for x in operands) else np.float32)


def where(op: Operation) -> str:
    """The op and its module path, for messages."""
    path = path_of(op)
    return f"{op.name} at '{path}'" if path else op.name


def check_result(op: Operation, index: int, value: Array, frame: Frame) -> None:
    """InterpreterError unless a rule's result has the type that the IR states."""
    type_ = op.results[index].type
    if isinstance(type_, QTensorType):
        return
    wanted = frame.shape(type_) if isinstance(type_, TensorType) else ()
    if value.shape != wanted:
        raise InterpreterError(f"{where(op)}: result {index} has shape {value.shape}, but its type says {wanted}")
    if value.dtype != numpy_dtype(type_):
        kind = tensor_dtype(type_) if isinstance(type_, TensorType) else str(type_)
        raise InterpreterError(f"{where(op)}: result {index} is {value.dtype}, but its type says {kind}")
