"""Decomposed forms are raised however they are spelt, and only where they are what they seem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor

RAISE = ["fold-views", "raise-idioms"]


def sample(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(4).standard_normal(shape).astype(dtype)


def cast(make: Any, value: SSAValue, dtype: Any) -> SSAValue:
    kind = arith.ExtFOp if dtype == "f32" else arith.TruncFOp

    def body(inner: Builder, a: Any) -> Operation:
        return inner.insert(kind(a[0], ELEMENT_TYPES[dtype]))

    return build.pointwise(make.builder, [value], shape_of(value.type), dtype, body)


def mean(make: Any, x: SSAValue, factor: float | None = None) -> SSAValue:
    shape = shape_of(x.type)
    total = build.reduce(make.builder, x, [len(shape) - 1], "add")
    total = build.reshape(make.builder, total, (*shape[:-1], 1))
    return make.scaled(total, factor) if factor is not None else make.scaled(total, float(shape[-1]), arith.DivfOp)  # type: ignore[arg-type]


def inverse_root(make: Any, x: SSAValue, how: str) -> tuple[Callable[..., Operation], SSAValue]:
    """The op that applies it, and its right side."""
    if how == "rsqrt":
        return arith.MulfOp, make.pointwise(math.RsqrtOp, x)
    if how == "power":
        return arith.MulfOp, make.scaled(x, -0.5, math.PowFOp)
    return arith.DivfOp, make.pointwise(math.SqrtOp, x)


@pytest.mark.parametrize("how", ["rsqrt", "power", "divided by sqrt"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(make: Any, how: str, weighted: bool) -> None:
    x = make.arg(("b", "s", 16))
    apply, root = inverse_root(
        make, make.scaled(mean(make, make.pointwise(arith.MulfOp, x, x)), 1e-6, arith.AddfOp), how
    )
    y = make.pointwise(apply, x, root)
    make.finish(make.pointwise(arith.MulfOp, make.const(16), y) if weighted else y)
    make.run(RAISE, [sample(2, 3, 16)])
    assert make.ops() == ["qc.rms_norm"]


def test_norm_of_transposed_heads_reads_them_where_they_lie(make: Any) -> None:
    rows = build.reshape(make.builder, make.arg(("b", "s", 32)), ("b", "s", 2, 16))
    x = build.transpose(make.builder, rows, (0, 2, 1, 3))
    root = make.pointwise(math.RsqrtOp, make.scaled(mean(make, make.pointwise(arith.MulfOp, x, x)), 1e-6, arith.AddfOp))
    make.finish(make.pointwise(arith.MulfOp, make.const(16), make.pointwise(arith.MulfOp, x, root)))
    make.run(RAISE, [sample(2, 3, 32)])
    (norm,) = (op for op in make.module.walk() if isinstance(op, qc.RmsNormOp))
    assert shape_of(norm.x.type) == ("b", "s", 2, 16) and "linalg.generic" not in make.ops()


def test_rms_norm_of_bf16_with_its_statistics_in_fp32(make: Any) -> None:
    x = make.arg(("s", 16), "bf16")
    wide = cast(make, x, "f32")
    squares = make.scaled(wide, 2.0, math.PowFOp)
    root = make.pointwise(math.RsqrtOp, make.scaled(mean(make, squares, 1 / 16), 1e-6, arith.AddfOp))
    narrow = cast(make, make.pointwise(arith.MulfOp, wide, root), "bf16")
    weight = make.const(values=sample(16, dtype=ml_dtypes.bfloat16))
    make.finish(make.pointwise(arith.MulfOp, narrow, weight))
    make.run(RAISE, [sample(5, 16, dtype=ml_dtypes.bfloat16)])
    assert make.ops() == ["qc.rms_norm"]


@pytest.mark.parametrize("parts", ["plain", "weight", "weight and bias"])
def test_layer_norm(make: Any, parts: str) -> None:
    x = make.arg(("b", "s", 16))
    centred = make.pointwise(arith.SubfOp, x, mean(make, x))
    variance = mean(make, make.pointwise(arith.MulfOp, centred, centred))
    y = make.pointwise(arith.MulfOp, centred, make.pointwise(math.RsqrtOp, make.scaled(variance, 1e-5, arith.AddfOp)))
    if "weight" in parts:
        y = make.pointwise(arith.MulfOp, y, make.const(16))
    if "bias" in parts:
        y = make.pointwise(arith.AddfOp, y, make.const(16))
    make.finish(y)
    make.run(RAISE, [sample(2, 3, 16)])
    assert make.ops() == ["qc.layer_norm"]


def test_mean_over_the_wrong_count_is_no_norm(make: Any) -> None:
    x = make.arg(("s", 16))
    variance = make.scaled(mean(make, make.pointwise(arith.MulfOp, x, x), 1 / 15), 1e-6, arith.AddfOp)
    make.finish(make.pointwise(arith.MulfOp, x, make.pointwise(math.RsqrtOp, variance)))
    make.run(RAISE, [sample(5, 16)])
    assert "qc.rms_norm" not in make.ops()


def test_norm_of_another_tensor_is_no_norm(make: Any) -> None:
    x, y = make.arg(("s", 16)), make.arg(("s", 16))
    variance = make.scaled(mean(make, make.pointwise(arith.MulfOp, x, x)), 1e-6, arith.AddfOp)
    make.finish(make.pointwise(arith.MulfOp, y, make.pointwise(math.RsqrtOp, variance)))
    make.run(RAISE, [sample(5, 16), sample(5, 16) * 3])
    assert "qc.rms_norm" not in make.ops()


def test_column_scale_of_a_square_tensor_is_not_taken_for_the_weight(make: Any) -> None:
    x, w = make.arg((16, 16)), make.arg((16,))
    variance = make.scaled(mean(make, make.pointwise(arith.MulfOp, x, x)), 1e-6, arith.AddfOp)
    y = make.pointwise(arith.MulfOp, x, make.pointwise(math.RsqrtOp, variance))
    make.finish(make.pointwise(arith.MulfOp, y, build.reshape(make.builder, w, (16, 1))))
    make.run(RAISE, [sample(16, 16), sample(16)])
    assert make.ops()[0] == "qc.rms_norm" and "linalg.generic" in make.ops()


def softmax(make: Any, x: SSAValue, axis: int) -> SSAValue:
    shape = shape_of(x.type)
    kept = (*shape[:axis], 1, *shape[axis + 1 :])
    peak = build.reshape(make.builder, build.reduce(make.builder, x, [axis], "max"), kept)
    e = make.pointwise(math.ExpOp, make.pointwise(arith.SubfOp, x, peak))
    return make.pointwise(
        arith.DivfOp, e, build.reshape(make.builder, build.reduce(make.builder, e, [axis], "add"), kept)
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_along_any_axis(make: Any, axis: int) -> None:
    x = make.arg(("b", "s", 6))
    make.finish(softmax(make, x, axis))
    make.run(RAISE, [sample(2, 3, 6)])
    assert make.ops() == ["qc.softmax"]


def test_softmax_shifted_by_another_maximum_is_none(make: Any) -> None:
    x, y = make.arg(("s", 6)), make.arg(("s", 6))
    peak = build.reshape(make.builder, build.reduce(make.builder, y, [1], "max"), ("s", 1))
    e = make.pointwise(math.ExpOp, make.pointwise(arith.SubfOp, x, peak))
    total = build.reshape(make.builder, build.reduce(make.builder, e, [1], "add"), ("s", 1))
    make.finish(make.pointwise(arith.DivfOp, e, total))
    make.run(RAISE, [sample(5, 6), sample(5, 6) + 1])
    assert "qc.softmax" not in make.ops()


@pytest.mark.parametrize("along", [2, 1])
def test_softmax_of_what_is_shifted_by_its_maximum(make: Any, along: int) -> None:
    """gpt-oss subtracts the maximum before the softmax, which does so again."""
    x = make.arg(("b", "s", 6))
    peak = build.reduce(make.builder, x, [along], "max")
    shifted = make.pointwise(arith.SubfOp, x, build.reshape(make.builder, peak, ("b", *((1, 6), ("s", 1))[along - 1])))
    make.finish(make.op(qc.SoftmaxOp(shifted, x.type, axis=2)))
    make.run(RAISE, [sample(2, 3, 6)])
    assert make.ops()[-1] == "qc.softmax" and (len(make.ops()) == 1) == (along == 2)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("mask", ["none", "added", "selected", "hidden", "both"])
@pytest.mark.parametrize("scale", ["product", "quotient", "of k", "capped"])
def test_attention_between_two_matmuls(make: Any, rank: int, mask: str, scale: str) -> None:
    heads, scores = ("b", 2, "s", 8), ("b", 2, "s", "s")
    q, k, v = (make.arg(heads) for _ in range(3))
    if rank == 3:
        q, k, v = (build.reshape(make.builder, t, ("2*b", "s", 8)) for t in (q, k, v))
    lead = ("2*b",) if rank == 3 else ("b", 2)
    turned = build.transpose(make.builder, k, (*range(rank - 2), rank - 1, rank - 2))
    if scale == "of k":
        turned = make.scaled(turned, 2.0, arith.DivfOp)
    s = make.op(qc.BatchMatmulOp(q, turned, tensor((*lead, "s", "s"), "f32")))
    s = build.reshape(make.builder, s, scores)
    if scale in ("product", "capped"):
        s = make.scaled(s, 0.5)
    elif scale == "quotient":
        s = make.scaled(s, 2.0, arith.DivfOp)
    if scale == "capped":
        s = make.scaled(make.pointwise(math.TanhOp, make.scaled(s, 3.0, arith.DivfOp)), 3.0)
    inputs = [sample(2, 2, 5, 8) for _ in range(3)]
    if mask in ("added", "both"):
        s = make.pointwise(arith.AddfOp, s, make.arg(("b", 1, 1, "s")))
        inputs.append(sample(2, 1, 1, 5))
    if mask in ("selected", "hidden", "both"):
        keep = make.arg(("b", 1, 1, "s"), "i1")
        dropped = float("-inf") if mask == "hidden" else -3e38

        def body(inner: Builder, a: Any) -> Operation:
            return inner.insert(arith.SelectOp(a[0], a[1], build.scalar(inner, dropped, "f32")))

        s = build.pointwise(make.builder, [keep, s], scores, "f32", body)
        kept = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 1], bool).reshape(2, 1, 1, 5)
        kept[1] &= mask == "hidden"  # a row of equal scores weighs all keys alike; one of -inf would be NaN
        inputs.append(kept)
    p = build.reshape(make.builder, softmax(make, s, 3), (*lead, "s", "s"))
    out = make.op(qc.BatchMatmulOp(p, v, tensor((*lead, "s", 8), "f32")))
    make.finish(build.reshape(make.builder, out, heads))
    make.run(RAISE, inputs)
    assert make.ops() == (["linalg.generic"] if mask in ("selected", "both") else []) + ["qc.attention"]
    (attention,) = (op for op in make.module.walk() if isinstance(op, qc.AttentionOp))
    assert attention.scale.value.data == 0.5 and attention.cap == (3.0 if scale == "capped" else None)


def with_sinks(
    make: Any, keep: SSAValue | None, sinks: SSAValue, cut: int = 0, *, in_front: bool = False, groups: int = 1
) -> SSAValue:
    """Attention of `2 * groups` heads over two, whose softmax is over the scores and the column `sinks`; the weights
    from column `cut` on are multiplied."""
    heads, b = 2 * groups, make.builder
    q, k, v = make.arg(("b", heads, "s", 8)), make.arg(("b", 2, "t", 8)), make.arg(("b", 2, "t", 8))
    rows, scores = ("b", 2, f"{groups}*s" if groups > 1 else "s"), ("b", heads, "s", "t")
    turned = build.transpose(b, k, (0, 1, 3, 2))
    s = make.op(qc.BatchMatmulOp(build.reshape(b, q, (*rows, 8)), turned, tensor((*rows, "t"), "f32")))
    s = make.scaled(build.reshape(b, s, scores), 0.5)
    if keep is not None:

        def body(inner: Builder, a: Any) -> Operation:
            return inner.insert(arith.SelectOp(a[0], a[1], build.scalar(inner, -3e38, "f32")))

        s = build.pointwise(b, [keep, s], scores, "f32", body)
    column = build.broadcast_to(b, sinks, (*scores[:3], shape_of(sinks.type)[-1]))
    p = softmax(make, build.concat(b, [column, s] if in_front else [s, column], 3), 3)
    p = build.reshape(b, build.extract_slice(b, p, (0, 0, 0, cut), scores), (*rows, "t"))
    return build.reshape(b, make.op(qc.BatchMatmulOp(p, v, tensor((*rows, 8), "f32"))), ("b", heads, "s", 8))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axes", ["h", "bhs", "s", ""])
def test_a_column_beside_the_scores_is_a_sink(make: Any, groups: int, masked: bool, axes: str) -> None:
    sizes = {"b": (2, "b"), "h": (2 * groups, 2 * groups), "s": (5, "s")}
    sinks = make.arg((*(sizes[each][1] if each in axes else 1 for each in "bhs"), 1))
    keep = make.arg(("b", 1, 1, "t"), "i1") if masked else None
    make.finish(with_sinks(make, keep, sinks, groups=groups))
    kept = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0], bool).reshape(2, 1, 1, 7)
    kept[1] = False  # a sink takes all of the weight there
    given = [sample(*(sizes[each][0] if each in axes else 1 for each in "bhs"), 1), *([kept] if masked else [])]
    make.run(RAISE, [*given, sample(2, 2 * groups, 5, 8), sample(2, 2, 7, 8), sample(2, 2, 7, 8)])
    assert make.ops()[-1] == "qc.attention" and "qc.softmax" not in make.ops()
    (attention,) = (op for op in make.module.walk() if isinstance(op, qc.AttentionOp))
    assert attention.sinks is not None and (attention.mask is not None) == masked
    assert shape_of(attention.sinks.type) == shape_of(sinks.type)


@pytest.mark.parametrize("of", ["sum", "max"])
@pytest.mark.parametrize("what", ["sink", "bias"])
def test_what_is_added_to_the_scores_may_be_a_reduction(make: Any, what: str, of: str) -> None:
    """A learned key of a sink, q · w, for example: what a reduction runs over is no dim of the scores."""
    q, x, b = make.arg(("b", 2, "s", 8)), make.arg((1, 2, "s", 6)), make.builder
    made = build.reshape(b, build.reduce(b, x, [3], "add" if of == "sum" else "max"), (1, 2, "s", 1))
    scores = ("b", 2, "s", "s")
    s = make.op(qc.BatchMatmulOp(q, build.transpose(b, q, (0, 1, 3, 2)), tensor(scores, "f32")))
    if what == "bias":
        p = softmax(make, make.pointwise(arith.AddfOp, s, made), 3)
    else:
        p = softmax(make, build.concat(b, [s, build.broadcast_to(b, made, (*scores[:3], 1))], 3), 3)
        p = build.extract_slice(b, p, (0, 0, 0, 0), scores)
    make.finish(make.op(qc.BatchMatmulOp(p, q, q.type)))
    make.run(RAISE, [sample(2, 2, 5, 8), sample(1, 2, 5, 6)])
    assert make.ops()[-1] == "qc.attention" and "qc.softmax" not in make.ops()


def test_a_softmax_along_another_dim_than_the_column_is_no_attention(make: Any) -> None:
    q, sinks, b = make.arg(("b", 2, "s", 8)), make.arg((1, 2, 1, 1)), make.builder
    scores = ("b", 2, "s", "s")
    s = make.op(qc.BatchMatmulOp(q, build.transpose(b, q, (0, 1, 3, 2)), tensor(scores, "f32")))
    p = softmax(make, build.concat(b, [s, build.broadcast_to(b, sinks, (*scores[:3], 1))], 3), 2)
    p = build.extract_slice(b, p, (0, 0, 0, 0), scores)
    make.finish(make.op(qc.BatchMatmulOp(p, q, q.type)))
    make.run(RAISE, [sample(2, 2, 5, 8), sample(1, 2, 1, 1)])
    assert "qc.attention" not in make.ops()


@pytest.mark.parametrize(
    ("columns", "cut", "in_front"), [(2, 0, False), (1, 1, False), (1, 0, True)],
    ids=["two columns", "other weights", "the column is in front"],
)  # fmt: skip
def test_columns_that_are_no_sink_stay(make: Any, columns: int, cut: int, in_front: bool) -> None:
    make.finish(with_sinks(make, None, make.arg((1, 2, 1, columns)), cut, in_front=in_front))
    make.run(RAISE, [sample(1, 2, 1, columns), sample(2, 2, 5, 8), sample(2, 2, 7, 8), sample(2, 2, 7, 8)])
    assert "qc.attention" not in make.ops()


def test_layers_with_the_same_terms_share_their_mask(make: Any) -> None:
    heads, scores = ("b", 2, "s", 8), ("b", 2, "s", "s")
    q, bias, mask = make.arg(heads), make.arg((1, 2, "s", "s")), make.arg(("b", 1, 1, "s"))
    x = q
    for _ in range(2):
        s = make.op(qc.BatchMatmulOp(x, build.transpose(make.builder, x, (0, 1, 3, 2)), tensor(scores, "f32")))
        s = make.pointwise(arith.AddfOp, make.pointwise(arith.AddfOp, s, bias), mask)
        x = make.op(qc.BatchMatmulOp(softmax(make, s, 3), x, x.type))
    make.finish(x)
    make.run(RAISE, [sample(2, 2, 5, 8), sample(1, 2, 5, 5), sample(2, 1, 1, 5)])
    assert make.ops() == ["linalg.generic", "qc.attention", "qc.attention"]


def test_scores_dropped_to_a_number_that_others_reach_are_no_mask(make: Any) -> None:
    heads, scores = ("b", 2, "s", 8), ("b", 2, "s", "s")
    q, keep = make.arg(heads), make.arg(("b", 1, 1, "s"), "i1")
    s = make.op(qc.BatchMatmulOp(q, build.transpose(make.builder, q, (0, 1, 3, 2)), tensor(scores, "f32")))

    def body(inner: Builder, a: Any) -> Operation:
        return inner.insert(arith.SelectOp(a[0], a[1], build.scalar(inner, -1e4, "f32")))

    s = build.pointwise(make.builder, [keep, s], scores, "f32", body)
    make.finish(make.op(qc.BatchMatmulOp(softmax(make, s, 3), q, q.type)))
    make.run(RAISE, [sample(2, 2, 5, 8), np.zeros((2, 1, 1, 5), bool)])
    assert "qc.attention" not in make.ops()


def test_scale_after_the_mask_is_not_the_scale_of_the_scores(make: Any) -> None:
    heads, scores = ("b", 2, "s", 8), ("b", 2, "s", "s")
    q, k, v, mask = make.arg(heads), make.arg(heads), make.arg(heads), make.arg(scores)
    s = make.op(qc.BatchMatmulOp(q, build.transpose(make.builder, k, (0, 1, 3, 2)), tensor(scores, "f32")))
    s = make.scaled(make.pointwise(arith.AddfOp, s, mask), 0.5)
    make.finish(make.op(qc.BatchMatmulOp(softmax(make, s, 3), v, v.type)))
    make.run(RAISE, [*(sample(2, 2, 5, 8) for _ in range(3)), sample(2, 2, 5, 5)])
    assert "qc.attention" not in make.ops()


def rotated(make: Any, x: SSAValue, offset: int, negate_first: bool = True) -> SSAValue:
    shape = shape_of(x.type)
    low = build.extract_slice(make.builder, x, [0] * 4, (*shape[:3], offset))
    high = build.extract_slice(make.builder, x, [0, 0, 0, offset], (*shape[:3], 16 - offset))
    parts = [make.pointwise(arith.NegfOp, high), low] if negate_first else [high, make.pointwise(arith.NegfOp, low)]
    return build.concat(make.builder, parts, 3)


@pytest.mark.parametrize(("offset", "negate_first", "is_rope"), [(8, True, True), (8, False, False), (4, True, False)])
def test_rope_of_a_transposed_projection(make: Any, offset: int, negate_first: bool, is_rope: bool) -> None:
    rows = make.arg(("b", "s", 32))
    x = build.transpose(make.builder, build.reshape(make.builder, rows, ("b", "s", 2, 16)), (0, 2, 1, 3))
    cos, sin = (build.reshape(make.builder, make.arg((1, "s", 16)), (1, 1, "s", 16)) for _ in range(2))
    turned = make.pointwise(arith.MulfOp, rotated(make, x, offset, negate_first), sin)
    make.finish(make.pointwise(arith.AddfOp, make.pointwise(arith.MulfOp, x, cos), turned))
    inputs = [sample(2, 5, 32), sample(1, 5, 16), sample(1, 5, 16) + 1]
    make.run(RAISE, inputs)
    assert ("qc.rope" in make.ops()) == is_rope
    make.run(["fuse-elementwise"], inputs)
    assert make.ops().count("linalg.generic") == (1 if is_rope else 2)


@pytest.mark.parametrize("pairs", ["as a dim", "by steps"])
@pytest.mark.parametrize("wrong", [False, True])
def test_rope_of_pairs_in_rows(make: Any, pairs: str, wrong: bool) -> None:
    x = build.reshape(make.builder, make.arg(("b", "s", 32)), ("b", "s", 2, 16))
    cos, sin = (build.reshape(make.builder, make.arg(("s", 16)), (1, "s", 1, 16)) for _ in range(2))
    if pairs == "as a dim":
        split = build.reshape(make.builder, x, ("b", "s", 2, 8, 2))
        even, odd = (build.extract_slice(make.builder, split, [0, 0, 0, 0, n], ("b", "s", 2, 8, 1)) for n in (0, 1))
    else:
        even, odd = (build.extract_slice(make.builder, x, [0, 0, 0, n], ("b", "s", 2, 8), [1, 1, 1, 2]) for n in (0, 1))
        even, odd = (build.reshape(make.builder, part, ("b", "s", 2, 8, 1)) for part in (even, odd))
    first, second = (even, odd) if wrong else (odd, even)
    stacked = build.concat(make.builder, [make.pointwise(arith.NegfOp, first), second], 4)
    turned = build.reshape(make.builder, stacked, ("b", "s", 2, 16))
    straight = make.pointwise(arith.MulfOp, x, cos)
    make.finish(make.pointwise(arith.AddfOp, straight, make.pointwise(arith.MulfOp, turned, sin)))
    make.run(RAISE, [sample(2, 5, 32), sample(5, 16), sample(5, 16) + 1])
    assert ("qc.rope" in make.ops()) != wrong


def test_rope_of_a_part_of_each_head(make: Any) -> None:
    whole = make.arg(("b", 2, "s", 24))
    x = build.extract_slice(make.builder, whole, [0, 0, 0, 4], ("b", 2, "s", 16))
    cos, sin = (build.reshape(make.builder, make.arg((1, "s", 16)), (1, 1, "s", 16)) for _ in range(2))
    turned = make.pointwise(arith.MulfOp, rotated(make, x, 8), sin)
    make.finish(make.pointwise(arith.AddfOp, make.pointwise(arith.MulfOp, x, cos), turned))
    make.run(RAISE, [sample(2, 2, 5, 24), sample(1, 5, 16), sample(1, 5, 16) + 1])
    assert "qc.rope" in make.ops() and "tensor.concat" not in make.ops()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rope_as_a_loop_nest_is_rope(make: Any, interleaved: bool, dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    x, cos, sin = make.arg(("b", 2, "s", 8), dtype), make.arg((1, 1, "s", 8), dtype), make.arg((1, 1, "s", 8), dtype)
    make.finish(make.op(qc.RopeOp(x, cos, sin, x.type, interleaved=interleaved)))
    make.run(
        ["fuse-elementwise"], [sample(2, 2, 5, 8, dtype=kind), *(sample(1, 1, 5, 8, dtype=kind) for _ in range(2))]
    )
    assert "qc.rope" not in make.ops()
