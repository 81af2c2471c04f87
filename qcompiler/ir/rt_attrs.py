"""Attributes of the `rt` dialect: each holds one small record of qcompiler/plan and prints it in MLIR syntax.

    #rt.symbol<"s", 1, 512>                                            plan.Symbol
    #rt.sig<"input_ids", @in0, i64, ["b", "s"], "torch.int64">         plan.TensorSig
    #rt.operand<"x", f32, "r", ["b*s", 384], [384, 1]>                 kernel.Operand
    #rt.view<@b0, f32, ["b*s", 384], [384, 1], "384*b">                plan.View (last: offset in elements)
    #rt.case<@linear_1, 1>                                             plan.SelectCase (no number: always)

A packed operand or view ends in `, #qc.format<…>, #qc.layout<…>` and has no strides. A plain tensor stored in a
kernel's layout ends in `, #qc.layout<…>`. `XAttr.of(record)` makes an attribute, and `.record` returns the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Data
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from qcompiler.ir.types import ELEMENT_TYPES, FormatAttr, LayoutAttr, dtype_of
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import Access, DType, FormatRef, Operand
from qcompiler.plan.plan import SelectCase, Symbol, TensorSig, View

Dims = tuple[Dim, ...]


@irdl_attr_definition
class SymbolAttr(Data[Symbol]):
    """`#rt.symbol<"name", min, max>`: a dimension with its inclusive range."""

    name = "rt.symbol"

    @staticmethod
    def of(symbol: Symbol) -> SymbolAttr:
        return SymbolAttr(symbol)

    @property
    def record(self) -> Symbol:
        return self.data

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Symbol:
        with parser.in_angle_brackets():
            name = parser.parse_str_literal()
            _comma(parser)
            low = parser.parse_integer(allow_boolean=False)
            _comma(parser)
            return Symbol(name=name, min=low, max=parser.parse_integer(allow_boolean=False))

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_string_literal(self.data.name)
        printer.print_string(f", {self.data.min}, {self.data.max}>")


@irdl_attr_definition
class SigAttr(Data[TensorSig]):
    """`#rt.sig<"name", @arena, dtype, [shape], "torch dtype">`: one tensor argument or result of an entry point."""

    name = "rt.sig"

    @staticmethod
    def of(sig: TensorSig) -> SigAttr:
        return SigAttr(sig)

    @property
    def record(self) -> TensorSig:
        return self.data

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> TensorSig:
        with parser.in_angle_brackets():
            name = parser.parse_str_literal()
            _comma(parser)
            arena = parser.parse_symbol_name().data
            _comma(parser)
            dtype = dtype_of(parser.parse_type())
            _comma(parser)
            shape = _parse_dims(parser)
            torch_dtype = None
            if parser.parse_optional_punctuation(",") is not None:
                torch_dtype = parser.parse_str_literal()
            return TensorSig(name=name, arena=arena, dtype=dtype, shape=shape, torch_dtype=torch_dtype)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_string_literal(self.data.name)
        printer.print_string(", ")
        printer.print_symbol_name(self.data.arena)
        printer.print_string(", ")
        _print_dtype(printer, self.data.dtype)
        printer.print_string(f", {_dims_text(self.data.shape)}")
        if self.data.torch_dtype is not None:
            printer.print_string(", ")
            printer.print_string_literal(self.data.torch_dtype)
        printer.print_string(">")


@irdl_attr_definition
class OperandAttr(Data[Operand]):
    """`#rt.operand<"name", dtype, "access", [shape], [strides]>`: an operand of a kernel; access is r, w or rw."""

    name = "rt.operand"

    @staticmethod
    def of(operand: Operand) -> OperandAttr:
        return OperandAttr(operand)

    @property
    def record(self) -> Operand:
        return self.data

    def __hash__(self) -> int:  # the record may hold a dictionary (a format's parameters)
        return hash((self.data.name, self.data.dtype, self.data.access, self.data.shape, self.data.strides))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Operand:
        with parser.in_angle_brackets():
            name = parser.parse_str_literal()
            _comma(parser)
            dtype = dtype_of(parser.parse_type())
            _comma(parser)
            access = parser.parse_str_literal()
            if access not in get_args(Access):
                parser.raise_error('access must be "r", "w" or "rw"')
            _comma(parser)
            shape, strides = _parse_geometry(parser)
            format_, layout = _parse_storage(parser)
            return Operand(
                name=name, dtype=dtype, access=cast(Access, access), shape=shape, strides=strides, format=format_,
                layout=layout,
            )  # fmt: skip

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_string_literal(self.data.name)
        printer.print_string(", ")
        _print_dtype(printer, self.data.dtype)
        printer.print_string(f', "{self.data.access}", {_dims_text(self.data.shape)}, {_dims_text(self.data.strides)}')
        _print_storage(printer, self.data.format, self.data.layout)
        printer.print_string(">")


@irdl_attr_definition
class ViewAttr(Data[View]):
    """`#rt.view<@buffer, dtype, [shape], [strides], offset>`: a strided tensor in a buffer, counted in elements."""

    name = "rt.view"

    @staticmethod
    def of(view: View) -> ViewAttr:
        return ViewAttr(view)

    @property
    def record(self) -> View:
        return self.data

    def __hash__(self) -> int:  # the record may hold a dictionary (a format's parameters)
        return hash((self.data.buffer, self.data.dtype, self.data.shape, self.data.strides, self.data.offset))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> View:
        with parser.in_angle_brackets():
            buffer = parser.parse_symbol_name().data
            _comma(parser)
            dtype = dtype_of(parser.parse_type())
            _comma(parser)
            shape, strides = _parse_geometry(parser)
            _comma(parser)
            offset = _parse_dim(parser)
            format_, layout = _parse_storage(parser)
            return View(
                buffer=buffer, dtype=dtype, shape=shape, strides=strides, offset=offset, format=format_, layout=layout
            )

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_symbol_name(self.data.buffer)
        printer.print_string(", ")
        _print_dtype(printer, self.data.dtype)
        printer.print_string(f", {_dims_text(self.data.shape)}, {_dims_text(self.data.strides)}")
        printer.print_string(f", {_dim_text(self.data.offset)}")
        _print_storage(printer, self.data.format, self.data.layout)
        printer.print_string(">")


@irdl_attr_definition
class CaseAttr(Data[SelectCase]):
    """`#rt.case<@kernel, max>`: chosen if the select's expression is <= max; always, without a number."""

    name = "rt.case"

    @staticmethod
    def of(case: SelectCase) -> CaseAttr:
        return CaseAttr(case)

    @property
    def record(self) -> SelectCase:
        return self.data

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> SelectCase:
        with parser.in_angle_brackets():
            kernel = parser.parse_symbol_name().data
            limit = None
            if parser.parse_optional_punctuation(",") is not None:
                limit = parser.parse_integer(allow_boolean=False)
            return SelectCase(max=limit, kernel=kernel)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_symbol_name(self.data.kernel)
        printer.print_string(">" if self.data.max is None else f", {self.data.max}>")


# --- pieces of syntax ------------------------------------------------------------------------------------------------


def _comma(parser: AttrParser) -> None:
    parser.parse_punctuation(",")


def _dim_text(value: Dim) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'


def _dims_text(dims: Sequence[Dim]) -> str:
    return "[" + ", ".join(map(_dim_text, dims)) + "]"


def _parse_dim(parser: AttrParser) -> Dim:
    text = parser.parse_optional_str_literal()
    return dim(text).to_dim() if text is not None else parser.parse_integer(allow_boolean=False)


def _parse_dims(parser: AttrParser) -> Dims:
    return tuple(parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: _parse_dim(parser)))


def _parse_geometry(parser: AttrParser) -> tuple[Dims, Dims]:
    shape = _parse_dims(parser)
    _comma(parser)
    return shape, _parse_dims(parser)


def _parse_storage(parser: AttrParser) -> tuple[FormatRef | None, str | None]:
    """The optional `, #qc.format<…>` and `, #qc.layout<…>` at the end."""
    format_: FormatRef | None = None
    layout: str | None = None
    while parser.parse_optional_punctuation(",") is not None:
        attr = parser.parse_attribute()
        if isinstance(attr, FormatAttr) and format_ is None and layout is None:
            format_ = attr.ref
        elif isinstance(attr, LayoutAttr) and layout is None:
            layout = attr.layout_name.data
        else:
            parser.raise_error("expected #qc.format<…> and then #qc.layout<…>")
    return format_, layout


def _print_storage(printer: Printer, format_: FormatRef | None, layout: str | None) -> None:
    if format_ is not None:
        printer.print_string(", ")
        printer.print_attribute(FormatAttr.of(format_))
    if layout is not None:
        printer.print_string(", ")
        printer.print_attribute(LayoutAttr(StringAttr(layout)))


def _print_dtype(printer: Printer, dtype: DType) -> None:
    printer.print_attribute(ELEMENT_TYPES[dtype])
