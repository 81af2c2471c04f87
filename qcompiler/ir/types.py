"""Attributes and types of the `qc` dialect.

    !qc.qtensor<4096x11008xbf16, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    tensor<?x384xf32, #qc.dims<["s", 384]>>

A quantised tensor is one value: codes, scales, tables and offsets in one packed buffer. A dynamic dimension is `?` in
the shape and a symbolic expression (qcompiler/plan/dims.py) in the encoding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    BFloat16Type,
    DictionaryAttr,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerAttr,
    IntegerType,
    NoneAttr,
    Signedness,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import DType, FormatRef

DYNAMIC = DYNAMIC_INDEX
"""xDSL's marker for `?` in a tensor shape."""

ELEMENT_TYPES: dict[DType, Attribute] = {
    "f64": Float64Type(),
    "f32": Float32Type(),
    "f16": Float16Type(),
    "bf16": BFloat16Type(),
    "i64": IntegerType(64),
    "i32": IntegerType(32),
    "i16": IntegerType(16),
    "i8": IntegerType(8),
    "ui8": IntegerType(8, Signedness.UNSIGNED),
    "i1": IntegerType(1),
}
_DTYPE_NAMES: dict[Attribute, DType] = {t: name for name, t in ELEMENT_TYPES.items()}


@irdl_attr_definition
class DimsAttr(ParametrizedAttribute):
    """`#qc.dims<["b*s", 384]>`: one entry per dimension; text for a symbolic expression."""

    name = "qc.dims"
    text: StringAttr  # the entries, joined by ';'

    @staticmethod
    def of(shape: Sequence[Dim]) -> DimsAttr:
        return DimsAttr(StringAttr(";".join(str(dim(d)) for d in shape)))

    @property
    def dims(self) -> tuple[Dim, ...]:
        return _dims_of(self.text.data)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> list[Attribute]:
        with parser.in_angle_brackets():
            entries = parser.parse_comma_separated_list(
                parser.Delimiter.SQUARE,
                lambda: parser.parse_optional_str_literal() or str(parser.parse_integer(allow_boolean=False)),
            )
        return [StringAttr(";".join(str(dim(_number(e))) for e in entries))]

    def print_parameters(self, printer: Printer) -> None:
        entries = ", ".join(str(d) if isinstance(d, int) else f'"{d}"' for d in self.dims)
        printer.print_string(f"<[{entries}]>")


@functools.lru_cache(maxsize=65536)
def _dims_of(text: str) -> tuple[Dim, ...]:
    return tuple(dim(d).to_dim() for d in text.split(";")) if text else ()


def _number(text: str) -> Dim:
    return int(text) if text.lstrip("-").isdigit() else text


@irdl_attr_definition
class FormatAttr(ParametrizedAttribute):
    """`#qc.format<"nf4", {block = 64 : i64}>`: a storage format of qcompiler.formats, by name and parameters."""

    name = "qc.format"
    format_name: StringAttr
    params: DictionaryAttr

    @staticmethod
    def of(ref: FormatRef) -> FormatAttr:
        params: dict[str, Attribute] = {}
        for key, value in sorted(ref.params.items()):
            if isinstance(value, bool):
                params[key] = IntegerAttr.from_bool(value)
            elif isinstance(value, int):
                params[key] = IntegerAttr(value, IntegerType(64))
            else:
                params[key] = StringAttr(value)
        return FormatAttr(StringAttr(ref.name), DictionaryAttr(params))

    @property
    def ref(self) -> FormatRef:
        params: dict[str, int | bool | str] = {}
        for key, value in self.params.data.items():
            if isinstance(value, StringAttr):
                params[key] = value.data
            elif isinstance(value, IntegerAttr):
                number = value.value.data
                params[key] = bool(number) if value.type == IntegerType(1) else number
            else:
                raise VerifyException(f"#qc.format parameter {key!r} must be an integer, a boolean or a string")
        return FormatRef(name=self.format_name.data, params=params)


@irdl_attr_definition
class LayoutAttr(ParametrizedAttribute):
    """`#qc.layout<"canonical">`: how a packed tensor's bytes are arranged (kernels/layouts)."""

    name = "qc.layout"
    layout_name: StringAttr


CANONICAL = LayoutAttr(StringAttr("canonical"))


@irdl_attr_definition
class QTensorType(ParametrizedAttribute, TypeAttribute):
    """`!qc.qtensor<NxKxT, format, layout>`: a quantised tensor as one packed buffer; its values decode to `T`."""

    name = "qc.qtensor"
    inner: TensorType  # shape and element type
    format: FormatAttr
    layout: LayoutAttr

    @staticmethod
    def of(shape: Sequence[int], dtype: DType, ref: FormatRef, layout: str = "canonical") -> QTensorType:
        inner = TensorType(ELEMENT_TYPES[dtype], list(shape))
        return QTensorType(inner, FormatAttr.of(ref), LayoutAttr(StringAttr(layout)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.get_shape()

    @property
    def dtype(self) -> DType:
        return dtype_of(self.inner.element_type)

    def verify(self) -> None:
        if DYNAMIC in self.inner.get_shape():
            raise VerifyException("!qc.qtensor needs a static shape")
        if dtype_of(self.inner.element_type) not in ("f32", "bf16", "f16"):
            raise VerifyException("!qc.qtensor decodes to f32, bf16 or f16")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> list[Attribute]:
        with parser.in_angle_brackets():
            shape, element = parser.parse_ranked_shape()
            parser.parse_punctuation(",")
            format_attr = parser.parse_attribute()
            parser.parse_punctuation(",")
            layout = parser.parse_attribute()
        return [TensorType(element, shape), format_attr, layout]

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string("<" + "x".join(str(d) for d in self.shape) + "x")
        printer.print_attribute(self.inner.element_type)
        printer.print_string(", ")
        printer.print_attribute(self.format)
        printer.print_string(", ")
        printer.print_attribute(self.layout)
        printer.print_string(">")


# --- helpers used by every pass --------------------------------------------------------------------------------------


def dtype_of(element: Attribute) -> DType:
    """The plan's name of an element type. VerifyException for a type that the IR does not use."""
    name = _DTYPE_NAMES.get(element)
    if name is None:
        raise VerifyException(f"element type {element} is not one of {', '.join(_DTYPE_NAMES.values())}")
    return name


def tensor(shape: Sequence[Dim | Expr], dtype: DType) -> TensorType:
    """A tensor type. Symbolic dimensions become `?` with a `#qc.dims` encoding."""
    dims = tuple(dim(d).to_dim() for d in shape)
    if all(isinstance(d, int) for d in dims):
        return TensorType(ELEMENT_TYPES[dtype], [int(d) for d in dims])
    sizes = [d if isinstance(d, int) else DYNAMIC for d in dims]
    return TensorType(ELEMENT_TYPES[dtype], sizes, DimsAttr.of(dims))


def shape_of(type_: Attribute) -> tuple[Dim, ...]:
    """The shape as dims, symbolic ones included. VerifyException if a `?` has no `#qc.dims` entry."""
    if isinstance(type_, QTensorType):
        return type_.shape
    assert isinstance(type_, TensorType)
    if isinstance(type_.encoding, DimsAttr):
        return type_.encoding.dims
    if DYNAMIC in type_.get_shape():
        raise VerifyException(f"{type_} has a dynamic dimension without a #qc.dims name")
    return tuple(type_.get_shape())


def tensor_dtype(type_: Attribute) -> DType:
    """The name of the element type of a tensor or quantised tensor."""
    if isinstance(type_, QTensorType):
        return type_.dtype
    assert isinstance(type_, TensorType)
    return dtype_of(type_.element_type)


def verify_dims(type_: TensorType) -> None:
    """Checks that the encoding agrees with the shape: same rank, equal static entries, symbolic entries at `?`."""
    if isinstance(type_.encoding, NoneAttr):
        return
    if not isinstance(type_.encoding, DimsAttr):
        raise VerifyException(f"the encoding of {type_} is not #qc.dims")
    sizes, dims = type_.get_shape(), type_.encoding.dims
    if len(sizes) != len(dims):
        raise VerifyException(f"#qc.dims has {len(dims)} entries for a tensor of rank {len(sizes)}")
    for size, entry in zip(sizes, dims, strict=True):
        if (size == DYNAMIC) == isinstance(entry, int) or (isinstance(entry, int) and entry != size):
            raise VerifyException(f"#qc.dims entry {entry!r} does not fit the size {'?' if size == DYNAMIC else size}")
