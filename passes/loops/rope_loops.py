"""Lowers `qc.rope` to a loop nest. It has no kernel of its own, and as a nest it fuses with its neighbours.

x (B, H, S, D) is viewed as (B, H, S, 2, D/2), the two halves side by side (as (D/2, 2) if interleaved). The rotated
element is the one in the other half, negated for the first half.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.linalg import ops
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.passes.rewriting import pattern
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

_SPLIT = ((0,), (1,), (2,), (3, 4))


@pattern
def rope_to_loops(op: qc.RopeOp, rewriter: PatternRewriter) -> SSAValue | None:
    """A rope becomes views and one pointwise nest."""
    interleaved = op.interleaved is not None
    halves = 4 if interleaved else 3  # the loop dim that runs over the two halves
    shape = shape_of(op.x.type)
    split = _split(shape, interleaved)
    x, cos, sin = (
        build.expand(rewriter, v, _SPLIT, _split(shape_of(v.type), interleaved)) for v in (op.x, op.cos, op.sin)
    )
    straight: list[AffineExpr] = [AffineDimExpr(n) for n in range(5)]
    other: list[AffineExpr] = [AffineDimExpr(n) * -1 + 1 if n == halves else AffineDimExpr(n) for n in range(5)]
    tables: list[list[AffineExpr]] = [
        [AffineConstantExpr(0) if size == 1 else AffineDimExpr(n) for n, size in enumerate(shape_of(v.type))]
        for v in (cos, sin)
    ]
    maps = [AffineMap(5, 0, tuple(m)) for m in (straight, other, *tables, straight)]
    dtype = tensor_dtype(op.result.type)

    def body(inner: Builder, values: Sequence[SSAValue]) -> Operation:
        return _body(inner, values, halves, dtype)

    made = build.generic(rewriter, [x, x, cos, sin], maps, split, dtype, ["parallel"] * 5, body)
    return build.collapse(rewriter, made, _SPLIT)


def _split(shape: Sequence[Dim], interleaved: bool) -> tuple[Dim, ...]:
    depth = shape[3]
    assert isinstance(depth, int)
    return (*shape[:3], depth // 2, 2) if interleaved else (*shape[:3], 2, depth // 2)


def _body(inner: Builder, values: Sequence[SSAValue], halves: int, dtype: DType) -> Operation:
    """Computes `x * cos + (first half ? -other : other) * sin` in f32 and rounds once."""
    wide = [_widened(inner, v) for v in values[:4]]
    x, other, cos, sin = wide
    half = inner.insert(ops.IndexOp(halves)).result
    first = inner.insert(arith.CmpiOp(half, build.index_constant(inner, 0), "eq")).result
    negated = inner.insert(arith.NegfOp(other)).result
    rotated = inner.insert(arith.SelectOp(first, negated, other)).result
    direct = inner.insert(arith.MulfOp(x, cos)).result
    turned = inner.insert(arith.MulfOp(rotated, sin)).result
    total = inner.insert(arith.AddfOp(direct, turned))
    if dtype in ("f32", "f64"):
        return total
    return inner.insert(arith.TruncFOp(total.result, ELEMENT_TYPES[dtype]))


def _widened(inner: Builder, value: SSAValue) -> SSAValue:
    narrow = value.type in (ELEMENT_TYPES["bf16"], ELEMENT_TYPES["f16"])
    return inner.insert(arith.ExtFOp(value, ELEMENT_TYPES["f32"])).result if narrow else value
