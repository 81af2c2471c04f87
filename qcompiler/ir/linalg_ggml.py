"""Decoders of GGUF's formats: records of bytes, one for each block of a row (docs/formats/gguf.md).

Written from the pictures of the records and from ggml's names for their parts, not from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable

from qcompiler.ir.linalg_element import Element, e8m0
from qcompiler.ir.scalar_code import Scalar, where

_BLOCKS = "blocks"
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


class Record:
    """The record of an element's block: `j` is the element's place in the block."""

    def __init__(self, element: Element, elements: int, size: int) -> None:
        self.element = element
        self.at = element.flat // elements * size
        self.j = element.flat % elements

    def byte(self, offset: Scalar | int) -> Scalar:
        return self.element.byte(_BLOCKS, self.at + offset)

    def signed(self, offset: Scalar | int) -> Scalar:
        return self.element.signed(_BLOCKS, self.at + offset)

    def half(self, offset: int) -> Scalar:
        return self.element.half(_BLOCKS, self.at + offset)

    def bits(self, offset: int, apart: int, width: int) -> Scalar:
        """Entry `j` of a field of 1, 2 or 4 bits: entries that are `apart` from each other share a byte, the first in
        its lowest bits, and `apart` bytes follow each other."""
        shared = 8 // width
        place = self.j // (apart * shared) * apart + self.j % apart
        shift = (self.j // apart % shared * width).to("i32")
        return self.byte(place + offset) >> shift & ((1 << width) - 1)


def _q4_0(e: Element) -> Scalar:
    r = Record(e, 32, 18)
    return (r.bits(2, 16, 4) - 8).to("f32") * r.half(0)


def _q4_1(e: Element) -> Scalar:
    r = Record(e, 32, 20)
    return r.half(0) * r.bits(4, 16, 4).to("f32") + r.half(2)


def _fifth(r: Record, offset: int) -> Scalar:
    """Bit 4 of the codes of q5_0 and q5_1: bit `j` of a word of 32."""
    return (r.byte(r.j // 8 + offset) >> (r.j % 8).to("i32") & 1) << 4


def _q5_0(e: Element) -> Scalar:
    r = Record(e, 32, 22)
    return ((r.bits(6, 16, 4) | _fifth(r, 2)) - 16).to("f32") * r.half(0)


def _q5_1(e: Element) -> Scalar:
    r = Record(e, 32, 24)
    return r.half(0) * (r.bits(8, 16, 4) | _fifth(r, 4)).to("f32") + r.half(2)


def _q8_0(e: Element) -> Scalar:
    r = Record(e, 32, 34)
    return r.signed(r.j + 2).to("f32") * r.half(0)


def _q2_k(e: Element) -> Scalar:
    r = Record(e, 256, 84)
    both = r.byte(r.j // 16)
    scale, least = (both & 15).to("f32"), (both >> 4).to("f32")
    return r.half(80) * scale * r.bits(16, 32, 2).to("f32") - r.half(82) * least


def _q3_k(e: Element) -> Scalar:
    r = Record(e, 256, 110)
    code = r.bits(32, 32, 2) | r.bits(0, 32, 1) << 2
    s = r.j // 16
    low = r.byte(s % 8 + 96) >> (s // 8 * 4).to("i32") & 15
    high = r.byte(s % 4 + 104) >> (s // 4 * 2).to("i32") & 3
    scale = (low | high << 4) - 32
    return r.half(108) * scale.to("f32") * (code - 4).to("f32")


def _scale_and_min(r: Record) -> tuple[Scalar, Scalar]:
    """The 6-bit scale and minimum of q4_K and q5_K: ggml's `get_scale_min_k4` on bytes 4 to 15."""
    s = r.j // 32
    first, second, third = (r.byte(s % 4 + offset) for offset in (4, 8, 12))
    early = s < 4
    scale = where(early, first & 63, third & 15 | first >> 6 << 4)
    least = where(early, second & 63, third >> 4 | second >> 6 << 4)
    return scale.to("f32"), least.to("f32")


def _q4_k(e: Element) -> Scalar:
    r = Record(e, 256, 144)
    scale, least = _scale_and_min(r)
    return r.half(0) * scale * r.bits(16, 32, 4).to("f32") - r.half(2) * least


def _q5_k(e: Element) -> Scalar:
    r = Record(e, 256, 176)
    scale, least = _scale_and_min(r)
    code = r.bits(48, 32, 4) | r.bits(16, 32, 1) << 4
    return r.half(0) * scale * code.to("f32") - r.half(2) * least


def _q6_k(e: Element) -> Scalar:
    r = Record(e, 256, 210)
    code = r.bits(0, 64, 4) | r.bits(128, 32, 2) << 4
    scale = r.signed(r.j // 16 + 192).to("f32")
    return r.half(208) * scale * (code - 32).to("f32")


def _iq4_nl(e: Element) -> Scalar:
    r = Record(e, 32, 18)
    return r.half(0) * e.looked_up(_IQ4, r.bits(2, 16, 4))


def _iq4_xs(e: Element) -> Scalar:
    r = Record(e, 256, 136)
    s = r.j // 32
    low = r.byte(s // 2 + 4) >> (s % 2 * 4).to("i32") & 15
    high = r.byte(s // 4 + 2) >> (s % 4 * 2).to("i32") & 3
    scale = (low | high << 4) - 32
    return r.half(0) * scale.to("f32") * e.looked_up(_IQ4, r.bits(8, 16, 4))


def _tq1_0(e: Element) -> Scalar:
    """Base 3: a byte of five digits is ceil(number * 256 / 243), so that the first digit is `byte * 3 / 256`, and
    multiplying the byte by 3 brings up the next one. The last four bytes have four digits, in the same way."""
    r = Record(e, 256, 54)
    in_first, in_second = r.j < 160, r.j < 240
    second, third = where(in_first, r.j.of(0), r.j - 160), where(in_second, r.j.of(0), r.j - 240)
    place = where(in_first, r.j % 32, where(in_second, second % 16 + 32, third % 4 + 48))
    digit = where(in_first, r.j // 32, where(in_second, second // 16, third // 4))
    power = digit.of(81)
    for n, value in enumerate((1, 3, 9, 27)):
        power = where(digit.equals(n), digit.of(value), power)
    left = r.byte(place) * power.to("i32") & 255
    return ((left * 3 >> 8) - 1).to("f32") * r.half(52)


def _tq2_0(e: Element) -> Scalar:
    r = Record(e, 256, 66)
    return (r.bits(0, 32, 2) - 1).to("f32") * r.half(64)


def _mxfp4(e: Element) -> Scalar:
    r = Record(e, 32, 17)
    return e8m0(r.byte(0)) * e.looked_up(_E2M1, r.bits(1, 16, 4))


GGML: dict[str, Callable[[Element], Scalar]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_K": _q2_k, "q3_K": _q3_k,
    "q4_K": _q4_k, "q5_K": _q5_k, "q6_K": _q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "tq1_0": _tq1_0,
    "tq2_0": _tq2_0, "mxfp4_ggml": _mxfp4,
}  # fmt: skip
"""The value of an element, in fp32, by format."""
