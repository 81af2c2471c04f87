"""What depends on no input is computed at load, and only where that is right at every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.module import init_func, result_keys
from qcompiler.ir.types import ELEMENT_TYPES, QTensorType, shape_of, tensor
from qcompiler.plan.kernel import FormatRef

MIDDLE = ["fold-views", "raise-idioms", "specialize", "hoist-constant-masks", "fuse-epilogues", "fuse-elementwise"]


def positions(make: Any, length: build.Dim) -> SSAValue:
    def body(inner: Builder, _: Sequence[SSAValue]) -> Operation:
        index = inner.insert(IndexOp(0)).result
        return inner.insert(arith.IndexCastOp(index, ELEMENT_TYPES["i64"]))

    return build.pointwise(make.builder, [], (length,), "i64", body)


def as_float(make: Any, value: SSAValue) -> SSAValue:
    def body(inner: Builder, a: Sequence[SSAValue]) -> Operation:
        return inner.insert(arith.SIToFPOp(a[0], ELEMENT_TYPES["f32"]))

    return build.pointwise(make.builder, [value], shape_of(value.type), "f32", body)


def sample(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("length", [1, 7, 32])
def test_rope_tables_are_computed_at_load(make: Any, per_call: Any, length: int) -> None:
    x = make.arg(("b", 2, "s", 8))
    angle = make.pointwise(
        arith.MulfOp, build.reshape(make.builder, as_float(make, positions(make, "s")), ("s", 1)), make.const(4)
    )
    table = build.concat(make.builder, [angle, angle], 1)
    cos, sin = (build.reshape(make.builder, make.pointwise(f, table), (1, 1, "s", 8)) for f in (math.CosOp, math.SinOp))
    make.finish(make.op(qc.RopeOp(x, cos, sin, x.type)))
    make.run(MIDDLE, [sample(3, 2, length, 8)])
    assert per_call(make.module) == []
    init = init_func(make.module)
    assert init is not None and len(result_keys(init)) == 2


def test_position_embedding_is_a_table_without_the_batch(make: Any, per_call: Any) -> None:
    x = make.arg(("b", "s", 8))
    ids = build.broadcast_to(make.builder, positions(make, "s"), ("b", "s"))
    rows = make.op(qc.EmbeddingOp(ids, make.const(64, 8), tensor(("b", "s", 8), "f32")))
    make.finish(make.pointwise(arith.AddfOp, x, rows))
    make.run(MIDDLE, [sample(3, 5, 8)])
    assert per_call(make.module) == []
    assert make.ops("init")[-1] == "qc.embedding"
    table = init_func(make.module).function_type.outputs.data[0]  # type: ignore[union-attr]
    assert shape_of(table) == (1, 32, 8), "one row per position, not per batch"


def test_value_that_depends_on_the_extent_is_computed_in_the_call_and_reported(make: Any) -> None:
    x = make.arg(("s", 8))
    total = build.reduce(make.builder, make.pointwise(math.SinOp, as_float(make, positions(make, "s"))), [0], "add")
    make.finish(make.pointwise(arith.MulfOp, x, total))
    make.run(MIDDLE, [sample(5, 8)])
    assert init_func(make.module) is None
    assert any("stays in every call" in d.what for d in make.ctx.report.of("hoist-constant-masks"))


def test_slice_from_the_end_is_not_taken_from_a_table_at_the_maximum(make: Any) -> None:
    x = make.arg((2, 8))
    waves = make.pointwise(math.SinOp, as_float(make, positions(make, "s")))
    end = build.extract_slice(make.builder, waves, [build.dim("s - 2").to_dim()], [2])
    y = make.arg(("s",))
    make.finish(make.pointwise(arith.MulfOp, x, build.reshape(make.builder, end, (2, 1))), y)
    make.ranges = {"s": (2, 32)}
    make.run(MIDDLE, [sample(2, 8), sample(7)])


def longest(make: Any, length: build.Dim) -> SSAValue:
    """How many positions there are, as a program counts them: the largest one, and one more."""
    top = build.reduce(make.builder, positions(make, length), [0], "max")

    def body(inner: Builder, a: Sequence[SSAValue]) -> Operation:
        return inner.insert(arith.AddiOp(a[0], build.scalar(inner, 1, "i64")))

    return build.pointwise(make.builder, [top], (), "i64", body)


def rope_of_two_tables(make: Any, limit: int) -> None:
    """x * sin(position * (long if the length is beyond the limit else short))."""
    x = make.arg(("s", 8))

    def beyond(inner: Builder, a: Sequence[SSAValue]) -> Operation:
        return inner.insert(arith.CmpiOp(a[0], build.scalar(inner, limit, "i64"), "sgt"))

    is_long = build.pointwise(make.builder, [longest(make, "s")], (), "i1", beyond)

    def chosen(inner: Builder, a: Sequence[SSAValue]) -> Operation:
        return inner.insert(arith.SelectOp(a[0], a[1], a[2]))

    table = build.pointwise(make.builder, [is_long, make.const(8), make.const(8)], (8,), "f32", chosen)
    angle = make.pointwise(
        arith.MulfOp, build.reshape(make.builder, as_float(make, positions(make, "s")), ("s", 1)), table
    )
    make.finish(make.pointwise(arith.MulfOp, x, make.pointwise(math.SinOp, angle)))


@pytest.mark.parametrize(("limit", "kept"), [(32, "w1"), (40, "w1"), (0, "w0")])
def test_which_table_holds_is_decided_where_the_range_of_the_length_does(
    make: Any, per_call: Any, limit: int, kept: str
) -> None:
    rope_of_two_tables(make, limit)
    make.run(MIDDLE, [sample(7, 8)])
    assert per_call(make.module) == []
    read = {op.sym.root_reference.data for op in init_func(make.module).body.block.ops if isinstance(op, qc.ConstOp)}  # type: ignore[union-attr]
    assert read == {kept}, "the other table is not even read"
    assert any("a comparison of sizes is decided" in d.what for d in make.ctx.report.of("hoist-constant-masks"))


@pytest.mark.parametrize("length", [1, 8, 9, 32])
def test_a_choice_that_the_range_does_not_decide_stays(make: Any, per_call: Any, length: int) -> None:
    rope_of_two_tables(make, 8)
    make.run(MIDDLE, [sample(length, 8)])
    assert per_call(make.module) != []
    assert not any("a comparison of sizes is decided" in d.what for d in make.ctx.report.of("hoist-constant-masks"))


def test_buckets_on_both_sides_of_a_limit_decide_it_each_for_itself(make: Any, per_call: Any) -> None:
    rope_of_two_tables(make, 8)
    make.buckets = [("short", {"s": (1, 8)}), ("long", {"s": (9, 32)})]
    make.run(MIDDLE, [sample(9, 8)])
    assert per_call(make.module) == []
    init = init_func(make.module)
    assert init is not None and len(result_keys(init)) == 2, "a table for each"


def test_a_size_that_is_read_as_a_number_is_a_slice_of_a_table(make: Any, per_call: Any) -> None:
    """`arange(1, s + 1)[s - 1 :]`: no loop can count through a slice, so the numbers are made at load."""
    x = make.arg(("s",), "i64")

    def body(inner: Builder, a: Sequence[SSAValue]) -> Operation:
        index = inner.insert(arith.IndexCastOp(inner.insert(IndexOp(0)).result, ELEMENT_TYPES["i64"])).result
        return inner.insert(arith.AddiOp(index, build.scalar(inner, 1, "i64")))

    numbers = build.pointwise(make.builder, [], ("s",), "i64", body)
    last = build.extract_slice(make.builder, numbers, [build.dim("s - 1").to_dim()], [1])
    make.finish(make.pointwise(arith.MuliOp, x, last))
    make.run(MIDDLE, [np.arange(5)])
    assert per_call(make.module) == []
    assert [shape_of(t) for t in init_func(make.module).function_type.outputs.data] == [(32,)]  # type: ignore[union-attr]


def test_iota_that_a_loop_can_count_needs_no_table(make: Any, per_call: Any) -> None:
    x = make.arg(("s",), "i64")
    make.finish(make.pointwise(arith.AddiOp, x, positions(make, "s")))
    make.run(MIDDLE, [np.arange(5)])
    assert init_func(make.module) is None and per_call(make.module) == []
    assert make.ops() == ["linalg.generic"]


def test_decoded_weights_are_not_hoisted(make: Any) -> None:
    x = make.arg(("s", 64))
    packed = QTensorType.of((6, 64), "f32", FormatRef(name="int8"))
    weight = make.op(qc.DequantizeOp(make.op(qc.ConstOp("packed", packed)), tensor((6, 64), "f32")))
    make.finish(make.linear(x, make.scaled(weight, 2.0)))
    make.run(["hoist-constant-masks"])
    assert init_func(make.module) is None, "a table of decoded weights would undo the quantisation"


def test_a_table_made_from_another_table_reads_no_result_of_init(make: Any, per_call: Any) -> None:
    x = make.arg(("s", 8))
    waves = make.pointwise(math.SinOp, as_float(make, positions(make, "s")))
    make.finish(x, waves, make.pointwise(math.CosOp, waves))
    make.run(MIDDLE, [sample(5, 8)])
    assert per_call(make.module) == []
    assert "qc.const" not in [op.name for op in init_func(make.module).body.block.ops]  # type: ignore[union-attr]


def test_equal_tables_of_two_entry_points_are_made_once(make: Any) -> None:
    x = make.arg(("s", 8))
    make.finish(make.pointwise(arith.AddfOp, x, make.pointwise(math.ExpOp, make.const(8))))
    make.buckets = [("short", {"s": (1, 8)}), ("long", {"s": (9, 32)})]
    make.run(MIDDLE, [sample(5, 8)])
    init = init_func(make.module)
    assert init is not None and len(result_keys(init)) == 1
