"""Entry points: which there are, what is static in them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects import arith

from qcompiler.errors import PassError
from qcompiler.ir import build, qc
from qcompiler.ir.module import entry_funcs, ranges_of
from qcompiler.ir.types import shape_of, tensor


def names(make: Any) -> list[str]:
    return [f.sym_name.data for f in entry_funcs(make.module)]


def doubled(make: Any) -> None:
    x = make.arg(("b", "s", 8))
    flat = build.reshape(make.builder, x, ("b*s", 8))
    part = build.extract_slice(
        make.builder, build.reshape(make.builder, flat, ("b", "s", 2, 4)), [0] * 4, ("b", "s", 1, 4)
    )
    make.finish(make.scaled(part, 2.0))


def cached(make: Any) -> None:
    x, at = make.arg(("s", 8)), make.arg(("s",), "i64")
    make.ranges = {"s": (1, 16)}
    cache = make.op(qc.StateOp("kv", tensor((16, 8), "f32")))
    new = make.op(qc.IndexUpdateOp(cache, at, x, cache.type, axis=0))
    make.builder.insert(qc.StateUpdateOp("kv", new))
    make.finish(
        make.pointwise(
            arith.AddfOp, build.reduce(make.builder, new, [0], "add"), build.reduce(make.builder, x, [0], "add")
        )
    )


def test_without_state_there_is_one_entry_point(make: Any) -> None:
    doubled(make)
    make.run(["specialize"], [np.ones((2, 3, 8), np.float32)])
    assert names(make) == ["main"]


def test_a_cache_gets_a_one_token_entry_point(make: Any) -> None:
    cached(make)
    make.run(["specialize"], [np.ones((1, 8), np.float32), np.array([3])])
    assert names(make) == ["decode[s=1]", "prefill[s<=16]"]
    decode, prefill = entry_funcs(make.module)
    assert shape_of(decode.body.block.args[0].type) == (1, 8) and ranges_of(decode) == {}
    assert ranges_of(prefill) == {"s": (1, 16)}


def test_sizes_that_become_one_value_are_static_everywhere(make: Any) -> None:
    doubled(make)
    make.buckets = [("fixed", {"b": (2, 2), "s": (3, 3)}), ("wide", {"b": (2, 2)})]
    make.run(["specialize"], [np.ones((2, 3, 8), np.float32)])
    fixed, wide = entry_funcs(make.module)
    assert "#qc.dims" not in str(fixed) and "qc.dim" not in str(fixed)
    assert ranges_of(wide) == {"s": (1, 32)}
    assert shape_of(wide.body.block.args[0].type) == (2, "s", 8)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([("x", {"q": (1, 1)})], "bucket 'x' names 'q'; the dimensions are b, s"),
        ([("x", {"s": (1, 99)})], "asks s in 1..99, outside of the exported range 1..32"),
        ([("x", {"s": (3, 2)})], "asks s in 3..2"),
        ([("x", {}), ("x", {"s": (1, 1)})], "two buckets are named 'x'"),
        ([], "must be a sequence"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(make: Any, buckets: Any, message: str) -> None:
    doubled(make)
    make.buckets = buckets
    with pytest.raises(PassError, match=message):
        make.run(["specialize"])
