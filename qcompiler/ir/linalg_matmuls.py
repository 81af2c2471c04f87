"""Lowers linears, convolutions and products of batches and of experts to linalg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineExpr

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import (
    LinalgLowering,
    Rule,
    Scalars,
    accumulator,
    contract,
    convert,
    dims,
    folded,
    indices,
    inlined,
    length,
    points,
    rounded,
)
from qcompiler.ir.linalg_norms import parts_of
from qcompiler.ir.linalg_rows import int8_bytes, row_codes, row_scales
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.scalar_code import Code, Scalar, all_of, where
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

# --- linear ----------------------------------------------------------------------------------------------------------


def _linear(op: qc.LinearOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b = lowering.builder
    x, kept = _prologue(op, lowering) if op.prologue.blocks else (op.x, [])
    total = _integer_sums(op, x, lowering) if op.multiplies_codes else _sums(op, x, lowering)
    acc, out, dtype = tensor_dtype(total.type), shape_of(op.result.type), tensor_dtype(op.result.type)
    if op.bias is not None:
        total = points(b, [total, op.bias], shape_of(total.type), acc, lambda _, s: s[0] + s[1].to(acc))
    sums = [total]
    if op.combines_pairs:
        begin = [0] * (len(out) - 1)
        sums = [build.extract_slice(b, total, [*begin, at], out) for at in (0, int(out[-1]))]

    def body(i: Builder, s: Scalars) -> SSAValue:
        return inlined(i, op.epilogue.block, [*(convert(i, each, "f32") for each in s[: op.sums]), *s[op.sums : -1]])

    if op.epilogue.blocks:
        result = build.pointwise(b, [*sums, *op.extras], out, dtype, body)
    else:
        result = rounded(b, total, dtype)
    statistics = [] if op.statistics is None else [parts_of(b, result, op.statistics.data)]
    return [result, *kept, *statistics]


def _prologue(op: qc.LinearOp, lowering: LinalgLowering) -> tuple[SSAValue, list[SSAValue]]:
    """The rows that a linear multiplies, and those that it keeps."""
    known: dict[SSAValue, SSAValue] = dict(zip(op.prologue.block.args, [op.x, *op.affine], strict=True))
    for each in op.prologue.block.ops:
        if isinstance(each, qc.YieldOp):
            rows, *kept = (known[value] for value in each.operands)
            return rows, kept
        known[each.results[0]] = lowering.lowered(each, [known[value] for value in each.operands])[0]
    raise AssertionError("a prologue ends in qc.yield, which the op's verifier has checked")


def _reads(rank: int) -> list[tuple[AffineExpr, ...]]:
    """How x and w are read in loops over the leading dims of x, then n, then k."""
    return [dims(*range(rank - 1), rank), dims(rank - 1, rank)]


def _sums(op: qc.LinearOp, x: SSAValue, lowering: LinalgLowering) -> SSAValue:
    w = lowering.weight(op.w)
    x = rounded(lowering.builder, x, tensor_dtype(op.w.type))
    shape = shape_of(x.type)
    out = (*shape[:-1], shape_of(w.type)[0])
    return contract(lowering.builder, [x, w], _reads(len(shape)), out, accumulator(op.x, w))


def _integer_sums(op: qc.LinearOp, rows: SSAValue, lowering: LinalgLowering) -> SSAValue:
    """Codes of x times decoded weights, in fp32, times the scale of the row. The definition multiplies the codes of
    both as integers, group by group: the same number with other roundings."""
    b, w = lowering.builder, lowering.weight(op.w, rounded=False)
    n, k = (int(size) for size in shape_of(op.w.type))
    codes, scales = row_codes(b, rows, k), row_scales(b, rows, k)
    out = (*shape_of(codes.type)[:-1], n)
    total = contract(b, [codes, w], _reads(len(out)), out, "f32")
    return points(b, [total, scales], out, "f32", lambda _, s: s[0] * s[1])


def _batch_matmul(op: qc.BatchMatmulOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    out = shape_of(op.result.type)
    n = len(out)
    batch = range(n - 2)
    reads = [dims(*batch, n - 2, n), dims(*batch, n, n - 1)]
    total = contract(lowering.builder, [op.a, op.b], reads, out, accumulator(op.a, op.b))
    return [rounded(lowering.builder, total, tensor_dtype(op.result.type))]


# --- experts ---------------------------------------------------------------------------------------------------------


def _grouped_linear(op: qc.GroupedLinearOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """Decodes the weights of all experts, and reads the rows that the index names."""
    b, w, repeat = lowering.builder, lowering.weight(op.w, rounded=not op.multiplies_codes), op.repeat.value.data
    pairs, rows = shape_of(op.index.type)[0], int(shape_of(op.w.type)[0]) // op.experts.value.data
    given, scales = op.x, None
    if op.multiplies_codes:  # as for a linear: codes of x times decoded weights, then the scale of the row
        k = int(shape_of(op.w.type)[1])
        given, scales = row_codes(b, op.x, k), row_scales(b, op.x, k)
    else:
        given = rounded(b, op.x, tensor_dtype(op.w.type))
    x, acc = given, accumulator(given, w)
    if repeat > 1:
        shape = (pairs, shape_of(x.type)[1])
        x = points(
            b, [], shape, tensor_dtype(x.type), lambda code, _: code.read(given, code.index(0) // repeat, code.index(1))
        )

    def product(code: Code, s: Sequence[Scalar]) -> Scalar:
        row = s[1].to("index") * rows + code.index(1)
        return s[2] + s[0].to(acc) * code.read(w, row, code.index(2)).to(acc)

    sums = folded(b, [(x, dims(0, 2)), (op.index, dims(0))], (pairs, rows), acc, product)
    if scales is not None:
        factors = scales

        def scaled(code: Code, s: Sequence[Scalar]) -> Scalar:
            return s[0] * code.read(factors, code.index(0) // repeat, code.constant(0, "index"))

        sums = points(b, [sums], (pairs, rows), "f32", scaled)
    if not op.epilogue.blocks:
        return [rounded(b, sums, tensor_dtype(op.result.type))]
    return [_experts_epilogue(b, op, rounded(b, sums, "f32"))]


def _experts_epilogue(b: Builder, op: qc.GroupedLinearOp, sums: SSAValue) -> SSAValue:
    """What the regions of a grouped linear make of the fp32 sums of its pairs."""
    out, dtype = shape_of(op.result.type), tensor_dtype(op.result.type)
    if op.count is None:
        given = [build.extract_slice(b, sums, [0, at], out) for at in (0, int(out[1]))]
    else:
        total = build.fill(b, 0.0, out, "f32")
        for place in range(op.count):
            total = _mixed(b, op, sums, place, total)
        given = [total, *op.extras]
    return build.pointwise(b, given, out, dtype, lambda i, s: inlined(i, op.epilogue.block, s[:-1]))


def _mixed(b: Builder, op: qc.GroupedLinearOp, sums: SSAValue, place: int, total: SSAValue) -> SSAValue:
    """The next total of each row: that with the sum of its pair number `place`."""
    count, weights = cast(int, op.count), cast(SSAValue, op.weights)

    def body(i: Builder, s: Scalars) -> SSAValue:
        code = Code(i)
        row, column = indices(code, 2)
        mine = code.read(sums, row * count + place, column)
        weight = code.read(weights, row, code.constant(place, "index"))
        return inlined(i, op.mix.block, [mine.value, weight.value, s[0]])

    return build.pointwise(b, [total], shape_of(total.type), "f32", body)


# --- convolutions ----------------------------------------------------------------------------------------------------


def _within(code: Code, at: Sequence[Scalar], sizes: Sequence[SSAValue | int]) -> tuple[Scalar, list[Scalar]]:
    """Whether a place lies inside of an image, and the nearest place that does."""
    last = [length(code, size) - 1 for size in sizes]
    inside = all_of([check for each, end in zip(at, last, strict=True) for check in (each >= 0, each <= end)])
    return inside, [each.maximum(0).minimum(end) for each, end in zip(at, last, strict=True)]


def _conv2d(op: qc.Conv2dOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc, dtype = lowering.builder, accumulator(op.x, op.w), tensor_dtype(op.result.type)
    (sh, sw), (dh, dw), (top, left, _, _) = (numbers(p) for p in (op.strides, op.dilation, op.padding))
    groups, (channels, depth, kh, kw) = op.groups.value.data, (int(n) for n in shape_of(op.w.type))
    batch, _, height, width = shape_of(op.result.type)
    each = channels // groups

    image = rounded(b, op.x, tensor_dtype(op.w.type))
    lengths = [build.dim_value(b, size) for size in shape_of(image.type)[2:]]

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        """Loops: batch, channel, row, column, then the taps of a window."""
        n, o, row, column, tap = indices(code, 5)
        c, y, x = tap // (kh * kw), tap // kw % kh, tap % kw
        weight = code.read(op.w, o, c, y, x).to(acc)
        inside, at = _within(code, [row * sh + y * dh - top, column * sw + x * dw - left], lengths)
        value = code.read(image, n, o // each * depth + c, *at).to(acc)
        return s[-1] + where(inside, value, 0) * weight

    total = folded(b, [], shape_of(op.result.type), acc, body, extent=depth * kh * kw)
    bias = [] if op.bias is None else [build.reshape(b, op.bias, (channels, 1, 1))]
    added = points(b, [total, *bias], (batch, channels, height, width), dtype, lambda _, s: _sum(s[:-1], acc).to(dtype))
    return [added]


def _sum(values: Sequence[Scalar], acc: DType) -> Scalar:
    total = values[0]
    for value in values[1:]:
        total = total + value.to(acc)
    return total


def _windows(op: qc.WindowsOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    if op.channels is not None:
        return [_windows_of_rows(op, lowering)]
    return [_gathered(op, lowering, shape_of(op.result.type))]


def _windows_of_rows(op: qc.WindowsOp, lowering: LinalgLowering) -> SSAValue:
    """Rows of int8: the codes of each window, and the scale of the first pixel of its image."""
    b, image = lowering.builder, op.x
    lead, columns = shape_of(op.result.type)[:3], math.prod(numbers(op.kernel)) * op.depth
    codes = _gathered(op, lowering, (*lead, columns))
    of_pixels = row_scales(b, image, op.depth)

    def scale(code: Code, _: Sequence[Scalar]) -> Scalar:
        first = code.constant(0, "index")
        return code.read(of_pixels, code.index(0), first, first, first)

    return int8_bytes(b, codes, points(b, [], (*lead, 1), "f32", scale), columns)


def _gathered(op: qc.WindowsOp, lowering: LinalgLowering, shape: Sequence[Dim]) -> SSAValue:
    """The first channels of the pixels of each window, (B, H', W', kh*kw*C)."""
    b, dtype = lowering.builder, tensor_dtype(op.result.type)
    (sh, sw), (dh, dw), (_, kw) = (numbers(p) for p in (op.strides, op.dilation, op.kernel))
    top, left, _, _ = numbers(op.padding)
    channels = op.depth
    lengths = [build.dim_value(b, size) for size in shape_of(op.x.type)[1:3]]

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        n, row, column, entry = indices(code, 4)
        tap = entry // channels
        inside, at = _within(code, [row * sh + tap // kw * dh - top, column * sw + tap % kw * dw - left], lengths)
        return where(inside, code.read(op.x, n, *at, entry % channels), 0)

    return points(b, [], shape, dtype, body)


MATMULS: dict[type[Operation], Rule] = {
    qc.LinearOp: _linear,
    qc.BatchMatmulOp: _batch_matmul,
    qc.GroupedLinearOp: _grouped_linear,
    qc.Conv2dOp: _conv2d,
    qc.WindowsOp: _windows,
}
