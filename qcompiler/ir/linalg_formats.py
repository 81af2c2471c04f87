"""Decodes packed weights by plain `linalg.generic` over the bytes of their sections.

    nf4    table[nibble] * absmax[(n*K + k) floordiv block]       even index in the high nibble
    int8   code[n, k] * scale[n]
    int4   (nibble - 8 | zero[…]) * scale[(n*K + k) floordiv group]      even index in the low nibble

This is written from the formats' documents, not from their declarations: an independent check of what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import AnyFloat, Float32Type, IntegerType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap

from qcompiler import formats
from qcompiler.errors import QCompilerError
from qcompiler.ir import build
from qcompiler.ir.types import ELEMENT_TYPES, QTensorType
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import DTYPE_NAMES

_I32, _F32 = IntegerType(32), Float32Type()

# QLoRA (Dettmers et al. 2023), appendix E
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def sections_of(type_: QTensorType) -> list[tuple[str, int, int, DType]]:
    """(name, byte offset, entries, dtype) of each section of a packed weight's canonical bytes; bytes are i8."""
    fmt = formats.get(type_.format.ref.name, **type_.format.ref.params)
    found: list[tuple[str, int, int, DType]] = []
    for section in fmt.sections(*type_.shape):
        dtype = DTYPE_NAMES[section.dtype]
        count = section.nbytes // section.dtype.itemsize
        found.append((section.name, section.offset, count, "i8" if dtype == "ui8" else dtype))
    return found


_WRITTEN: dict[str, set[str]] = {"nf4": {"block"}, "int8": set(), "int4": {"group", "symmetric"}}
"""The parameters that `decode_weight` supports. Other parameters change the bytes."""


def decode_weight(b: Builder, type_: QTensorType, sections: Mapping[str, SSAValue]) -> SSAValue:
    """The f32 values (rows, cols) of a packed weight, rounded to its element type and widened again."""
    reference, (rows, cols) = type_.format.ref, type_.shape
    if type_.layout.layout_name.data != "canonical":
        raise QCompilerError(f"linalg decodes canonical bytes only, not layout '{type_.layout.layout_name.data}'")
    if reference.params.keys() - _WRITTEN.get(reference.name, reference.params.keys()):
        raise QCompilerError(f"the format '{reference.name}' with {reference.params} has no decoder in linalg yet")
    flat = AffineDimExpr(0) * cols + AffineDimExpr(1)
    group = reference.params.get("block", reference.params.get("group", 1))
    if not isinstance(group, int):
        raise QCompilerError(f"the format '{reference.name}' with group={group} has no decoder in linalg yet")
    reads: list[tuple[str, AffineExpr]]
    match reference.name:
        case "nf4":
            reads = [("codes", flat // 2), ("absmax", flat // group)]
        case "int8":
            reads = [("codes", flat), ("scales", AffineDimExpr(0))]
        case "int4":
            reads = [("codes", flat // 2), ("scales", flat // group)]
            if "zeros" in sections:
                reads.append(("zeros", flat // group))
        case name:
            raise QCompilerError(f"the format '{name}' has no decoder in linalg yet")

    def body(i: Builder, s: Sequence[SSAValue]) -> SSAValue:
        if reference.name == "int8":
            code: SSAValue = i.insert(arith.SIToFPOp(s[0], _F32)).result
        else:
            nibble = _nibble(i, s[0], cols, high_first=reference.name == "nf4")
            zero = s[2] if len(reads) > 2 else None
            code = _table(i, nibble) if reference.name == "nf4" else _shifted(i, nibble, zero)
        scale = s[1] if s[1].type == _F32 else i.insert(arith.ExtFOp(s[1], _F32)).result
        value: SSAValue = i.insert(arith.MulfOp(code, scale)).result
        narrow = ELEMENT_TYPES[type_.dtype]
        if narrow != _F32:
            assert isinstance(narrow, AnyFloat)
            value = i.insert(arith.ExtFOp(i.insert(arith.TruncFOp(value, narrow)).result, _F32)).result
        return value

    operands = [sections[name] for name, _ in reads]
    maps = [AffineMap(2, 0, (expr,)) for _, expr in reads]
    return build.generic(b, operands, [*maps, AffineMap.identity(2)], (rows, cols), "f32", ["parallel"] * 2, body)


def _nibble(b: Builder, byte: SSAValue, cols: int, *, high_first: bool) -> SSAValue:
    """The 4-bit code of element (d0, d1), as i32."""
    row, column = (b.insert(IndexOp(axis)).result for axis in (0, 1))
    start = b.insert(arith.MuliOp(row, build.index_constant(b, cols))).result
    position = b.insert(arith.AddiOp(start, column)).result
    odd = b.insert(arith.RemUIOp(position, build.index_constant(b, 2))).result
    is_high = b.insert(arith.CmpiOp(odd, build.index_constant(b, 0 if high_first else 1), "eq")).result
    wide = b.insert(arith.ExtUIOp(byte, _I32)).result
    high = b.insert(arith.ShRUIOp(wide, build.scalar(b, 4, "i32"))).result
    chosen = b.insert(arith.SelectOp(is_high, high, wide)).result
    return b.insert(arith.AndIOp(chosen, build.scalar(b, 15, "i32"))).result


def _table(b: Builder, code: SSAValue) -> SSAValue:
    """NF4's table as a chain of selects."""
    value = build.scalar(b, _NF4[0], "f32")
    for index, entry in enumerate(_NF4[1:], start=1):
        here = b.insert(arith.CmpiOp(code, build.scalar(b, index, "i32"), "eq")).result
        value = b.insert(arith.SelectOp(here, build.scalar(b, entry, "f32"), value)).result
    return value


def _shifted(b: Builder, code: SSAValue, zero: SSAValue | None) -> SSAValue:
    """`code - zero` as f32; the zero is 8 if the format is symmetric."""
    offset = build.scalar(b, 8, "i32") if zero is None else b.insert(arith.ExtUIOp(zero, _I32)).result
    return b.insert(arith.SIToFPOp(b.insert(arith.SubiOp(code, offset)).result, _F32)).result
