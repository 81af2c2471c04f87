"""A StableHLO text as the `Graph` of the JAX road: the same reader, with constants as weights.

%w = stablehlo.constant dense_resource<w> : tensor<8x16xf32>     a leaf `w`, quantised as an array of JAX's is
%n = tensor.dim %x, %c0                                          b
%s = shape.shape_of %x                                           [b, 8]
%t = shape.broadcast %s, %u                                      [b, 8], or an error if that depends on b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qcompiler.errors import ExportError, UnsupportedOperatorError
from qcompiler.frontends.jax.attributes import array_of as dense_array
from qcompiler.frontends.jax.attributes import attributes_of, static_shape
from qcompiler.frontends.jax.fold import entries_of, fold, scalar_of
from qcompiler.frontends.jax.graph import NUMPY, Graph, Value, user_place
from qcompiler.frontends.jax.reader import _RULES as READER_RULES
from qcompiler.frontends.jax.reader import IDENTITIES, Reader
from qcompiler.frontends.jax.table import BUILDERS, COMPOSITES
from qcompiler.frontends.mlir.bindings import walk
from qcompiler.frontends.mlir.constants import Constants
from qcompiler.frontends.mlir.dense import dense_array as dense_text
from qcompiler.frontends.mlir.model import MlirModel
from qcompiler.frontends.mlir.scalars import SCALARS
from qcompiler.frontends.mlir.types import parse_type
from qcompiler.plan.dims import dim

Values = dict[Any, Value]


def read_stablehlo(model: MlirModel, graph: Graph, values: Sequence[Value], constants: Constants) -> None:
    """Fills the graph from the function, whose arguments have these values. UnsupportedOperatorError with the line."""
    for op in walk(model.function):
        if not op.name.startswith(("stablehlo.", "chlo.", "func.", "arith.", "shape.", "tensor.", "cf.assert")):
            raise UnsupportedOperatorError(
                f"the operator {op.name} has no lowering ({model.line(str(op.location))}): a StableHLO text may have "
                "ops of stablehlo, chlo and func, and the sizes that torch-mlir writes with arith, shape and tensor"
            )
    reader = StablehloReader(model, graph, constants)
    graph.returned = reader._call(model.function, list(values))


class StablehloReader(Reader):
    """The reader of the JAX road for texts that anyone wrote."""

    terminators = (*Reader.terminators, "shape.assuming_yield")

    def __init__(self, model: MlirModel, graph: Graph, constants: Constants) -> None:
        self.functions = dict(model.functions)
        self.graph, self.composites = graph, COMPOSITES
        self.count = 0
        self.callers = []
        self.model, self.constants = model, constants

    def place(self, op: Any) -> tuple[str, str]:
        """The line and the place that a text names. It may name any file, so none is read."""
        location = str(op.location)
        if (own := user_place(location)) is not None:
            file, line = own
            return f"{Path(file).name}:{line}", f"{file}:{line}"
        named = self.model.line(location)
        return named, named

    def _read(self, op: Any, operands: list[Value], values: Values) -> list[Value]:
        for result in op.results:
            if str(result.type).startswith("tensor"):
                self._check_result(op, result)
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, operands, values)
        if op.name in SCALARS:
            return [self.scalar(op, operands)]
        if op.name not in READER_RULES and op.name not in IDENTITIES and op.name not in BUILDERS:
            raise UnsupportedOperatorError(
                f"the operator {op.name} has no lowering{self.where(op)}. Rewrite that part with supported operators, "
                "or compute it outside of the program and pass the result in"
            )
        if any("dense_resource<" in str(op.attributes[name])[:40] for name in attributes_names(op)):
            raise UnsupportedOperatorError(f"{op.name} has a resource as an attribute{self.where(op)}: use a constant")
        results = super()._read(op, operands, values)
        if op.name in ("stablehlo.convert", "stablehlo.reshape") and results[0].floating:
            _number(operands[0], results[0])
        return results

    def _check_result(self, op: Any, result: Any) -> None:
        try:
            parse_type(str(result.type), f"the result of {op.name}{self.where(op)}")
        except ExportError as error:
            raise UnsupportedOperatorError(str(error)) from error

    def known(self, entries: Sequence[Any], shape: tuple[int, ...], kind: str = "i64") -> Value:
        """A tensor of sizes."""
        plain = [dim(each).to_dim() for each in entries]
        if all(isinstance(each, int) for each in plain):
            array = np.array(plain, np.int64).astype(NUMPY[kind]).reshape(shape)
        else:
            array = np.empty(len(plain), object)
            array[:] = [dim(each) for each in plain]
            array = array.reshape(shape)
        return Value(shape, kind, array, name=self._fresh())

    def scalar(self, op: Any, operands: list[Value]) -> Value:
        """An op of arith as the one of StableHLO that means the same."""
        shape = operands[-1].shape
        kind = _element(str(op.results[0].type))
        node = SCALARS[op.name](op, operands)
        node.line, node.source = self.place(op)
        node.results = [Value(shape, kind, owner=node, name=self._fresh())]
        known = fold(node, self.graph.ranges)
        if known is not None:
            node.result.known = known
        self.graph.nodes.append(node)
        self._limited(op)
        return node.result


def _number(source: Value, result: Value) -> None:
    """A converted number is a number: torch-mlir writes the sizes of means and their epsilons so."""
    known = source.known
    if known is not None and known.size == 1 and known.dtype != object and result.type in NUMPY:
        with np.errstate(over="ignore"):
            result.known = known.astype(NUMPY[result.type]).reshape([1] * result.rank)


def attributes_names(op: Any) -> list[str]:
    return [item if isinstance(item, str) else item.name for item in op.attributes]


def _element(text: str) -> str:
    """The element type of a scalar or a tensor type; sizes are i64."""
    if text.startswith("tensor<"):
        return parse_type(text, "a value")[1]
    return "i64" if text == "index" else text


# --- ops that are not StableHLO's ------------------------------------------------------------------------------------

Rule = Callable[[StablehloReader, Any, list[Value], Values], list[Value]]


def _constant(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del operands, values
    attribute, type_ = op.attributes["value"], str(op.results[0].type)
    if not type_.startswith("tensor<"):
        kind = _element(type_)
        number = attributes_of(op)["value"]
        return [Value((), kind, np.array(number).astype(NUMPY[kind]), name=reader._fresh())]
    shape, kind = parse_type(type_, f"a constant{reader.where(op)}")
    sizes = tuple(size for size in shape if size is not None)
    text = str(attribute)[:400]
    if text.startswith("dense_resource<"):
        return [reader.constants.resource(text, sizes, kind, reader.where(op))]
    if attribute.is_splat:
        reader.constants.check_splat(sizes, reader.where(op))
    array = dense_text(str(attribute), sizes, kind, reader.where(op)) if kind == "bf16" else dense_array(attribute)
    return [reader.constants.dense(attribute, array, sizes, kind)]


def _dim(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    axis = scalar_of(operands[1])
    if not isinstance(axis, int) or not 0 <= axis < operands[0].rank:
        raise UnsupportedOperatorError(f"{op.name} of a dimension that is not known{reader.where(op)}")
    return [reader.known([operands[0].shape[axis]], ())]


def _shape_of(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del op, values
    return [reader.known(operands[0].shape, (operands[0].rank,))]


def _const_shape(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del operands, values
    sizes = [int(size) for size in np.array(op.attributes["shape"]).reshape(-1)]
    return [reader.known(sizes, (len(sizes),))]


def _broadcast(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    shapes = [entries_of(value) for value in operands]
    rank = max((value.shape[0] for value in operands if isinstance(value.shape[0], int)), default=0)
    found: list[Any] = [1] * int(rank)
    for shape in shapes:
        if shape is None:
            raise UnsupportedOperatorError(f"{op.name} of shapes that depend on values{reader.where(op)}")
        for axis, size in enumerate(shape, int(rank) - len(shape)):
            if found[axis] == 1:
                found[axis] = size
            elif size not in (1, found[axis]):
                raise UnsupportedOperatorError(
                    f"{op.name} of {found[axis]} and {size}{reader.where(op)}: whether they are equal depends on the "
                    "sizes of a call. Give both dimensions the same symbol in dynamic_shapes"
                )
    return [reader.known(found, (len(found),))]


def _from_elements(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    entries = [scalar_of(value) for value in operands]
    if any(entry is None for entry in entries):
        raise UnsupportedOperatorError(f"{op.name} of numbers that are not known{reader.where(op)}")
    return [reader.known(entries, (len(entries),), _element(str(op.results[0].type)))]


def _witness(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    _broadcast(reader, op, operands, values)  # refuses shapes that do not fit
    return [Value((), "i1", np.array(True), name=reader._fresh())]


def _assuming(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del operands
    return reader._block(op.regions[0].blocks[0], dict(values))


def _cast(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    wanted = static_shape(op.results[0].type)
    for have, want in zip(operands[0].shape, wanted, strict=True):
        if want is not None and want != have:
            raise UnsupportedOperatorError(
                f"{op.name} says that the size {have} is {want}{reader.where(op)}: give the argument that size"
            )
    return operands


def _assert(reader: StablehloReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    known = operands[0].known
    if known is None or not bool(known.reshape(-1)[0]):
        raise UnsupportedOperatorError(
            f"cf.assert {op.attributes['msg']}{reader.where(op)}: whether it holds depends on values or sizes, or it "
            "does not hold; programs check nothing while they run. Take it out, or fix the sizes"
        )
    return []


_RULES: Mapping[str, Rule] = {
    "stablehlo.constant": _constant,
    "arith.constant": _constant,
    "tensor.dim": _dim,
    "tensor.from_elements": _from_elements,
    "tensor.cast": _cast,
    "shape.shape_of": _shape_of,
    "shape.const_shape": _const_shape,
    "shape.broadcast": _broadcast,
    "shape.cstr_broadcastable": _witness,
    "shape.assuming": _assuming,
    "cf.assert": _assert,
}
