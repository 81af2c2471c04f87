"""Masks: dropped or made a flag where that is proven, kept everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.module import init_func, main_func, set_ranges
from qcompiler.ir.types import ELEMENT_TYPES
from qcompiler.passes.masks.masks import Band, judge

Q = (2, 2, "s", 4)


def inputs(length: int = 5) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(1).standard_normal((2, 2, length, 4)).astype(np.float32)]


def grid(make: Any, body: Callable[[Builder, SSAValue, SSAValue], Operation], dtype: str = "i1") -> SSAValue:
    """A (1, 1, s, s) tensor from query index i and key index j."""

    def whole(inner: Builder, _: Sequence[SSAValue]) -> Operation:
        i, j = (
            inner.insert(arith.IndexCastOp(inner.insert(IndexOp(n)).result, ELEMENT_TYPES["i64"])).result
            for n in (2, 3)
        )
        return body(inner, i, j)

    return build.pointwise(make.builder, [], (1, 1, "s", "s"), dtype, whole)


def compare(predicate: str) -> Callable[[Builder, SSAValue, SSAValue], Operation]:
    return lambda inner, i, j: inner.insert(arith.CmpiOp(j, i, predicate))


def attention(make: Any, mask: SSAValue | None) -> None:
    x = make.arg(Q)
    make.finish(make.op(qc.AttentionOp(x, x, x, mask, x.type, scale=0.5)))


def found(make: Any) -> qc.AttentionOp:
    (op,) = (op for op in make.module.walk() if isinstance(op, qc.AttentionOp))
    return op


def test_causal_mask_becomes_the_flag(make: Any) -> None:
    attention(make, grid(make, compare("sle")))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is not None and found(make).mask is None


@pytest.mark.parametrize("predicate", ["slt", "ne", "sgt"])
def test_other_comparisons_are_not_causal(make: Any, predicate: str) -> None:
    attention(make, grid(make, compare(predicate)))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is None and found(make).keys_back is None and found(make).mask is not None


def test_a_window_that_shows_keys_to_come_is_not_causal(make: Any) -> None:
    attention(make, grid(make, compare("sge")))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is None and found(make).keys_back == 1 and found(make).mask is None


def test_sliding_window_becomes_the_flags(make: Any) -> None:
    def window(inner: Builder, i: SSAValue, j: SSAValue) -> Operation:
        far = inner.insert(arith.SubiOp(i, build.scalar(inner, 8, "i64"))).result
        near = inner.insert(arith.CmpiOp(j, far, "sgt")).result
        return inner.insert(arith.AndIOp(near, inner.insert(arith.CmpiOp(j, i, "sle")).result))

    attention(make, grid(make, window))  # equal to causal for s <= 8; the range goes to 32
    make.run(["raise-idioms"], inputs(11))
    assert found(make).causal is not None and found(make).keys_back == 8 and found(make).mask is None


@pytest.mark.parametrize(("longest", "kept"), [(8, False), (9, True)])
def test_a_window_that_no_query_outgrows_is_dropped(make: Any, longest: int, kept: bool) -> None:
    x = make.arg(Q)
    make.finish(make.op(qc.AttentionOp(x, x, x, None, x.type, scale=0.5, window=8)))
    set_ranges(main_func(make.module), {"s": (1, longest)})
    make.run(["hoist-constant-masks"], inputs(longest))
    assert (found(make).keys_back == 8) == kept


@pytest.mark.parametrize("window", [3, 40])
def test_stored_band_read_through_a_slice_is_a_window(make: Any, window: int) -> None:
    band = np.tril(np.ones((64, 64), bool)) & ~np.tril(np.ones((64, 64), bool), -window)
    table = make.const(values=band[None, None])
    attention(make, build.extract_slice(make.builder, table, [0] * 4, (1, 1, "s", "s")))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is not None and found(make).mask is None
    assert found(make).keys_back == (window if window < 32 else None), "up to 32 queries, a window of 40 shows all"


def test_a_stripe_with_a_hole_stays_a_mask(make: Any) -> None:
    band = np.tril(np.ones((64, 64), bool))
    band[20, 3] = False
    table = make.const(values=band[None, None])
    attention(make, build.extract_slice(make.builder, table, [0] * 4, (1, 1, "s", "s")))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is None and found(make).mask is not None


@pytest.mark.parametrize(("dropped", "causal"), [(-3.4e38, True), (float("-inf"), True), (-4.0, False)])
def test_float_mask_is_causal_only_if_it_drops_for_good(make: Any, dropped: float, causal: bool) -> None:
    def body(inner: Builder, i: SSAValue, j: SSAValue) -> Operation:
        keep = inner.insert(arith.CmpiOp(j, i, "sle")).result
        return inner.insert(arith.SelectOp(keep, build.scalar(inner, 0.0, "f32"), build.scalar(inner, dropped, "f32")))

    attention(make, grid(make, body, "f32"))
    make.run(["raise-idioms"], inputs())
    assert (found(make).causal is not None) == causal


def test_stored_triangle_read_through_a_slice_is_causal(make: Any) -> None:
    table = make.const(values=np.tril(np.ones((1, 1, 64, 64), bool)))
    attention(make, build.extract_slice(make.builder, table, [0] * 4, (1, 1, "s", "s")))
    make.run(["raise-idioms"], inputs())
    assert found(make).causal is not None and found(make).mask is None


def test_all_true_mask_is_dropped(make: Any) -> None:
    attention(make, build.broadcast_to(make.builder, make.const(values=np.ones((1, 1), bool)), (2, 1, "s", "s")))
    make.run(["fold-views", "raise-idioms"], inputs())
    assert found(make).causal is None and found(make).mask is None


def test_padding_beside_a_causal_mask_stays_as_the_mask(make: Any) -> None:
    x, padding = make.arg(Q), make.arg((2, 1, 1, "s"), "i1")
    mask = make.pointwise(arith.AndIOp, padding, grid(make, compare("sle")))
    make.finish(make.op(qc.AttentionOp(x, x, x, mask, x.type, scale=0.5)))
    kept = np.array([[1, 1, 1, 0, 1], [1, 0, 0, 0, 1]], bool).reshape(2, 1, 1, 5)
    make.run(["fold-views", "raise-idioms"], [*inputs(), kept])
    assert found(make).causal is not None and found(make).mask is padding


def test_mask_from_an_input_is_kept(make: Any) -> None:
    x, mask = make.arg(Q), make.arg((1, 1, "s", "s"), "i1")
    make.finish(make.op(qc.AttentionOp(x, x, x, mask, x.type, scale=0.5)))
    make.run(["raise-idioms", "hoist-constant-masks"], [*inputs(), np.tril(np.ones((1, 1, 5, 5), bool))])
    assert found(make).mask is mask and found(make).causal is None


def test_one_token_entry_point_needs_no_causal_flag(make: Any) -> None:
    attention(make, grid(make, compare("sle")))
    make.buckets = [("one", {"s": (1, 1)}), ("many", {"s": (2, 32)})]
    make.run(["raise-idioms", "specialize", "hoist-constant-masks"], inputs())
    flags = [op.causal is not None for op in make.module.walk() if isinstance(op, qc.AttentionOp)]
    assert flags == [False, True]


def test_a_mask_that_one_token_cannot_feel_is_removed(make: Any) -> None:
    attention(make, grid(make, compare("sge")))  # keeps j >= i: everything for one token
    make.buckets = [("one", {"s": (1, 1)})]
    make.run(["specialize", "hoist-constant-masks"], inputs(1))
    assert found(make).mask is None


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_judge_tells_a_triangle_with_one_wrong_bit(dtype: Any) -> None:
    lower = np.tril(np.ones((1, 1, 7, 7), bool))
    for flip in (None, (0, 0, 3, 5), (0, 0, 5, 3)):
        mask = lower.copy()
        if flip is not None:
            mask[flip] ^= True
        given = mask if dtype == np.bool_ else np.where(mask, 0, -np.inf).astype(np.float32)
        assert judge(given, False, False) == (Band(causal=True) if flip is None else None)


def test_causal_mask_too_large_to_compute_is_proven_from_its_expression(make: Any) -> None:
    attention(make, grid(make, compare("sle")))
    set_ranges(main_func(make.module), {"s": (1, 1 << 20)})
    make.run(["raise-idioms"])
    assert found(make).causal is not None


def test_table_too_large_for_memory_stays_in_the_call(make: Any) -> None:
    attention(make, grid(make, compare("slt")))
    set_ranges(main_func(make.module), {"s": (1, 1 << 20)})
    make.run(["raise-idioms", "hoist-constant-masks"])
    assert init_func(make.module) is None
    assert any("MiB" in d.why for d in make.ctx.report.of("hoist-constant-masks"))


# --- limits that are data --------------------------------------------------------------------------------------------


def over_cache(make: Any, body: Callable[[Builder, SSAValue, SSAValue, SSAValue], Operation]) -> None:
    """Attention of s queries over 12 keys, under a mask made from the key's number, the query's and its position."""
    x, cache = make.arg(Q), make.arg((2, 2, 12, 4))
    position = make.arg(("s",), "i64")
    rows = build.reshape(make.builder, position, (1, 1, "s", 1))

    def whole(inner: Builder, s: Sequence[SSAValue]) -> Operation:
        i, j = (
            inner.insert(arith.IndexCastOp(inner.insert(IndexOp(n)).result, ELEMENT_TYPES["i64"])).result
            for n in (2, 3)
        )
        return body(inner, i, j, s[0])

    mask = build.pointwise(make.builder, [rows], (1, 1, "s", 12), "i1", whole)
    make.finish(make.op(qc.AttentionOp(x, cache, cache, mask, x.type, scale=0.5)))


def cache_inputs() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    q, kv = rng.standard_normal((2, 2, 5, 4)), rng.standard_normal((2, 2, 12, 4))
    return [q.astype(np.float32), kv.astype(np.float32), np.arange(4, 9)]


def test_positions_as_limit_become_last(make: Any) -> None:
    over_cache(make, lambda inner, i, j, at: inner.insert(arith.CmpiOp(j, at, "sle")))
    make.run(["raise-idioms"], cache_inputs())
    assert found(make).last is not None and found(make).mask is None and found(make).keys_back is None


def test_lengths_as_limit_become_last_minus_one(make: Any) -> None:
    over_cache(make, lambda inner, i, j, at: inner.insert(arith.CmpiOp(at, j, "sgt")))
    make.run(["raise-idioms"], cache_inputs())  # compares the values before and after
    assert found(make).last is not None and found(make).mask is None


def test_window_before_a_position_becomes_last_and_window(make: Any) -> None:
    def body(inner: Builder, i: SSAValue, j: SSAValue, at: SSAValue) -> Operation:
        far = inner.insert(arith.SubiOp(at, build.scalar(inner, 3, "i64"))).result
        near = inner.insert(arith.CmpiOp(j, far, "sgt")).result
        return inner.insert(arith.AndIOp(inner.insert(arith.CmpiOp(j, at, "sle")).result, near))

    over_cache(make, body)
    make.run(["raise-idioms"], cache_inputs())
    assert found(make).last is not None and found(make).mask is None and found(make).keys_back == 3


@pytest.mark.parametrize("predicate", ["eq", "ne", "sge"])
def test_other_comparisons_with_data_stay_masks(make: Any, predicate: str) -> None:
    over_cache(make, lambda inner, i, j, at: inner.insert(arith.CmpiOp(j, at, predicate)))
    make.run(["raise-idioms"], cache_inputs())
    assert found(make).last is None and found(make).mask is not None


def test_limit_that_depends_on_the_key_stays_a_mask(make: Any) -> None:
    def body(inner: Builder, i: SSAValue, j: SSAValue, at: SSAValue) -> Operation:
        return inner.insert(arith.CmpiOp(j, inner.insert(arith.SubiOp(at, j)).result, "sle"))

    over_cache(make, body)
    make.run(["raise-idioms"], cache_inputs())
    assert found(make).last is None and found(make).mask is not None
