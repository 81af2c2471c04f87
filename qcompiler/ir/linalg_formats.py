"""Decodes packed weights by plain `linalg.generic` over the bytes of their sections.

    nf4    table[nibble] * absmax[(n*K + k) floordiv block]       even index in the high nibble
    int8   code[n, k] * scale[n]
    q4_K   d * scale * code - dmin * least                        in records: linalg_ggml.py

This is written from the formats' documents (docs/formats.md, and the papers and sources that it names), not from their
declarations: an independent check of what the bytes mean. Every operation is one of fp32, in the order of the document,
so that the values are those of `Format.decode` bit for bit. A body reads bytes by `tensor.extract` at positions that it
computes: indexing maps with `floordiv` and `mod` mean the same, but compilers that tile loops do not all support them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from qcompiler import formats
from qcompiler.errors import QCompilerError
from qcompiler.ir import build
from qcompiler.ir.linalg_element import Element, e4m3, e5m2, e8m0
from qcompiler.ir.linalg_ggml import GGML
from qcompiler.ir.linalg_i_quants import I_QUANTS
from qcompiler.ir.scalar_code import Code, Scalar
from qcompiler.ir.types import QTensorType, shape_of
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import DTYPE_NAMES

# QLoRA (Dettmers et al. 2023), appendix E
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = tuple(sign * size for sign in (1, -1) for size in (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4))
_E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6))


def sections_of(type_: QTensorType) -> list[tuple[str, int, int, DType]]:
    """(name, byte offset, entries, dtype) of each section of a packed weight's canonical bytes. Bytes, and floats of 8
    bits, are i8."""
    fmt = formats.get(type_.format.ref.name, **type_.format.ref.params)
    found: list[tuple[str, int, int, DType]] = []
    for section in fmt.sections(*type_.shape):
        dtype: DType = "i8" if section.dtype.itemsize == 1 else DTYPE_NAMES[section.dtype]
        found.append((section.name, section.offset, section.nbytes // section.dtype.itemsize, dtype))
    return found


def decode_weight(
    b: Builder, type_: QTensorType, sections: Mapping[str, SSAValue], *, rounded: bool = True
) -> SSAValue:
    """The f32 values (rows, cols) of a packed weight, rounded to its element type and widened again.

    With `rounded=False` they stay as they are decoded. QCompilerError for another layout than the canonical one, and
    for a format without a decoder.
    """
    element, read = element_decoder(b, type_, sections), _read_by_the_loop(b, type_, sections)

    def body(i: Builder, s: Sequence[SSAValue]) -> SSAValue:
        code = Code(i)
        given = {name: code.scalar(value) for name, value in zip(read, s, strict=False)}
        value = element(code, code.index(0), code.index(1), given)
        return (value.to(type_.dtype).to("f32") if rounded else value).value

    operands, maps = [value for value, _ in read.values()], [map_ for _, map_ in read.values()]
    return build.generic(b, operands, [*maps, AffineMap.identity(2)], type_.shape, "f32", ["parallel"] * 2, body)


def _read_by_the_loop(
    b: Builder, type_: QTensorType, sections: Mapping[str, SSAValue]
) -> dict[str, tuple[SSAValue, AffineMap]]:
    """Sections whose entries are elements or rows, with the maps that index them: what compilers turn into vectors."""
    rows, cols = type_.shape
    found: dict[str, tuple[SSAValue, AffineMap]] = {}
    for name in _BY_ELEMENT.get(type_.format.ref.name, ()):
        (count,) = shape_of(sections[name].type)
        if name == "codes":
            found[name] = build.reshape(b, sections[name], (rows, cols)), AffineMap.identity(2)
        elif count == rows:
            found[name] = sections[name], AffineMap(2, 0, (AffineDimExpr(0),))
    return found


def element_decoder(
    b: Builder, type_: QTensorType, sections: Mapping[str, SSAValue]
) -> Callable[[Code, Scalar, Scalar, Mapping[str, Scalar]], Scalar]:
    """What decodes one element, by row and column, in the body of a loop in front of which `b` builds. The last
    argument holds entries that the loop has read. Errors as `decode_weight`."""
    reference, (rows, cols) = type_.format.ref, type_.shape
    if type_.layout.layout_name.data != "canonical":
        raise QCompilerError(
            f"linalg decodes canonical bytes only, not layout '{type_.layout.layout_name.data}'; lower the program as "
            "it is before the stage pack-weights"
        )
    decoder = DECODERS.get(reference.name)
    if decoder is None:
        raise QCompilerError(
            f"the format '{reference.name}' has no decoder in linalg; add one to qcompiler/ir/linalg_formats.py"
        )
    fmt = formats.get(reference.name, **reference.params)
    params = {p.name: fmt.setting(p.name) for p in fmt.parameters}
    return lambda code, row, col, given: decoder(Element(b, code, sections, params, rows, cols, row, col, given))


# --- integers --------------------------------------------------------------------------------------------------------


def _stream(e: Element, width: int, number: Scalar | None = None) -> Scalar:
    """The element's entry in a stream of `width` bits each, lowest bits first, or that of element `number` of the
    matrix. 3 bits may lie in two bytes."""
    at = (e.flat if number is None else number) * width
    shift = (at % 8).to("i32")
    word = e.byte("codes", at // 8)
    if 8 % width:
        last = e.rows * e.cols * width // 8 - 1
        word = word | e.byte("codes", (at // 8 + 1).minimum(last)) << 8
    return word >> shift & ((1 << width) - 1)


def _integers(width: int) -> Callable[[Element], Scalar]:
    def decode(e: Element) -> Scalar:
        size = e.params["group"]
        assert isinstance(size, int | str)
        group = e.group(size)
        scale = e.of_row("scales") if size == "row" else e.number("scales", group)
        if e.params["symmetric"]:
            code = e.own("codes") if width == 8 else _stream(e, width) - (1 << (width - 1))
        else:
            code = (e.own("codes") & 255 if width == 8 else _stream(e, width)) - e.byte("zeros", group)
        return code.to("f32") * scale

    return decode


def _llm_int8(e: Element) -> Scalar:
    return e.own("codes").to("f32") * e.of_row("absmax") * float(np.float32(1 / 127))


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


def _dynamic() -> tuple[float, ...]:
    """The dynamic 8-bit type of Dettmers et al. (2021), signed: in each of seven decades, the middles of 1, 2, 4 … 64
    equal parts of its upper nine tenths. bitsandbytes computes it by torch.linspace, in fp32."""
    values = [0.0, 1.0]
    for decade in range(7):
        ends = _linspace(1 << decade)
        for low, high in itertools.pairwise(ends):
            size = float(np.float32(10.0 ** (decade - 6)) * ((low + high) / np.float32(2)))
            values += [size, -size]
    return tuple(sorted(values))


def _linspace(count: int) -> list[np.float32]:
    """The ends of `count` equal parts of 0.1 to 1: counted from the nearer end, each with one rounding."""
    low = np.float32(0.1)
    step = float((np.float32(1) - low) / np.float32(count))
    middle = (count + 1) // 2
    return [np.float32(float(low) + step * i if i < middle else 1 - step * (count - i)) for i in range(count + 1)]


_DYNAMIC = _dynamic()


def _blockwise(values: Sequence[float]) -> Callable[[Element], Scalar]:
    def decode(e: Element) -> Scalar:
        block = e.params["block"]
        assert isinstance(block, int)
        shift = ((e.flat + 1) % 2 * 4).to("i32")  # the first of two codes is in the high bits
        code = e.byte("codes", e.flat // 2) >> shift & 15
        number = e.flat // block
        if not e.params["double_quant"]:
            return e.looked_up(values, code) * e.number("absmax", number)
        share = e.looked_up(_DYNAMIC, e.byte("absmax", number))
        absmax = share * e.number("absmax_scales", number // 256) + e.number("offset", 0)
        return e.looked_up(values, code) * absmax

    return decode


# --- small floats ----------------------------------------------------------------------------------------------------


def _fp8(convert: Callable[[Scalar], Scalar]) -> Callable[[Element], Scalar]:
    def decode(e: Element) -> Scalar:
        across = -(-e.cols // 128)
        value = convert(e.own("codes") & 255)
        if e.params["per"] == "row":
            return value * e.of_row("scales")
        return value * e.number("scales", 0 if e.params["per"] == "tensor" else e.row // 128 * across + e.col // 128)

    return decode


def _mxfp4(e: Element) -> Scalar:
    return e.looked_up(_E2M1, _stream(e, 4)) * e8m0(e.byte("scales", e.flat // 32))


def _mxfp8(e: Element) -> Scalar:
    convert = e4m3 if e.params["element"] == "e4m3" else e5m2
    return convert(e.own("codes") & 255) * e8m0(e.byte("scales", e.flat // 32))


def _nvfp4(e: Element) -> Scalar:
    scale, whole = e4m3(e.byte("scales", e.flat // 16)), e.number("global_scale", 0)
    return e.looked_up(_E2M1, _stream(e, 4)) * (scale / whole if e.params["divisor"] else scale * whole)


# --- trellis ---------------------------------------------------------------------------------------------------------

# Codes of a window, and the number that it is multiplied with, by the bits of a code. The computed code is QTIP's 1MAD
# (Tseng et al. 2024, section 3.1.1) without its addition.
_TRELLISES = {4: (3, 0x35D08399), 3: (4, 0xC55EC2CD), 2: (6, 0x2618B891)}


def _tq(e: Element) -> Scalar:
    width = e.params["bits"]
    assert isinstance(width, int)
    codes, multiplier = _TRELLISES[width]
    inside = e.col % 256
    first, place = e.flat - inside + inside % 8 // 2 * 2, inside // 16 * 4 + inside % 16 // 8 * 2 + inside % 2
    window = e.code.constant(0, "i32")
    for back in range(codes):
        at = (place + (64 - back)) % 64
        code = _stream(e, width, first + at // 4 * 16 + at % 4 // 2 * 8 + at % 2)
        window = window | code << width * (codes - 1 - back)
    product = window * (multiplier - (multiplier >> 31 << 32))
    total = e.code.constant(0, "i32")
    for byte in range(4):
        total = total + (product >> 8 * byte).to("i8").to("i32")
    return total.to("f32") * (e.number("scales", e.flat // 256) * 2.0**-7)


DECODERS: dict[str, Callable[[Element], Scalar]] = {
    "nf4": _blockwise(_NF4), "fp4": _blockwise(_FP4), "llm_int8": _llm_int8,
    "int8": _integers(8), "int4": _integers(4), "int3": _integers(3), "int2": _integers(2),
    "fp8_e4m3": _fp8(e4m3), "fp8_e5m2": _fp8(e5m2), "mxfp4": _mxfp4, "mxfp8": _mxfp8, "nvfp4": _nvfp4, "tq": _tq,
    **GGML,
    **I_QUANTS,
}  # fmt: skip
"""The value of an element, in fp32, by format."""

_BY_ELEMENT: dict[str, tuple[str, ...]] = {
    "int8": ("codes", "scales"), "llm_int8": ("codes", "absmax"), "fp8_e4m3": ("codes", "scales"),
    "fp8_e5m2": ("codes", "scales"), "mxfp8": ("codes",),
}  # fmt: skip
"""Sections with a byte for each element, and sections that may have an entry for each row."""
