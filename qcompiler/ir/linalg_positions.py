"""Lowers ops that read or write at positions to linalg: rope, embedding, gather, scatter, index_update.

A scatter is a fold over the index: every element of the result looks for the entries that name it. That is quadratic,
and needs neither control flow nor an order of writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import (
    LinalgLowering,
    Rule,
    accumulator,
    dims,
    folded,
    indices,
    length,
    points,
    rounded,
)
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType


def _rope(op: qc.RopeOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    acc, shape, dtype = accumulator(op.x, op.cos, op.sin), shape_of(op.x.type), tensor_dtype(op.result.type)
    size = int(shape[3])
    half, alike = size // 2, shape_of(op.cos.type)[0] == shape[0]

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        n, head, row, column = indices(code, 4)
        if op.interleaved is not None:
            first = (column % 2).equals(0)
            other = where(first, column + 1, column - 1)
        else:
            first = column < half
            other = where(first, column + half, column - half)
        partner = code.read(op.x, n, head, row, other).to(acc)
        turned = where(first, partner.apply("negative"), partner)
        zero = code.constant(0, "index")
        cos, sin = (code.read(v, n if alike else zero, zero, row, column).to(acc) for v in (op.cos, op.sin))
        return (s[0].to(acc) * cos + turned * sin).to(dtype)

    return [points(lowering.builder, [op.x], shape, dtype, body)]


def _embedding(op: qc.EmbeddingOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """Decodes the picked rows of a packed table, and no others."""
    shape, dtype = shape_of(op.result.type), tensor_dtype(op.result.type)
    rank, entry = len(shape) - 1, lowering.element(op.table)

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        *place, column = indices(code, rank + 1)
        return entry(code, code.read(op.ids, *place).to("index"), column).to(dtype)

    return [points(lowering.builder, [], shape, dtype, body)]


def _from_start(index: Scalar, size: Scalar) -> Scalar:
    """An index in which a negative number counts from the end."""
    place = index.to("index")
    return where(place < 0, place + size, place)


def _gather(op: qc.GatherOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """Reads x element by element at the index."""
    b, axis, x = lowering.builder, op.axis.value.data, op.x
    shape, width = shape_of(op.result.type), len(shape_of(op.index.type))
    rank, along = len(shape), op.mode.data == "along"
    size = build.dim_value(b, shape_of(x.type)[axis])

    def body(code: Code, _: Sequence[Scalar]) -> Scalar:
        loops = indices(code, rank)
        raw = code.read(op.index, *(loops if along else loops[axis : axis + width]))
        return code.read(
            x, *loops[:axis], _from_start(raw, length(code, size)), *loops[axis + (1 if along else width) :]
        )

    return [points(b, [], shape, tensor_dtype(x.type), body)]


# --- writing ---------------------------------------------------------------------------------------------------------


def fold_type(dtype: DType, x: SSAValue) -> DType:
    """The type in which values of type `dtype`, made of x, are folded: integers in their own, unsigned bytes in i32."""
    if dtype == "ui8":
        return "i32"
    return dtype if dtype.startswith("i") else accumulator(x)


def fold_pair(kind: str, acc: DType, a: Scalar, b: Scalar) -> Scalar:
    """The fold of two numbers in the type `acc`: "add", "mul", "max", "min" (NaN wins), "logaddexp"."""
    if acc == "i1":
        return a | b if kind in ("add", "max") else a & b
    match kind:
        case "add":
            return a + b
        case "mul":
            return a * b
        case "max":
            return a.maximum(b)
        case "min":
            return a.minimum(b)
        case "logaddexp":
            far = (a - b).apply("abs")
            spread = a.maximum(b) + far.apply("negative").apply("exp").apply("log1p")
            return where(a.equals(b), a + 0.6931471805599453, spread)
        case _:
            raise AssertionError(f"no fold '{kind}', which the op's verifier has checked")


def _last(b: Builder, op: qc.ScatterOp, shape: Sequence[Dim], size: SSAValue | int) -> SSAValue:
    """The last entry of the index that names each element, -1 where there is none: i64 `shape`."""
    axis, rank = op.axis.value.data, len(shape)
    reads = dims(*range(axis), rank, *range(axis + 1, rank))

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        here = _from_start(s[0], length(code, size)).equals(code.index(axis))
        return s[1].maximum(where(here, code.index(rank).to("i64"), -1))

    return folded(b, [(op.index, reads)], shape, "i64", body, start=-1)


def _scatter(op: qc.ScatterOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, axis, dtype = lowering.builder, op.axis.value.data, tensor_dtype(op.result.type)
    index, whole = shape_of(op.index.type), shape_of(op.x.type)
    shape, rank = (*index[:axis], whole[axis], *index[axis + 1 :]), len(index)
    size, begin = build.dim_value(b, whole[axis]), [0] * len(index)
    x = build.extract_slice(b, op.x, begin, shape)
    if op.reduce.data == "none":
        last = _last(b, op, shape, size)

        def replaced(code: Code, s: Sequence[Scalar]) -> Scalar:
            place = indices(code, rank)
            place[axis] = s[1].maximum(0).to("index")
            return where(s[1] >= 0, code.read(op.src, *place), s[0])

        made = points(b, [x, last], shape, dtype, replaced)
    else:
        acc = fold_type(dtype, op.x)
        reads = dims(*range(axis), rank, *range(axis + 1, rank))

        def step(code: Code, s: Sequence[Scalar]) -> Scalar:
            here = _from_start(s[0], length(code, size)).equals(code.index(axis))
            place = indices(code, rank)
            place[axis] = code.index(rank)
            value = code.read(op.src, *place)
            return where(here, fold_pair(op.reduce.data, acc, s[1].to(acc), value.to(acc)).to(dtype), s[1])

        made = folded(b, [(op.index, reads)], shape, dtype, step, start=x)
    return [made if shape == whole else build.insert_slice(b, made, op.x, begin)]


def _index_update(op: qc.IndexUpdateOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, axis, shape = lowering.builder, op.axis.value.data, shape_of(op.x.type)

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        here = s[0].to("index").equals(code.index(0))
        return s[1].maximum(where(here, code.index(1).to("i64"), -1))

    last = folded(b, [(op.index, dims(1))], (shape[axis],), "i64", body, start=-1)

    def replaced(code: Code, s: Sequence[Scalar]) -> Scalar:
        place = indices(code, len(shape))
        entry = code.read(last, place[axis])
        place[axis] = entry.maximum(0).to("index")
        return where(entry >= 0, code.read(op.src, *place), s[0])

    return [points(b, [op.x], shape, tensor_dtype(op.x.type), replaced)]


def _dequantize(op: qc.DequantizeOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    return [rounded(lowering.builder, lowering.weight(op.input), tensor_dtype(op.result.type))]


def _copy(op: qc.CopyOp, _lowering: LinalgLowering) -> Sequence[SSAValue]:
    return [op.input]


POSITIONS: dict[type[Operation], Rule] = {
    qc.RopeOp: _rope,
    qc.EmbeddingOp: _embedding,
    qc.GatherOp: _gather,
    qc.ScatterOp: _scatter,
    qc.IndexUpdateOp: _index_update,
    qc.DequantizeOp: _dequantize,
    qc.CopyOp: _copy,
}
