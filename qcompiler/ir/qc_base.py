"""Shared parts of all `qc` ops: checks of `#qc.dims`, and one readable syntax.

    %1 = qc.const @encoder.w : !qc.qtensor<384x384xf32, …>
    %2 = qc.linear %0, %1 bias(%b) {qc.path = "encoder"} : tensor<?x384xf32, #qc.dims<["s", 384]>>
    %3 = qc.softmax %2 {axis = 1} : tensor<?x384xf32, #qc.dims<["s", 384]>>

The order is: the op's key (a symbol or an expression), its operands, optional operands by name, one dictionary of
properties and attributes, the result types, and the region if there is one. If there are several, all but the last
stand behind their names (`prologue { … }`). Operand types are not printed: they are
those of the operands' definitions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, TensorType, UnitAttr, f64, i64
from xdsl.ir import Attribute, Region, SSAValue
from xdsl.irdl import IRDLOperation, OptionalDef, VariadicDef
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from qcompiler.formats import int8_rows
from qcompiler.ir.types import QTensorType, shape_of, verify_dims
from qcompiler.plan.dims import Dim

_KEYS = {
    "qc.const": "sym", "qc.dim": "expr", "qc.state": "sym", "qc.state_update": "sym", "qc.torch_call": "target",
}  # fmt: skip
"""The property printed without its name after the op's name."""


class QCOp(IRDLOperation):
    """Base class: every tensor operand and result has well-formed `#qc.dims`."""

    def verify_(self) -> None:
        for value in (*self.operands, *self.results):
            if isinstance(value.type, TensorType):
                verify_dims(value.type)
        self.verify_op()

    def verify_op(self) -> None:
        """Op-specific checks. Shapes and element types of all operands have been checked before."""

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            raise VerifyException(f"{self.name}: {message}")

    def expect_axis(self, axis: int, shape: Sequence[Dim]) -> None:
        self.expect(0 <= axis < len(shape), f"axis {axis} is out of range for rank {len(shape)}")

    def expect_shape(self, value: SSAValue, wanted: Sequence[Dim], what: str = "the result") -> None:
        found = shape_of(value.type)
        self.expect(found == tuple(wanted), f"{what} must have shape {tuple(wanted)}, not {found}")

    def expect_rows_of_int8(self, x: SSAValue, w: SSAValue) -> None:
        """x holds int8 rows (…, row_bytes(K)) for the quantised weight w (N, K)."""
        columns, given = int(shape_of(w.type)[1]), shape_of(x.type)[-1]
        width = int8_rows.row_bytes(columns)
        self.expect(isinstance(w.type, QTensorType), "rows of int8 are multiplied with a quantised weight")
        self.expect(given == width, f"rows of int8 of K = {columns} have {width} bytes, x has {given}")

    # --- syntax ---

    def print(self, printer: Printer) -> None:
        print_op(self, printer)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        return parse_op(cls, parser)


_Op = TypeVar("_Op", bound=QCOp)


@functools.cache
def _operand_groups(cls: type[QCOp]) -> tuple[tuple[str, str], ...]:
    """(name, "one" | "optional" | "many") of each operand, in order."""
    groups: list[tuple[str, str]] = []
    for name, definition in cls.get_irdl_definition().operands:
        kind = "one"
        if isinstance(definition, OptionalDef):
            kind = "optional"
        elif isinstance(definition, VariadicDef):
            kind = "many"
        groups.append((name, kind))
    return tuple(groups)


def _is_plain_list(cls: type[QCOp]) -> bool:
    """Whether the op's only operands are one list, which is printed without a name."""
    return len(_operand_groups(cls)) == 1 and _operand_groups(cls)[0][1] == "many"


# --- printing --------------------------------------------------------------------------------------------------------


def print_op(op: QCOp, printer: Printer) -> None:
    """Prints everything after the op's name."""
    key = _KEYS.get(op.name)
    if key is not None:
        printer.print_string(" ")
        printer.print_attribute(op.properties[key])
    cls = type(op)
    _print_operands(op, cls, printer)
    entries = {k: v for k, v in op.properties.items() if k not in (key, "operandSegmentSizes")}
    entries.update(op.attributes)
    if entries:
        printer.print_string(" {")
        printer.print_list(entries.items(), lambda entry: _print_entry(entry, printer))
        printer.print_string("}")
    if op.results:
        printer.print_string(" : ")
        printer.print_list([result.type for result in op.results], printer.print_attribute)
    names = [name for name, _ in cls.get_irdl_definition().regions]
    for name, region in zip(names, op.regions, strict=True):
        if region.blocks:
            printer.print_string(" " if name == names[-1] else f" {name} ")
            printer.print_region(region)


def _print_operands(op: QCOp, cls: type[QCOp], printer: Printer) -> None:
    if _is_plain_list(cls):
        if op.operands:
            printer.print_string(" ")
            printer.print_list(op.operands, printer.print_ssa_value)
        return
    separator = " "
    for name, kind in _operand_groups(cls):
        value: Any = getattr(op, name)
        if kind == "one":
            printer.print_string(separator)
            printer.print_ssa_value(value)
            separator = ", "
        elif value is not None and value != ():
            printer.print_string(f" {name}(")
            printer.print_list([value] if isinstance(value, SSAValue) else value, printer.print_ssa_value)
            printer.print_string(")")


def _print_entry(entry: tuple[str, Attribute], printer: Printer) -> None:
    name, value = entry
    printer.print_identifier_or_string_literal(name)
    if isinstance(value, UnitAttr):
        return
    printer.print_string(" = ")
    if isinstance(value, IntegerAttr) and value.type == i64:
        printer.print_string(str(value.value.data))
    elif isinstance(value, FloatAttr) and value.type == f64:
        printer.print_float(value.value.data, f64)
    else:
        printer.print_attribute(value)


# --- parsing ---------------------------------------------------------------------------------------------------------


def parse_op(cls: type[_Op], parser: Parser) -> _Op:
    """Parses the op whose name was just read."""
    properties: dict[str, Attribute] = {}
    key = _KEYS.get(cls.name)
    if key is not None:
        properties[key] = _parse_key(parser)
    operands = _parse_operands(cls, parser)
    attributes: dict[str, Attribute] = {}
    definition = cls.get_irdl_definition()
    for name, value in parser.parse_optional_attr_dict().items():
        (properties if name in definition.properties else attributes)[name] = value
    return cls.build(
        operands=operands,
        properties=properties,
        attributes=attributes,
        result_types=_parse_results(cls, parser),
        regions=_parse_regions([name for name, _ in definition.regions], parser),
    )


def _parse_regions(names: Sequence[str], parser: Parser) -> list[Region]:
    """All regions but the last stand behind their names."""
    regions = [
        parser.parse_region() if parser.parse_optional_keyword(name) is not None else Region() for name in names[:-1]
    ]
    return regions + [parser.parse_optional_region() or Region() for _ in names[-1:]]


def _parse_key(parser: Parser) -> Attribute:
    text = parser.parse_optional_str_literal()
    return StringAttr(text) if text is not None else parser.parse_attribute()


def _operand(parser: Parser) -> SSAValue:
    return _defined(parser, parser.parse_unresolved_operand())


def _defined(parser: Parser, operand: UnresolvedOperand) -> SSAValue:
    """The value that an operand names. Code is straight-line, so it is already defined and its type is known."""
    values = parser.ssa_values.get(operand.operand_name, ())
    if operand.index >= len(values):
        parser.raise_error("this value is not defined before its use", operand.span)
    return values[operand.index]


def _parse_operands(cls: type[QCOp], parser: Parser) -> list[SSAValue | list[SSAValue]]:
    if _is_plain_list(cls):
        first = parser.parse_optional_unresolved_operand()
        if first is None:
            return [[]]
        values = [_defined(parser, first)]
        while parser.parse_optional_punctuation(",") is not None:
            values.append(_operand(parser))
        return [values]
    operands: list[SSAValue | list[SSAValue]] = []
    for index, (name, kind) in enumerate(_operand_groups(cls)):
        if kind == "one":
            if index:
                parser.parse_punctuation(",")
            operands.append(_operand(parser))
        elif parser.parse_optional_keyword(name) is not None:
            operands.append(parser.parse_comma_separated_list(parser.Delimiter.PAREN, lambda: _operand(parser)))
        else:
            operands.append([])
    return operands


def _parse_results(cls: type[QCOp], parser: Parser) -> list[Attribute | list[Attribute]]:
    results = cls.get_irdl_definition().results
    if not results or parser.parse_optional_punctuation(":") is None:
        return [[] for _ in results]
    types: list[Attribute] = [parser.parse_type()]
    while parser.parse_optional_punctuation(",") is not None:
        types.append(parser.parse_type())
    if isinstance(results[-1][1], VariadicDef):
        return [*types[: len(results) - 1], types[len(results) - 1 :]]
    return list(types)
