"""Lowers `qc` ops to plain linalg, arith and math: a second definition of their meaning, for compilers without `qc`.

Each op has one rule, `(op, LinalgLowering) -> results`. Everything accumulates in f32 (f64 if an operand is f64) and
rounds once. Packed weights become `linalg.generic` over their bytes (`linalg_formats.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import arith, math, tensor
from xdsl.dialects.builtin import AnyFloat, IndexType, IntegerType, TensorType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, qc
from qcompiler.ir.linalg_formats import decode_weight
from qcompiler.ir.module import path_of
from qcompiler.ir.qc_norm import norm_of
from qcompiler.ir.types import ELEMENT_TYPES, QTensorType, shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

Scalars = Sequence[SSAValue]
Combine = Callable[[Builder, Scalars], SSAValue | Operation]


CONSTANTS = "qc.constants"
"""Attribute of a lowered function: the contents of the arguments added after its own, as `key` or `key:section`."""


@dataclass
class LinalgLowering:
    """The builder for new ops, and the values of each packed weight's sections (by argument name)."""

    builder: Builder
    sections: dict[SSAValue, Mapping[str, SSAValue]] = field(default_factory=dict)
    decoded: dict[SSAValue, SSAValue] = field(default_factory=dict)

    def weight(self, value: SSAValue) -> SSAValue:
        """A weight as a plain tensor, decoded once if it is packed."""
        if not isinstance(value.type, QTensorType):
            return value
        if value not in self.decoded:
            if value not in self.sections:
                raise QCompilerError(f"only constants can be decoded by linalg; {value.type} is computed")
            self.decoded[value] = decode_weight(self.builder, value.type, self.sections[value])
        return self.decoded[value]


Rule = Callable[[Any, LinalgLowering], Sequence[SSAValue]]


def lower(op: Operation, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """The op's results as linalg. QCompilerError, with the module path, for an op without a rule."""
    rule = RULES.get(type(op))
    if rule is None:
        raise QCompilerError(f"{op.name} at '{path_of(op) or '?'}' has no lowering to linalg yet")
    return rule(op, lowering)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _accumulator(*values: SSAValue) -> DType:
    return "f64" if any(tensor_dtype(v.type) == "f64" for v in values) else "f32"


def _convert(b: Builder, value: SSAValue, dtype: DType) -> SSAValue:
    """A float scalar in another float type."""
    target = ELEMENT_TYPES[dtype]
    if value.type == target:
        return value
    assert isinstance(target, AnyFloat) and isinstance(value.type, AnyFloat)
    cast = arith.ExtFOp if target.bitwidth > value.type.bitwidth else arith.TruncFOp
    return b.insert(cast(value, target)).results[0]


def _multiply_add(acc: DType) -> Combine:
    def body(b: Builder, s: Scalars) -> Operation:
        product = b.insert(arith.MulfOp(_convert(b, s[0], acc), _convert(b, s[1], acc)))
        return b.insert(arith.AddfOp(s[2], product))

    return body


def _dims(*positions: int) -> tuple[AffineExpr, ...]:
    return tuple(AffineDimExpr(p) for p in positions)


def _contract(
    b: Builder, operands: Sequence[SSAValue], maps: Sequence[Sequence[AffineExpr]], out: Sequence[Dim], acc: DType
) -> SSAValue:
    """A sum of products: parallel loops over `out`, then one reduction loop."""
    rank = len(out) + 1
    affine = [AffineMap(rank, 0, tuple(m)) for m in (*maps, _dims(*range(len(out))))]
    start = build.fill(b, 0.0, out, acc)
    iterators: list[build.Iterator] = ["parallel"] * len(out)
    return build.generic(b, operands, affine, out, acc, [*iterators, "reduction"], _multiply_add(acc), init=start)


def _rounded(b: Builder, value: SSAValue, dtype: DType) -> SSAValue:
    if tensor_dtype(value.type) == dtype:
        return value
    return build.pointwise(b, [value], shape_of(value.type), dtype, lambda i, s: _convert(i, s[0], dtype))


def _beside(
    b: Builder, full: Sequence[SSAValue], reduced: Sequence[SSAValue], axis: int, dtype: DType, body: Combine
) -> SSAValue:
    """A pointwise op over tensors of one shape and tensors of the same shape without `axis`."""
    shape = shape_of(full[0].type)
    kept = tuple(i for i in range(len(shape)) if i != axis)
    identity = AffineMap.identity(len(shape))
    maps = [identity] * len(full) + [AffineMap(len(shape), 0, _dims(*kept))] * len(reduced) + [identity]
    return build.generic(b, [*full, *reduced], maps, shape, dtype, ["parallel"] * len(shape), body)


def _size(b: Builder, size: Dim, dtype: DType) -> SSAValue:
    """A dim as a float scalar."""
    if isinstance(size, int):
        return build.scalar(b, float(size), dtype)
    index = build.dim_value(b, size)
    assert isinstance(index, SSAValue)
    integer = b.insert(arith.IndexCastOp(index, IntegerType(64))).result
    target = ELEMENT_TYPES[dtype]
    assert isinstance(target, AnyFloat)
    return b.insert(arith.SIToFPOp(integer, target)).result


def _mean(b: Builder, total: SSAValue, size: Dim, acc: DType) -> SSAValue:
    count = _size(b, size, acc)
    return build.pointwise(
        b, [total, count], shape_of(total.type), acc, lambda i, s: i.insert(arith.DivfOp(s[0], s[1]))
    )


# --- matmuls ---------------------------------------------------------------------------------------------------------


def _linear(op: qc.LinearOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    if op.multiplies_codes:
        raise QCompilerError(f"{op.name} of rows of int8 at '{path_of(op) or '?'}' has no lowering to linalg yet")
    if op.statistics is not None:
        raise QCompilerError(f"{op.name} with statistics of rows at '{path_of(op) or '?'}' has no lowering to linalg")
    b, w, x = lowering.builder, lowering.weight(op.w), op.x
    kept: list[SSAValue] = []
    affine = list(op.affine)
    for norm in op.norms:
        apart = norm_of(norm, [x, *(affine.pop(0) for _ in norm.operands[1:])])
        (x,) = lower(apart, lowering)
        apart.erase()
        kept = kept or [x] * len(op.kept)
    if (factor := tensor_dtype(op.w.type)) != tensor_dtype(x.type):
        x = build.pointwise(b, [x], shape_of(x.type), factor, lambda i, s: _convert(i, s[0], factor))
    rank, acc = len(shape_of(op.x.type)), _accumulator(op.x, w)
    out = (*shape_of(op.x.type)[:-1], shape_of(op.w.type)[0])
    # loops: the leading dims of x, n, then k
    reads = [_dims(*range(rank - 1), rank), _dims(rank - 1, rank)]
    total = _contract(b, [x, w], reads, out, acc)
    bias = [op.bias] if op.bias is not None else []
    dtype = tensor_dtype(op.result.type)
    if op.combines_pairs:
        return [_combined(op, total, lowering), *kept]
    inputs = [total, *bias, *op.extras]

    def body(i: Builder, s: Scalars) -> SSAValue:
        value = s[0]
        if bias:
            value = i.insert(arith.AddfOp(value, _convert(i, s[1], acc))).result
        if not op.epilogue.blocks:
            return _convert(i, value, dtype)
        return _inline(i, op.epilogue.block, [_convert(i, value, "f32"), *s[1 + len(bias) : -1]])

    return [build.pointwise(b, inputs, out, dtype, body), *kept]


def _combined(op: qc.LinearOp, total: SSAValue, lowering: LinalgLowering) -> SSAValue:
    """The epilogue of both halves of the sums."""
    b, out, acc = lowering.builder, shape_of(op.result.type), tensor_dtype(total.type)
    if op.bias is not None:

        def biased(i: Builder, s: Scalars) -> SSAValue:
            return i.insert(arith.AddfOp(s[0], _convert(i, s[1], acc))).result

        total = build.pointwise(b, [total, op.bias], shape_of(total.type), acc, biased)
    begin = [0] * (len(out) - 1)
    halves = [build.extract_slice(b, total, [*begin, at], out) for at in (0, int(out[-1]))]

    def body(i: Builder, s: Scalars) -> SSAValue:
        return _inline(i, op.epilogue.block, [*(_convert(i, half, "f32") for half in s[:2]), *s[2:-1]])

    return build.pointwise(b, [*halves, *op.extras], out, tensor_dtype(op.result.type), body)


def _inline(b: Builder, block: Block, arguments: Scalars) -> SSAValue:
    """Copies a scalar body; returns what it yields."""
    values: dict[SSAValue, SSAValue] = dict(zip(block.args, arguments, strict=True))
    for op in block.ops:
        if isinstance(op, qc.YieldOp):
            return values[op.operands[0]]
        copy = b.insert(op.clone(dict(values)))
        values.update(zip(op.results, copy.results, strict=True))
    raise QCompilerError("an epilogue does not end in qc.yield")


def _batch_matmul(op: qc.BatchMatmulOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    out = shape_of(op.result.type)
    n = len(out)
    batch = range(n - 2)
    reads = [_dims(*batch, n - 2, n), _dims(*batch, n, n - 1)]
    total = _contract(lowering.builder, [op.a, op.b], reads, out, _accumulator(op.a, op.b))
    return [_rounded(lowering.builder, total, tensor_dtype(op.result.type))]


# --- softmax and attention -------------------------------------------------------------------------------------------


def _softmax_over(b: Builder, x: SSAValue, axis: int, *, empty_rows: bool) -> SSAValue:
    """exp(x - max) / sum in the type of `x`; with `empty_rows` a row of -inf gives zeros instead of NaN."""
    acc = tensor_dtype(x.type)
    peak = build.reduce(b, x, [axis], "max")

    def shifted(i: Builder, s: Scalars) -> Operation:
        top = s[1]
        if empty_rows:
            lowest = build.scalar(i, float("-inf"), acc)
            nothing = i.insert(arith.CmpfOp(top, lowest, "oeq")).result
            top = i.insert(arith.SelectOp(nothing, build.scalar(i, 0.0, acc), top)).result
        return i.insert(math.ExpOp(i.insert(arith.SubfOp(s[0], top)).result))

    powers = _beside(b, [x], [peak], axis, acc, shifted)
    total = build.reduce(b, powers, [axis], "add")

    def divided(i: Builder, s: Scalars) -> Operation:
        bottom = s[1]
        if empty_rows:
            nothing = i.insert(arith.CmpfOp(bottom, build.scalar(i, 0.0, acc), "oeq")).result
            bottom = i.insert(arith.SelectOp(nothing, build.scalar(i, 1.0, acc), bottom)).result
        return i.insert(arith.DivfOp(s[0], bottom))

    return _beside(b, [powers], [total], axis, acc, divided)


def _softmax(op: qc.SoftmaxOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, _accumulator(op.x)
    out = _softmax_over(b, _rounded(b, op.x, acc), op.axis.value.data, empty_rows=False)
    return [_rounded(b, out, tensor_dtype(op.result.type))]


def _attention(op: qc.AttentionOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, _accumulator(op.q, op.k, op.v)
    q, k, v = (shape_of(t.type) for t in (op.q, op.k, op.v))
    head: AffineExpr = AffineDimExpr(1) // (int(q[1]) // int(k[1]))
    full = (q[0], q[1], q[2], k[2])
    d0, _, _, d3, d4 = _dims(*range(5))
    scores = _contract(b, [op.q, op.k], [_dims(0, 1, 2, 4), (d0, head, d3, d4)], full, acc)
    masks = [op.mask] if op.mask is not None else []
    lasts = []
    if op.last is not None:
        batch, queries = shape_of(op.last.type)
        lasts = [build.reshape(b, op.last, (batch, 1, queries, 1))]

    def masked(i: Builder, s: Scalars) -> SSAValue:
        score = i.insert(arith.MulfOp(s[0], build.scalar(i, op.scale.value.data, acc))).result
        if op.cap is not None:
            cap = build.scalar(i, op.cap, acc)
            capped = i.insert(math.TanhOp(i.insert(arith.DivfOp(score, cap)).result)).result
            score = i.insert(arith.MulfOp(cap, capped)).result
        lowest = build.scalar(i, float("-inf"), acc)
        if masks:
            if isinstance(s[1].type, IntegerType):
                score = i.insert(arith.SelectOp(s[1], score, lowest)).result
            else:
                score = i.insert(arith.AddfOp(score, _convert(i, s[1], acc))).result
        row: SSAValue = i.insert(IndexOp(2)).result
        column = i.insert(IndexOp(3)).result
        if lasts:
            row = i.insert(arith.IndexCastOp(s[-1], IndexType())).result
        return _visible(i, op, score, lowest, row, column)

    scores = build.pointwise(b, [scores, *masks, *lasts], full, acc, masked)
    weights = _softmax_over(b, scores, 3, empty_rows=True)
    # loops: batch, head, query, value dim, then key
    out = (q[0], q[1], q[2], v[3])
    total = _contract(b, [weights, op.v], [_dims(0, 1, 2, 4), (d0, head, d4, d3)], out, acc)
    return [_rounded(b, total, tensor_dtype(op.result.type))]


def _visible(
    i: Builder, op: qc.AttentionOp, score: SSAValue, hidden: SSAValue, row: SSAValue, column: SSAValue
) -> SSAValue:
    """`score`, or `hidden` if the query at position `row` does not see the key."""
    if op.causal is not None or op.last is not None:
        score = i.insert(arith.SelectOp(i.insert(arith.CmpiOp(column, row, "sle")).result, score, hidden)).result
    if op.ring is not None and op.keys_back is not None:
        behind = i.insert(arith.SubiOp(row, column)).result  # keys behind the query are hidden already
        behind = i.insert(arith.RemSIOp(behind, build.index_constant(i, int(shape_of(op.k.type)[2])))).result
        near = i.insert(arith.CmpiOp(behind, build.index_constant(i, op.keys_back), "slt")).result
        return i.insert(arith.SelectOp(near, score, hidden)).result
    if op.keys_back is not None:
        ahead = i.insert(arith.AddiOp(column, build.index_constant(i, op.keys_back))).result
        near = i.insert(arith.CmpiOp(ahead, row, "sgt")).result
        score = i.insert(arith.SelectOp(near, score, hidden)).result
    return score


# --- norms -----------------------------------------------------------------------------------------------------------


def _scaled(
    b: Builder, x: SSAValue, spread: SSAValue, affine: Sequence[SSAValue | None], eps: float, dtype: DType
) -> SSAValue:
    """`x / sqrt(spread + eps) * weight + bias`, rounded; `spread` lacks the last dim."""
    shape, acc = shape_of(x.type), tensor_dtype(x.type)
    rank = len(shape)
    given = [value for value in affine if value is not None]
    maps = [AffineMap.identity(rank), AffineMap(rank, 0, _dims(*range(rank - 1)))]
    maps += [AffineMap(rank, 0, _dims(rank - 1))] * len(given) + [AffineMap.identity(rank)]

    def body(i: Builder, s: Scalars) -> SSAValue:
        total = i.insert(arith.AddfOp(s[1], build.scalar(i, eps, acc))).result
        value = i.insert(arith.DivfOp(s[0], i.insert(math.SqrtOp(total)).result)).result
        rest = list(s[2:-1])
        if affine[0] is not None:
            value = i.insert(arith.MulfOp(value, _convert(i, rest.pop(0), acc))).result
        if len(affine) > 1 and affine[1] is not None:
            value = i.insert(arith.AddfOp(value, _convert(i, rest.pop(0), acc))).result
        return _convert(i, value, dtype)

    return build.generic(b, [x, spread, *given], maps, shape, dtype, ["parallel"] * rank, body)


def _mean_square(b: Builder, x: SSAValue) -> SSAValue:
    shape, acc = shape_of(x.type), tensor_dtype(x.type)
    squares = build.pointwise(b, [x], shape, acc, lambda i, s: i.insert(arith.MulfOp(s[0], s[0])))
    return _mean(b, build.reduce(b, squares, [len(shape) - 1], "add"), shape[-1], acc)


def _layer_norm(op: qc.LayerNormOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, _accumulator(op.x)
    x, axis = _rounded(b, op.x, acc), len(shape_of(op.x.type)) - 1
    mean = _mean(b, build.reduce(b, x, [axis], "add"), shape_of(x.type)[-1], acc)
    centred = _beside(b, [x], [mean], axis, acc, lambda i, s: i.insert(arith.SubfOp(s[0], s[1])))
    affine, dtype = [op.weight, op.bias], tensor_dtype(op.result.type)
    return [_added(b, op, _scaled(b, centred, _mean_square(b, centred), affine, op.eps.value.data, dtype))]


def _rms_norm(op: qc.RmsNormOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, acc = lowering.builder, _accumulator(op.x)
    x = _rounded(b, op.x, acc)
    made = _scaled(b, x, _mean_square(b, x), [op.weight], op.eps.value.data, tensor_dtype(op.result.type))
    return [_added(b, op, made)]


def _added(b: Builder, op: qc.LayerNormOp | qc.RmsNormOp, norm: SSAValue) -> SSAValue:
    """The norm, added to its residual if it has one. QCompilerError if its statistics are given."""
    if op.statistics is not None:
        raise QCompilerError(f"{op.name} of given statistics at '{path_of(op) or '?'}' has no lowering to linalg")
    if op.residual is None:
        return norm
    shape, dtype, acc = shape_of(norm.type), tensor_dtype(norm.type), _accumulator(op.x)

    def body(i: Builder, s: Scalars) -> SSAValue:
        total = i.insert(arith.AddfOp(_convert(i, s[0], acc), _convert(i, s[1], acc))).result
        return _convert(i, total, dtype)

    return build.pointwise(b, [op.residual, norm], shape, dtype, body)


# --- positions and values --------------------------------------------------------------------------------------------


def _rope(op: qc.RopeOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """Reads x twice: at its own index, and at its partner's, through an index map if that is affine."""
    b, acc = lowering.builder, _accumulator(op.x, op.cos, op.sin)
    shape, half = shape_of(op.x.type), int(shape_of(op.x.type)[3]) // 2
    grouped = (*shape[:3], half, 2) if op.interleaved is not None else (*shape[:3], 2, half)
    pair = 4 if op.interleaved is not None else 3
    d = list(_dims(*range(5)))
    swapped = list(d)
    swapped[pair] = d[pair] * -1 + 1
    split = [build.reshape(b, v, (*shape_of(v.type)[:3], *grouped[3:])) for v in (op.x, op.cos, op.sin)]
    zero = AffineConstantExpr(0)

    def angles(value: SSAValue) -> tuple[AffineExpr, ...]:
        return (d[0] if shape_of(value.type)[0] == shape[0] else zero, zero, d[2], d[3], d[4])

    reads = [tuple(d), tuple(swapped), angles(split[1]), angles(split[2]), tuple(d)]

    def body(i: Builder, s: Scalars) -> SSAValue:
        x, partner, cos, sin = (_convert(i, value, acc) for value in s[:4])
        side = i.insert(IndexOp(pair)).result
        first = i.insert(arith.CmpiOp(side, build.index_constant(i, 0), "eq")).result
        turned = i.insert(arith.SelectOp(first, i.insert(arith.NegfOp(partner)).result, partner)).result
        kept, moved = i.insert(arith.MulfOp(x, cos)).result, i.insert(arith.MulfOp(turned, sin)).result
        return _convert(i, i.insert(arith.AddfOp(kept, moved)).result, tensor_dtype(op.result.type))

    operands = [split[0], split[0], split[1], split[2]]
    maps = [AffineMap(5, 0, r) for r in reads]
    out = build.generic(b, operands, maps, grouped, tensor_dtype(op.result.type), ["parallel"] * 5, body)
    return [build.reshape(b, out, shape)]


def _embedding(op: qc.EmbeddingOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, table = lowering.builder, lowering.weight(op.table)
    shape = shape_of(op.result.type)
    rank = len(shape)
    maps = [AffineMap(rank, 0, _dims(*range(rank - 1))), AffineMap.identity(rank)]
    dtype = tensor_dtype(op.result.type)

    def body(i: Builder, s: Scalars) -> SSAValue:
        row = i.insert(arith.IndexCastOp(s[0], IndexType())).result
        column = i.insert(IndexOp(rank - 1)).result
        assert isinstance(table.type, TensorType)
        picked = i.insert(tensor.ExtractOp(table, [row, column], table.type.element_type)).result
        return _convert(i, picked, dtype)

    return [build.generic(b, [op.ids], maps, shape, dtype, ["parallel"] * rank, body)]


def _gather(op: qc.GatherOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """Reads x element by element at the wrapped index."""
    b, axis, x = lowering.builder, op.axis.value.data, op.x
    shape, width = shape_of(op.result.type), len(shape_of(op.index.type))
    rank, along = len(shape), op.mode.data == "along"
    reads = _dims(*(range(rank) if along else range(axis, axis + width)))
    length = build.dim_value(b, shape_of(x.type)[axis])

    def body(i: Builder, s: Scalars) -> SSAValue:
        size = build.index_constant(i, length) if isinstance(length, int) else length
        raw = i.insert(arith.IndexCastOp(s[0], IndexType())).result
        negative = i.insert(arith.CmpiOp(raw, build.index_constant(i, 0), "slt")).result
        place = i.insert(arith.SelectOp(negative, i.insert(arith.AddiOp(raw, size)).result, raw)).result
        loops = [i.insert(IndexOp(d)).result for d in range(rank)]
        index = [*loops[:axis], place, *loops[axis + (1 if along else width) :]]
        assert isinstance(x.type, TensorType)
        return i.insert(tensor.ExtractOp(x, index, x.type.element_type)).result

    maps = [AffineMap(rank, 0, reads), AffineMap.identity(rank)]
    return [build.generic(b, [op.index], maps, shape, tensor_dtype(x.type), ["parallel"] * rank, body)]


def _cumsum(op: qc.CumsumOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """The sum of x[j] over all j <= i: simple and quadratic. QCompilerError for any other fold."""
    if op.fold != "add":
        raise QCompilerError(
            f"{op.name} at '{path_of(op) or '?'}' folds by '{op.fold}'; only sums are lowered to linalg"
        )
    b, axis, shape = lowering.builder, op.axis.value.data, shape_of(op.x.type)
    dtype, rank = tensor_dtype(op.result.type), len(shape)
    whole = dtype.startswith("i")
    acc: DType = dtype if whole else _accumulator(op.x)

    def body(i: Builder, s: Scalars) -> SSAValue:
        if whole:
            target = ELEMENT_TYPES[acc]
            assert isinstance(target, IntegerType)
            extend = arith.ExtUIOp if s[0].type == ELEMENT_TYPES["i1"] else arith.ExtSIOp
            x: SSAValue = s[0] if s[0].type == target else i.insert(extend(s[0], target)).results[0]
            total: SSAValue = i.insert(arith.AddiOp(s[1], x)).result
        else:
            x = s[0]
            total = i.insert(arith.AddfOp(s[1], _convert(i, x, acc))).result
        before = i.insert(arith.CmpiOp(i.insert(IndexOp(rank)).result, i.insert(IndexOp(axis)).result, "sle")).result
        return i.insert(arith.SelectOp(before, total, s[1])).result

    reads = [*range(axis), rank, *range(axis + 1, rank)]
    maps = [AffineMap(rank + 1, 0, _dims(*reads)), AffineMap(rank + 1, 0, _dims(*range(rank)))]
    iterators: list[build.Iterator] = ["parallel"] * rank
    start = build.fill(b, 0, shape, acc)
    out = build.generic(b, [op.x], maps, shape, acc, [*iterators, "reduction"], body, init=start)
    return [out if whole else _rounded(b, out, dtype)]


def _dequantize(op: qc.DequantizeOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    return [_rounded(lowering.builder, lowering.weight(op.input), tensor_dtype(op.result.type))]


def _copy(op: qc.CopyOp, _lowering: LinalgLowering) -> Sequence[SSAValue]:
    return [op.input]


RULES: dict[type[Operation], Rule] = {
    qc.LinearOp: _linear,
    qc.BatchMatmulOp: _batch_matmul,
    qc.SoftmaxOp: _softmax,
    qc.AttentionOp: _attention,
    qc.LayerNormOp: _layer_norm,
    qc.RmsNormOp: _rms_norm,
    qc.RopeOp: _rope,
    qc.EmbeddingOp: _embedding,
    qc.GatherOp: _gather,
    qc.CumsumOp: _cumsum,
    qc.DequantizeOp: _dequantize,
    qc.CopyOp: _copy,
}
