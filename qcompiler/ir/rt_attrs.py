"""Attributes of the `rt` dialect: each holds one small record of qcompiler/plan and prints it in MLIR syntax.

    #rt.symbol<"s", 1, 512>                                            plan.Symbol
    #rt.sig<"input_ids", @in0, i64, ["b", "s"], "torch.int64">         plan.TensorSig
    #rt.operand<"x", f32, "r", ["b*s", 384], [384, 1]>                 kernel.Operand
    #rt.view<@b0, f32, ["b*s", 384], [384, 1], "384*b">                plan.View (last: offset in elements)
    #rt.case<@linear_1, 1>                                             plan.SelectCase (no number: always)

A packed operand or view ends in `, #qc.format<…>, #qc.layout<…>` and has no strides. A plain tensor stored in a
kernel's layout ends in `, #qc.layout<…>`. `XAttr.of(record)` makes an attribute, and `.record` returns the record.

An attribute lists the fields of its record in the order of the text, each with its syntax. `RecordAttr` prints and
parses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args

import msgspec
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Data
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from qcompiler.ir.types import ELEMENT_TYPES, FormatAttr, LayoutAttr, dtype_of
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import Access, FormatRef, Operand, Strict
from qcompiler.plan.plan import SelectCase, Symbol, TensorSig, View

# --- the syntax of fields --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Syntax:
    """How the value of a field is printed and parsed. An `optional` one is left out, with its comma, if it is None."""

    write: Callable[[Printer, Any], None]
    read: Callable[[AttrParser], Any]
    optional: bool = False


def _optional(syntax: Syntax) -> Syntax:
    return Syntax(syntax.write, syntax.read, optional=True)


def _dim_text(value: Dim) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'


def _write_dims(printer: Printer, dims: tuple[Dim, ...]) -> None:
    printer.print_string("[" + ", ".join(map(_dim_text, dims)) + "]")


def _read_dim(parser: AttrParser) -> Dim:
    text = parser.parse_optional_str_literal()
    return dim(text).to_dim() if text is not None else parser.parse_integer(allow_boolean=False)


def _read_dims(parser: AttrParser) -> tuple[Dim, ...]:
    return tuple(parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: _read_dim(parser)))


def _read_access(parser: AttrParser) -> str:
    access = parser.parse_str_literal()
    if access not in get_args(Access):
        parser.raise_error('access must be "r", "w" or "rw"')
    return access


TEXT = Syntax(Printer.print_string_literal, AttrParser.parse_str_literal)
NAME = Syntax(Printer.print_symbol_name, lambda parser: parser.parse_symbol_name().data)
"""A reference to another op: `@name`."""
NUMBER = Syntax(
    lambda printer, value: printer.print_string(str(value)), lambda parser: parser.parse_integer(allow_boolean=False)
)
DTYPE = Syntax(
    lambda printer, dtype: printer.print_attribute(ELEMENT_TYPES[dtype]), lambda parser: dtype_of(parser.parse_type())
)
ACCESS = Syntax(Printer.print_string_literal, _read_access)
DIM = Syntax(lambda printer, value: printer.print_string(_dim_text(value)), _read_dim)
DIMS = Syntax(_write_dims, _read_dims)


# --- records ---------------------------------------------------------------------------------------------------------

RecordT = TypeVar("RecordT", bound=Strict)


class RecordAttr(Data[RecordT], Generic[RecordT]):
    """A record in angle brackets, its fields separated by commas.

    `FIELDS` lists the fields in the order of the text; optional ones come last. If `STORED`, the fields `format` and
    `layout` follow, each if it is not None.
    """

    RECORD: ClassVar[type[Strict]]
    FIELDS: ClassVar[dict[str, Syntax]]
    STORED: ClassVar[bool] = False

    @classmethod
    def of(cls, record: RecordT) -> Self:
        return cls(record)

    @property
    def record(self) -> RecordT:
        return self.data

    def __hash__(self) -> int:  # a format's parameters are a dictionary, which has no hash
        values = msgspec.structs.astuple(self.data)
        return hash(tuple(each for each in values if not isinstance(each, FormatRef)))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> RecordT:
        values: dict[str, Any] = {}
        with parser.in_angle_brackets():
            for field, syntax in cls.FIELDS.items():
                if syntax.optional:
                    present = parser.parse_optional_punctuation(",") is not None
                    values[field] = syntax.read(parser) if present else None
                    continue
                if values:
                    parser.parse_punctuation(",")
                values[field] = syntax.read(parser)
            if cls.STORED:
                values |= _read_storage(parser)
            return cls.RECORD(**values)  # type: ignore[return-value]

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        for number, (field, syntax) in enumerate(self.FIELDS.items()):
            value = getattr(self.data, field)
            if syntax.optional and value is None:
                continue
            printer.print_string(", " if number else "")
            syntax.write(printer, value)
        for attribute in _storage(self.data) if self.STORED else ():
            printer.print_string(", ")
            printer.print_attribute(attribute)
        printer.print_string(">")


def _storage(stored: Any) -> list[Attribute]:
    """The format and the layout of an operand or a view, as attributes."""
    found: list[Attribute] = []
    if stored.format is not None:
        found.append(FormatAttr.of(stored.format))
    if stored.layout is not None:
        found.append(LayoutAttr(StringAttr(stored.layout)))
    return found


def _read_storage(parser: AttrParser) -> dict[str, Any]:
    """The fields of the optional `, #qc.format<…>` and `, #qc.layout<…>` at the end."""
    found: dict[str, Any] = {}
    while parser.parse_optional_punctuation(",") is not None:
        attribute = parser.parse_attribute()
        if isinstance(attribute, FormatAttr) and not found:
            found["format"] = attribute.ref
        elif isinstance(attribute, LayoutAttr) and "layout" not in found:
            found["layout"] = attribute.layout_name.data
        else:
            parser.raise_error("expected #qc.format<…> and then #qc.layout<…>")
    return found


@irdl_attr_definition
class SymbolAttr(RecordAttr[Symbol]):
    """A dimension with its inclusive range."""

    name = "rt.symbol"
    RECORD = Symbol
    FIELDS: ClassVar = {"name": TEXT, "min": NUMBER, "max": NUMBER}


@irdl_attr_definition
class SigAttr(RecordAttr[TensorSig]):
    """One tensor argument or result of an entry point."""

    name = "rt.sig"
    RECORD = TensorSig
    FIELDS: ClassVar = {"name": TEXT, "arena": NAME, "dtype": DTYPE, "shape": DIMS, "torch_dtype": _optional(TEXT)}


@irdl_attr_definition
class OperandAttr(RecordAttr[Operand]):
    """An operand of a kernel."""

    name = "rt.operand"
    RECORD = Operand
    FIELDS: ClassVar = {"name": TEXT, "dtype": DTYPE, "access": ACCESS, "shape": DIMS, "strides": DIMS}
    STORED = True


@irdl_attr_definition
class ViewAttr(RecordAttr[View]):
    """A strided tensor in a buffer, counted in elements."""

    name = "rt.view"
    RECORD = View
    FIELDS: ClassVar = {"buffer": NAME, "dtype": DTYPE, "shape": DIMS, "strides": DIMS, "offset": DIM}
    STORED = True


@irdl_attr_definition
class CaseAttr(RecordAttr[SelectCase]):
    """A case of a select: its kernel is chosen if the select's expression is <= max; without a number, always."""

    name = "rt.case"
    RECORD = SelectCase
    FIELDS: ClassVar = {"kernel": NAME, "max": _optional(NUMBER)}
