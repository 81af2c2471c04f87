"""Lowers rows of int8, rows of a cache and transforms of rows to linalg. The rows are bytes, with scales among them.

The layouts are those of formats/int8_rows.py and formats/cache_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue

from qcompiler.formats import cache_rows, int8_rows
from qcompiler.formats.llm_int8 import SMALLEST_ABSMAX
from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import LinalgLowering, Rule, dims, folded, groups_folded, indices, points, rounded
from qcompiler.ir.linalg_element import e4m3
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kinds.hadamard import scale_of

_LARGEST = float(np.finfo(np.float32).max)
_NAN = float("nan")


class _Bytes:
    """The bytes of the row that a loop's leading indices name."""

    def __init__(self, code: Code, rows: SSAValue) -> None:
        self.code, self.rows = code, rows
        self.lead = indices(code, len(shape_of(rows.type)) - 1)

    def signed(self, at: Scalar) -> Scalar:
        return self.code.read(self.rows, *self.lead, at).to("i32")

    def byte(self, at: Scalar) -> Scalar:
        return self.code.read(self.rows, *self.lead, at).unsigned()

    def word(self, at: Scalar) -> Scalar:
        """Two bytes."""
        return self.byte(at) | self.byte(at + 1) << 8

    def fp32(self, at: int) -> Scalar:
        place = self.code.constant(at, "index")
        return (self.word(place) | self.word(place + 2) << 16).bits("f32")


def _column(code: Code, rows: SSAValue) -> Scalar:
    return code.index(len(shape_of(rows.type)) - 1)


# --- reading ---------------------------------------------------------------------------------------------------------


def row_codes(b: Builder, rows: SSAValue, cols: int) -> SSAValue:
    """The codes of int8 rows (…, cols), as fp32 numbers."""

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        return _Bytes(code, rows).signed(_column(code, rows)).to("f32")

    return points(b, [], (*shape_of(rows.type)[:-1], cols), "f32", body)


def row_scales(b: Builder, rows: SSAValue, cols: int) -> SSAValue:
    """The scales of int8 rows (…, 1)."""

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        return _Bytes(code, rows).fp32(int8_rows.padded(cols))

    return points(b, [], (*shape_of(rows.type)[:-1], 1), "f32", body)


def cache_values(b: Builder, rows: SSAValue, cols: int, kind: cache_rows.Kind) -> SSAValue:
    """What rows of a cache mean, fp32 (…, cols)."""
    at = cache_rows.scale_at(cols, kind)

    def of_bytes(code: Code, _: Sequence[Scalar]) -> Scalar:
        row, column = _Bytes(code, rows), _column(code, rows)
        number = row.signed(column).to("f32") if kind == "int8" else e4m3(row.byte(column))
        return number * row.fp32(at)

    def of_nibbles(code: Code, _: Sequence[Scalar]) -> Scalar:
        row, column = _Bytes(code, rows), _column(code, rows)
        number = row.byte(column // 2) >> (column % 2 * 4).to("i32") & 15
        place = column // cache_rows.GROUP * 4 + at
        step, least = ((row.word(place + offset) << 16).bits("f32") for offset in (0, 2))
        return number.to("f32") * step + least

    shape = (*shape_of(rows.type)[:-1], cols)
    return points(b, [], shape, "f32", of_nibbles if kind == "int4" else of_bytes)


def _dequantize_rows(op: qc.DequantizeRowsOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, shape, dtype = lowering.builder, shape_of(op.result.type), tensor_dtype(op.result.type)
    cols = int(shape[-1])
    codes, scales = row_codes(b, op.rows, cols), row_scales(b, op.rows, cols)
    return [points(b, [codes, scales], shape, dtype, lambda _, s: (s[0] * s[1]).to(dtype))]


def _dequantize_cache(op: qc.DequantizeCacheOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    values = cache_values(
        lowering.builder, op.rows, int(shape_of(op.result.type)[-1]), cache_rows.kind_of(op.kind.data)
    )
    return [rounded(lowering.builder, values, tensor_dtype(op.result.type))]


# --- writing ---------------------------------------------------------------------------------------------------------


def _largest(b: Builder, x: SSAValue, among: Callable[[Scalar], Scalar] | None = None) -> SSAValue:
    """The largest magnitude of each row (…, 1), NaN if the row has one."""
    shape = shape_of(x.type)

    def body(_: Code, s: Sequence[Scalar]) -> Scalar:
        size = s[0].to("f32").apply("abs")
        return s[1].maximum(among(size) if among is not None else size)

    found = folded(b, [(x, dims(*range(len(shape))))], shape[:-1], "f32", body)
    return build.reshape(b, found, (*shape[:-1], 1))


def _of_images(b: Builder, largest: SSAValue, shape: Sequence[Dim]) -> SSAValue:
    """A number of each image for each of its rows: (B, …, 1)."""
    return points(b, [], (*shape[:-1], 1), "f32", lambda code, _: code.read(largest, code.index(0)))


def _clipped(value: Scalar, most: float) -> Scalar:
    return value.maximum(-most).minimum(most)


def _positive(value: Scalar) -> Scalar:
    """The value, or 1 where it is not positive."""
    return where(value > 0, value, 1)


def _fp32_byte(value: Scalar, number: Scalar) -> Scalar:
    """A byte of an fp32 number, the lowest first. `number` is an index from 0 to 3."""
    return value.bits("i32") >> (number * 8).to("i32") & 255


def _inside(value: Scalar, most: int) -> Scalar:
    return value.maximum(0).minimum(most)


def quantised_rows(
    b: Builder, x: SSAValue, columns: SSAValue | None, kind: str, value: float, of_images: SSAValue | None = None
) -> SSAValue:
    """Rows of int8 of x; `kind`, `value`, `columns` and `of_images` (its `largest`) are those of `qc.quantize_rows`."""
    shape = shape_of(x.type)
    cols = int(shape[-1])
    threshold = float(np.float32(value))
    kept = (lambda size: where(size >= threshold, size.of(0), size)) if kind == "outliers" else None
    largest = _largest(b, x, kept) if of_images is None else _of_images(b, of_images, shape)
    divides = kind in ("token", "image")
    factor, fixed = (float(f) for f in int8_rows.clip_factors(value)) if kind == "tensor" else (0.0, 0.0)

    def scale(_: Code, s: Sequence[Scalar]) -> Scalar:
        made = s[0] / 127
        made = _positive(made) if divides else s[0].of(fixed) if kind == "tensor" else made
        return where(s[0] <= _LARGEST, made, _NAN)

    scales = points(b, [largest], (*shape[:-1], 1), "f32", scale)

    def coded(_: Code, s: Sequence[Scalar]) -> Scalar:
        number, most = s[0].to("f32"), s[1]
        if divides:
            made = number / s[2]
        elif kind == "tensor":
            made = number * factor
        else:
            number = where(number.apply("abs") >= threshold, number.of(0), number)
            made = number * where(most < float(SMALLEST_ABSMAX), most.of(0), 127 / most)
            made = where(s[3], made.of(0), made)
        return where(most <= _LARGEST, _clipped(made.apply("roundeven"), 127.0), 0).to("i32").to("i8")

    inputs = [x, largest, scales, *([columns] if columns is not None else [])]
    codes = points(b, inputs, shape, "i8", coded)
    return int8_bytes(b, codes, scales, cols)


def int8_bytes(b: Builder, codes: SSAValue, scales: SSAValue, cols: int) -> SSAValue:
    """Codes (…, cols) and scales (…, 1) as rows, with the sums of each 32 codes."""
    *lead, _ = shape_of(codes.type)
    end = int8_rows.padded(cols)
    sums = groups_folded(b, codes, int8_rows.RUN, "i32", lambda _, s: s[1] + s[0].to("i32"))
    runs = int(shape_of(sums.type)[-1])

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        place, at = indices(code, len(lead)), code.index(len(lead))
        byte = code.read(codes, *place, at.minimum(cols - 1)).unsigned()
        scale = code.read(scales, *place, code.constant(0, "index"))
        number = _inside(at - (end + 16), 2 * runs - 1)
        total = code.read(sums, *place, number // 2) >> (number % 2 * 8).to("i32") & 255
        behind = where(at < end + 16 + 2 * runs, total, 0)
        behind = where(at < end + 16, where(at < end + 4, _fp32_byte(scale, _inside(at - end, 3)), 0), behind)
        return where(at < end, where(at < cols, byte, 0), behind).to("i8")

    return points(b, [], (*lead, int8_rows.row_bytes(cols)), "i8", body)


def _quantize_rows(op: qc.QuantizeRowsOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    kind, value = op.kind.data, op.value.value.data
    return [quantised_rows(lowering.builder, op.x, op.columns, kind, value, op.largest)]


def _quantize_cache(op: qc.QuantizeCacheOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    kind, x = cache_rows.kind_of(op.kind.data), op.x
    made = _cache_nibbles(lowering.builder, x) if kind == "int4" else _cache_bytes(lowering.builder, x, kind)
    return [made]


def _cache_bytes(b: Builder, x: SSAValue, kind: cache_rows.Kind) -> SSAValue:
    *lead, size = shape_of(x.type)
    cols, most = int(size), cache_rows.MOST[kind]
    largest, at_scale = _largest(b, x), cache_rows.scale_at(cols, kind)

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        place, at = indices(code, len(lead)), code.index(len(lead))
        top = code.read(largest, *place, code.constant(0, "index"))
        scale, finite = _positive(top / most), top <= _LARGEST
        number = code.read(x, *place, at.minimum(cols - 1)).to("f32")
        number = where(finite, _clipped(number / scale, most), 0)
        byte = number.apply("roundeven").to("i32") if kind == "int8" else _to_e4m3(number)
        stored = _fp32_byte(where(finite, scale, _NAN), _inside(at - at_scale, 3))
        behind = where(at >= at_scale, where(at < at_scale + 4, stored, 0), 0)
        return where(at < cols, byte, behind).to("i8")

    return points(b, [], (*lead, cache_rows.row_bytes(cols, kind)), "i8", body)


def _to_e4m3(value: Scalar) -> Scalar:
    """The nearest E4M3 number, ties to even. The magnitude is at most 448."""
    bits = value.bits("i32")
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    small = (value.apply("abs") * 2.0**9).apply("roundeven").to("i32")
    return where(size < (121 << 23), small, normal) | bits >> 24 & 0x80


def _cache_nibbles(b: Builder, x: SSAValue) -> SSAValue:
    *lead, size = shape_of(x.type)
    cols, limit = int(size), float(np.float32(cache_rows.LARGEST))
    group, levels, end = cache_rows.GROUP, cache_rows.LEVELS, cache_rows.scale_at(cols, "int4")
    folds: dict[str, tuple[float, Callable[[Code, Sequence[Scalar]], Scalar]]] = {
        "least": (float("inf"), lambda _, s: s[1].minimum(_clipped(s[0], limit))),
        "most": (float("-inf"), lambda _, s: s[1].maximum(_clipped(s[0], limit))),
        "size": (0.0, lambda _, s: s[1].maximum(s[0].apply("abs"))),
    }
    found = {name: groups_folded(b, x, group, "f32", body, start) for name, (start, body) in folds.items()}
    groups = shape_of(found["least"].type)
    last = int(groups[-1]) - 1

    def down(_: Code, s: Sequence[Scalar]) -> Scalar:
        bits = (s[0] + 0).bits("i32")
        lower = ((bits + where(s[0] < 0, bits.of(0xFFFF), 0)) & -65536).bits("f32")
        return where(s[1] <= _LARGEST, lower, _NAN)

    least = points(b, [found["least"], found["size"]], groups, "f32", down)

    def up(_: Code, s: Sequence[Scalar]) -> Scalar:
        step = (s[0] - s[1]) / float(levels)
        step = ((where(step > 0, step, 0).bits("i32") + 0xFFFF) & -65536).bits("f32")
        return where(s[2] <= _LARGEST, step, 0)

    steps = points(b, [found["most"], least, found["size"]], groups, "f32", up)

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        place, at = indices(code, len(lead)), code.index(len(lead))

        def nibble(column: Scalar) -> Scalar:
            inside = column.minimum(cols - 1)
            step, low = (code.read(each, *place, inside // group) for each in (steps, least))
            number = _clipped(code.read(x, *place, inside).to("f32"), limit)
            made = ((number - low) / step).minimum(float(levels)).apply("roundeven")
            made = where(step > 0, made, 0).to("i32")
            return where(column < cols, made, 0)

        both = nibble(at * 2) | nibble(at * 2 + 1) << 4
        number = _inside(at - end, 4 * last + 3)
        stored = [_fp32_byte(code.read(each, *place, number // 4), number % 2 + 2) for each in (steps, least)]
        scale = where(number % 4 < 2, stored[0], stored[1])
        return where(at < end, both, where(at < end + 4 * (last + 1), scale, 0)).to("i8")

    return points(b, [], (*lead, cache_rows.row_bytes(cols, "int4")), "i8", body)


def _hadamard(op: qc.HadamardOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """A loop for each step: an element and the one whose column differs in one bit give their sum or difference."""
    b, shape, block = lowering.builder, shape_of(op.x.type), op.block.value.data
    x, rank = rounded(b, op.x, "f32"), len(shape)

    def step(values: SSAValue, width: int) -> SSAValue:
        def body(code: Code, s: Sequence[Scalar]) -> Scalar:
            column = code.index(rank - 1)
            first = column // width % 2 < 1
            other = code.read(values, *indices(code, rank - 1), where(first, column + width, column - width))
            return where(first, s[0] + other, other - s[0])

        return points(b, [values], shape, "f32", body)

    width = 1
    while width < block:
        x, width = step(x, width), 2 * width
    dtype = tensor_dtype(op.result.type)
    return [points(b, [x], shape, dtype, lambda _, s: (s[0] * scale_of(block)).to(dtype))]


ROWS: dict[type[Operation], Rule] = {
    qc.QuantizeRowsOp: _quantize_rows,
    qc.DequantizeRowsOp: _dequantize_rows,
    qc.QuantizeCacheOp: _quantize_cache,
    qc.DequantizeCacheOp: _dequantize_cache,
    qc.HadamardOp: _hadamard,
}
