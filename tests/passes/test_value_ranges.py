"""Bounds of integers: what is computed at any sizes lies within what was found for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build
from qcompiler.ir.interpreter import run
from qcompiler.ir.module import find_func, ranges_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.passes.masks.value_ranges import Interval, ValueRanges

Found = Interval | None
BINARY = {
    "add": arith.AddiOp, "sub": arith.SubiOp, "mul": arith.MuliOp, "max": arith.MaxSIOp, "min": arith.MinSIOp,
}  # fmt: skip
PICKS = (*BINARY, "compare", "select", "logic", "number", "widen", "reduce", "reduce")
PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult")
DTYPES = ("i64", "i32", "i16", "i8")


def iota(make: Any, axis: int, dtype: str) -> SSAValue:
    def body(inner: Builder, _: Sequence[SSAValue]) -> Operation:
        return inner.insert(arith.IndexCastOp(inner.insert(IndexOp(axis)).result, ELEMENT_TYPES[dtype]))

    return build.pointwise(make.builder, [], ("b", "s"), dtype, body)


def pair(make: Any, kind: Any, a: SSAValue, b: SSAValue, dtype: str | None = None) -> SSAValue:
    dtype = dtype or tensor_dtype(a.type)
    return build.pointwise(
        make.builder, [a, b], shape_of(a.type), dtype, lambda inner, v: inner.insert(kind(v[0], v[1]))
    )


def constant(make: Any, number: int, dtype: str) -> SSAValue:
    return build.fill(make.builder, build.scalar(make.builder, number, dtype), ("b", "s"), dtype)


def compared(predicate: str) -> Any:
    return lambda a, b: arith.CmpiOp(a, b, predicate)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # a class
@given(st.data())
def test_every_value_lies_in_its_interval(maker: type[Any], data: st.DataObject) -> None:
    """Random trees over iotas, an input and numbers; narrow types make sums and products wrap."""
    make = maker(ranges={"b": (1, 3), "s": (2, 6)})
    dtype = data.draw(st.sampled_from(DTYPES))
    given_ = make.arg(("b", "s"), dtype)
    edges = [-(2 ** (int(dtype[1:]) - 1)), 2 ** (int(dtype[1:]) - 1) - 1]
    number = st.one_of(st.integers(-9, 9), st.sampled_from(edges))
    pool = [iota(make, 0, dtype), iota(make, 1, dtype), constant(make, data.draw(number), dtype), given_]
    booleans = [pair(make, compared("slt"), pool[0], pool[2], "i1")]
    for _ in range(data.draw(st.integers(1, 6))):
        pick = data.draw(
            st.sampled_from((*BINARY, "compare", "select", "logic", "number", "widen", "reduce", "reduce"))
        )
        a, b = (data.draw(st.sampled_from(pool)) for _ in range(2))
        c, d = (data.draw(st.sampled_from(booleans)) for _ in range(2))
        if pick in BINARY:
            pool.append(pair(make, BINARY[pick], a, b))
        elif pick == "compare":
            booleans.append(pair(make, compared(data.draw(st.sampled_from(PREDICATES))), a, b, "i1"))
        elif pick == "logic":
            kind = data.draw(
                st.sampled_from((arith.AndIOp, arith.OrIOp, arith.XOrIOp, compared("eq"), compared("slt")))
            )
            booleans.append(pair(make, kind, c, d, "i1"))
        elif pick == "number":
            pool.append(constant(make, data.draw(number), dtype))
        elif pick == "widen":
            kind = data.draw(st.sampled_from((arith.ExtSIOp, arith.ExtUIOp)))

            def widened(inner: Builder, v: Sequence[SSAValue], kind: Any = kind) -> Operation:
                return inner.insert(kind(v[0], ELEMENT_TYPES[dtype]))

            pool.append(build.pointwise(make.builder, [c], ("b", "s"), dtype, widened))
        elif pick == "reduce":
            axes, kind = data.draw(st.sampled_from(([1], [0, 1]))), data.draw(st.sampled_from(("max", "min", "add")))
            total = build.reduce(make.builder, a, axes, kind)
            pool.append(build.broadcast_in(make.builder, total, ("b", "s"), [0] if len(axes) == 1 else []))
        else:

            def selected(inner: Builder, v: Sequence[SSAValue]) -> Operation:
                return inner.insert(arith.SelectOp(v[0], v[1], v[2]))

            pool.append(build.pointwise(make.builder, [c, a, b], ("b", "s"), dtype, selected))
    results = [*pool, *booleans]
    make.finish(*results)
    function = find_func(make.module, "main")
    assert function is not None
    ranges = ValueRanges(ranges_of(function))
    found = [ranges.tensor(value) for value in results]
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    for shape in ((1, 2), (3, 6), (2, 4)):
        x = rng.integers(edges[0], edges[1], shape, dtype=np.int64).astype(f"int{dtype[1:]}")
        for bounds, values in zip(found, run(make.module, make.ctx.weights, [x]), strict=True):
            assert bounds is not None
            low, high = int(values.min()), int(values.max())
            assert bounds.low <= low and high <= bounds.high


@pytest.mark.parametrize(
    ("offset", "predicate", "known"),
    [(1, "slt", Interval(0, 1)), (0, "slt", Interval(0, 0)), (6, "slt", Interval(1, 1)), (1, "sge", Interval(0, 1)),
     (0, "sge", Interval(1, 1)), (-1, "sle", Interval(0, 0)), (5, "sle", Interval(1, 1)), (4, "sle", Interval(0, 1)),
     (6, "ne", Interval(1, 1)), (6, "eq", Interval(0, 0)), (5, "eq", Interval(0, 1)), (2**40, "sgt", Interval(0, 0))],
)  # fmt: skip
def test_a_comparison_with_a_position_is_decided_at_its_edges(
    make: Any, offset: int, predicate: str, known: Found
) -> None:
    make.ranges = {"b": (1, 3), "s": (2, 6)}
    answer = pair(make, compared(predicate), iota(make, 1, "i64"), constant(make, offset, "i64"), "i1")
    make.finish(answer)
    function = find_func(make.module, "main")
    assert function is not None
    assert ValueRanges(ranges_of(function)).tensor(answer) == known


@pytest.mark.parametrize(("kind", "known"), [("max", Interval(1, 5)), ("min", Interval(0, 0)), ("add", None)])
def test_the_extremes_of_positions_are_the_first_and_the_last_one(make: Any, kind: Any, known: Found) -> None:
    make.ranges = {"b": (1, 3), "s": (2, 6)}
    total = build.reduce(make.builder, iota(make, 1, "i64"), [0, 1], kind)
    make.finish(total)
    function = find_func(make.module, "main")
    assert function is not None
    found = ValueRanges(ranges_of(function)).tensor(total)
    assert found == (known or Interval(-(2**63), 2**63 - 1))
