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
    make.ctx.options["buckets"] = [("short", {"s": (1, 8)}), ("long", {"s": (9, 32)})]
    make.run(MIDDLE, [sample(5, 8)])
    init = init_func(make.module)
    assert init is not None and len(result_keys(init)) == 1
