"""Decoders of GGUF's i-quants of one to three bits: vectors of a codebook, signs, small scales (docs/formats/gguf.md).

Written from the pictures of the records and from ggml's names for their parts (qs, qh, signs, scales), not from the
declarations; only the codebooks are those that the declarations use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qcompiler.formats import codebooks_ggml as books
from qcompiler.formats.codebook import Codebook
from qcompiler.ir.linalg_element import Element
from qcompiler.ir.linalg_ggml import Record
from qcompiler.ir.scalar_code import Scalar, where

_SIZES_OF_IQ2 = (8, 25, 43)
_SIZES_OF_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_SIZES_OF_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_ONE_EIGHTH = 0.125


def _from_book(e: Element, book: Codebook, values: Sequence[float], index: Scalar, place: Scalar) -> Scalar:
    """The value at `place` of vector `index` of the codebook."""
    listed = [float(values[int(digit)]) for digit in book.points.reshape(-1)]
    return e.looked_up(listed, index * book.size + place.to("i32"))


def _minus_if(bit: Scalar, value: Scalar) -> Scalar:
    return where(bit.equals(1), value.apply("negative"), value)


def _bit(byte: Scalar, place: Scalar) -> Scalar:
    return byte >> place.to("i32") & 1


def _sign_of_seven(seven: Scalar, place: Scalar) -> Scalar:
    """Sign `place` of eight, of which seven are stored: with the eighth, an even number of them is set."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    odd = (odd ^ odd >> 1) & 1
    return where(place < 7, _bit(seven, place), odd)


def _word(r: Record, offset: Scalar) -> Scalar:
    """28 bits of seven-bit groups of signs; the four bits above them are a scale."""
    first, second, third, fourth = (r.byte(offset + i) for i in range(4))
    return first | second << 8 | third << 16 | (fourth & 15) << 24


def _half_steps(r: Record, scale: Scalar, unit: float) -> Scalar:
    return r.half(0) * (scale.to("f32") + 0.5) * unit


def _nibble_of_16(r: Record, offset: int) -> Scalar:
    """The scale of 16 elements: a nibble, the lower one first."""
    return r.byte(r.j // 32 + offset) >> (r.j // 16 % 2 * 4).to("i32") & 15


def _iq2_xxs(e: Element) -> Scalar:
    r = Record(e, 256, 66)
    group, vector = r.j // 32 * 8, r.j // 8 % 4
    index = r.byte(group + vector + 2)
    seven = _word(r, group + 6) >> (vector * 7).to("i32") & 127
    value = _from_book(e, books.IQ2_XXS, _SIZES_OF_IQ2, index, r.j % 8)
    return _half_steps(r, r.byte(group + 9) >> 4, 0.25) * _minus_if(_sign_of_seven(seven, r.j % 8), value)


def _iq2_xs(e: Element) -> Scalar:
    r = Record(e, 256, 74)
    low, high = r.byte(r.j // 8 * 2 + 2), r.byte(r.j // 8 * 2 + 3)
    value = _from_book(e, books.IQ2_XS, _SIZES_OF_IQ2, low | (high & 1) << 8, r.j % 8)
    return _half_steps(r, _nibble_of_16(r, 66), 0.25) * _minus_if(_sign_of_seven(high >> 1, r.j % 8), value)


def _iq2_s(e: Element) -> Scalar:
    r = Record(e, 256, 82)
    qh = r.byte(r.j // 32 + 66) >> (r.j // 8 % 4 * 2).to("i32") & 3
    value = _from_book(e, books.IQ2_S, _SIZES_OF_IQ2, r.byte(r.j // 8 + 2) | qh << 8, r.j % 8)
    return _half_steps(r, _nibble_of_16(r, 74), 0.25) * _minus_if(_bit(r.byte(r.j // 8 + 34), r.j % 8), value)


def _iq3_xxs(e: Element) -> Scalar:
    r = Record(e, 256, 98)
    value = _from_book(e, books.IQ3_XXS, _SIZES_OF_IQ3_XXS, r.byte(r.j // 4 + 2), r.j % 4)
    at = r.j // 32 * 4
    seven = _word(r, at + 66) >> (r.j // 8 % 4 * 7).to("i32") & 127
    return _half_steps(r, r.byte(at + 69) >> 4, 0.5) * _minus_if(_sign_of_seven(seven, r.j % 8), value)


def _iq3_s(e: Element) -> Scalar:
    r = Record(e, 256, 110)
    qh = _bit(r.byte(r.j // 32 + 66), r.j // 4 % 8)
    value = _from_book(e, books.IQ3_S, _SIZES_OF_IQ3_S, r.byte(r.j // 4 + 2) | qh << 8, r.j % 4)
    scale = r.byte(r.j // 64 + 106) >> (r.j // 32 % 2 * 4).to("i32") & 15
    return r.half(0) * (scale * 2 + 1).to("f32") * _minus_if(_bit(r.byte(r.j // 8 + 74), r.j % 8), value)


def _ternary(e: Element, index: Scalar, place: Scalar, down: Scalar) -> Scalar:
    """-1, 0 or 1 of iq1's codebook, moved by an eighth."""
    value = _from_book(e, books.IQ1, (-1, 0, 1), index, place)
    eighth = value.of(_ONE_EIGHTH)
    return value + where(down.equals(1), eighth.apply("negative"), eighth)


def _iq1_s(e: Element) -> Scalar:
    r = Record(e, 256, 50)
    at, vector = r.j // 32 * 2, r.j // 8 % 4
    qh = r.byte(at + 34) | r.byte(at + 35) << 8
    index = r.byte(r.j // 8 + 2) | (qh >> (vector * 3).to("i32") & 7) << 8
    scale = (qh >> 12 & 7) * 2 + 1
    return r.half(0) * scale.to("f32") * _ternary(e, index, r.j % 8, qh >> 15)


def _iq1_m(e: Element) -> Scalar:
    """The fp16 scale is in the highest nibbles of the four words of scales."""
    r = Record(e, 256, 56)
    qh = r.byte(r.j // 16 + 32) >> (r.j // 8 % 2 * 4).to("i32") & 15
    index = r.byte(r.j // 8) | (qh & 7) << 8
    at = r.j // 64 * 2
    word = r.byte(at + 48) | r.byte(at + 49) << 8
    scale = (word >> (r.j // 16 % 4 * 3).to("i32") & 7) * 2 + 1
    first, second, third, fourth = (r.byte(49 + 2 * n) >> 4 for n in range(4))
    half = (first | second << 4 | third << 8 | fourth << 12).to("i16").bits("f16").to("f32")
    return half * scale.to("f32") * _ternary(e, index, r.j % 8, qh >> 3)


I_QUANTS: dict[str, Callable[[Element], Scalar]] = {
    "iq3_s": _iq3_s, "iq3_xxs": _iq3_xxs, "iq2_s": _iq2_s, "iq2_xs": _iq2_xs, "iq2_xxs": _iq2_xxs, "iq1_m": _iq1_m,
    "iq1_s": _iq1_s,
}  # fmt: skip
"""The value of an element, in fp32, by format."""
