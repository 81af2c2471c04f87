"""What decoders of formats read: one element of a packed weight, in a loop over its rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, Float32Type, TensorType
from xdsl.ir import SSAValue

from qcompiler.formats.base import ParamValue
from qcompiler.ir.scalar_code import Code, Scalar, where


def table(b: Builder, values: Sequence[float]) -> SSAValue:
    """A constant tensor of fp32 numbers."""
    type_ = TensorType(Float32Type(), [len(values)])
    return b.insert(arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, list(values)), type_)).result


@dataclass(frozen=True)
class Element:
    """The element that a loop's body decodes. `outer` builds in front of the loop, `code` in its body."""

    outer: Builder
    code: Code
    sections: Mapping[str, SSAValue]
    params: Mapping[str, ParamValue]
    rows: int
    cols: int
    row: Scalar
    col: Scalar
    given: Mapping[str, Scalar] = field(default_factory=dict)
    """Entries of sections that the loop itself reads."""

    @property
    def flat(self) -> Scalar:
        """Its place in the matrix, row by row."""
        return self.row * self.cols + self.col

    def group(self, size: int | str) -> Scalar:
        """The number of its group of `size` consecutive elements; "row" is a group of the whole row."""
        return self.row if size == "row" else self.flat // int(size)

    def byte(self, section: str, at: Scalar) -> Scalar:
        """A byte as an i32 from 0 to 255."""
        return self.code.read(self.sections[section], at).unsigned()

    def signed(self, section: str, at: Scalar) -> Scalar:
        """A byte as an i32 from -128 to 127."""
        return self.code.read(self.sections[section], at).to("i32")

    def own(self, section: str) -> Scalar:
        """The byte of a section that has one for each element, as an i32 from -128 to 127."""
        return self.given[section].to("i32") if section in self.given else self.signed(section, self.flat)

    def of_row(self, section: str) -> Scalar:
        """The entry of a section of floats that has one for each row, in fp32."""
        return self.given[section].to("f32") if section in self.given else self.number(section, self.row)

    def number(self, section: str, at: Scalar | int) -> Scalar:
        """An entry of a section of floats, in fp32."""
        place = self.code.constant(at, "index") if isinstance(at, int) else at
        return self.code.read(self.sections[section], place).to("f32")

    def half(self, section: str, at: Scalar) -> Scalar:
        """Two bytes as an fp16 number, in fp32."""
        word = self.byte(section, at) | self.byte(section, at + 1) << 8
        return word.to("i16").bits("f16").to("f32")

    def looked_up(self, values: Sequence[float], code: Scalar) -> Scalar:
        """The entry of a table of fp32 numbers."""
        return self.code.read(table(self.outer, values), code.to("index"))


def e4m3(byte: Scalar) -> Scalar:
    """OCP 8-bit floating point, E4M3: no infinities; NaN where all bits but the sign are set."""
    sign, rest = (byte & 0x80) << 24, byte & 0x7F
    normal = ((rest << 20) + (120 << 23)).bits("f32")
    small = rest.to("f32") * 2.0**-9
    number = where(rest < 8, small, normal).bits("i32")
    return (where(rest.equals(0x7F), rest.of(0x7FC00000), number) | sign).bits("f32")


def e5m2(byte: Scalar) -> Scalar:
    """OCP 8-bit floating point, E5M2: the upper byte of an fp16 number."""
    return (byte << 8).to("i16").bits("f16").to("f32")


def e8m0(byte: Scalar) -> Scalar:
    """OCP MX: 2^(byte - 127), and NaN for 255. 2^-127 is no normal fp32 number."""
    power = where(byte.equals(0), byte.of(0x00400000), byte << 23)
    return where(byte.equals(255), byte.of(0x7FC00000), power).bits("f32")
