"""Attention whose batch, windows and heads are joined and parted between the matmul, the masks and the softmax.

A case is a chain of shapes: the scores' leading dims as the matmul has them, as each term is added, and as the softmax
has them.  Letters: b batch, w windows of an image, h heads; "bw.h" is (b*w, h).  The numbers are checked against the
interpreter, which runs the module as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of, tensor
from qcompiler.plan.dims import dim, product

RAISE = ["fold-views", "raise-idioms"]
QUERIES, KEYS, DEPTH = 5, 6, 8

CHAINS = {
    "a mask for each image": ("bh", [("b.h", "b")], "bh"),
    "a mask that all images share": ("bh", [("b.h", "")], "bh"),
    "a mask for each image and head": ("bh", [("bh", "bh")], "bh"),
    "a bias on joined heads, then a mask": ("bh", [("bh", "bh"), ("b.h", "b")], "bh"),
    "a bias for each head, then a mask for each window": ("bw.h", [("bw.h", "h"), ("b.w.h", "w")], "bw.h"),
    "a mask for each window": ("bw.h", [("b.w.h", "w")], "bw.h"),
    "a mask for each window of each image": ("bw.h", [("b.w.h", "b.w")], "bw.h"),
    "windows that stay parted": ("bw.h", [("b.w.h", "w")], "b.w.h"),
    "heads joined as well": ("bwh", [("bw.h", "h"), ("b.w.h", "w")], "bwh"),
    "heads and windows joined": ("b.wh", [("b.w.h", "h"), ("b.w.h", "b")], "b.wh"),
    "a keep mask for each image": ("bh", [("b.h", "b?")], "bh"),
    "a bias for each head, then a keep mask for each window": ("bw.h", [("bw.h", "h"), ("b.w.h", "w?")], "bw.h"),
}
CASES = [
    (chain, batch, windows, heads)
    for chain, (first, _, _) in CHAINS.items()
    for batch, windows, heads in itertools.product((1, 2, 3, "b"), (1, 4) if "w" in first else (1,), (1, 2, 3))
]


class Chain:
    """Builds the module of one case; `sizes` of the letters, with a number of images for a symbolic batch."""

    def __init__(self, make: Any, batch: int | str, windows: int, heads: int) -> None:
        self.make, self.inputs = make, list[np.ndarray[Any, Any]]()
        self.sizes: dict[str, int | str] = {"b": batch, "w": windows, "h": heads}
        self.rng = np.random.default_rng(4)

    def dims(self, spelt: str) -> tuple[int | str, ...]:
        return tuple(product(self.sizes[letter] for letter in part).to_dim() for part in spelt.split("."))

    def argument(self, shape: Sequence[int | str], dtype: str = "f32") -> SSAValue:
        sizes = [dim(size).evaluate({"b": 3}) for size in shape]
        values = self.rng.standard_normal(sizes)
        self.inputs.append(values > -1 if dtype == "i1" else values.astype(np.float32))
        result: SSAValue = self.make.arg(tuple(shape), dtype)
        return result

    def term(self, scores: SSAValue, lead: str, kept: str) -> SSAValue:
        """The scores seen with other leading dims, and a mask added that varies along the letters `kept`."""
        builder = self.make.builder
        scores = build.reshape(builder, scores, (*self.dims(lead), QUERIES, KEYS))
        varies = kept.rstrip("?").split(".")
        dims = zip(lead.split("."), self.dims(lead), strict=True)
        shape = (*(size if part in varies else 1 for part, size in dims), QUERIES, KEYS)
        if not kept.endswith("?"):
            return self.make.pointwise(arith.AddfOp, scores, self.argument(shape))  # type: ignore[no-any-return]

        def body(inner: Builder, a: Any) -> Operation:
            return inner.insert(arith.SelectOp(a[0], a[1], build.scalar(inner, -3e38, "f32")))

        return build.pointwise(builder, [self.argument(shape, "i1"), scores], shape_of(scores.type), "f32", body)

    def build(self, first: str, terms: Sequence[tuple[str, str]], last: str) -> None:
        make, lead = self.make, self.dims(first)
        q, k, v = (self.argument((*lead, rows, DEPTH)) for rows in (QUERIES, KEYS, KEYS))
        rank = len(lead)
        turned = build.transpose(make.builder, k, (*range(rank), rank + 1, rank))
        scores = make.op(qc.BatchMatmulOp(q, turned, tensor((*lead, QUERIES, KEYS), "f32")))
        for each in terms:
            scores = self.term(make.scaled(scores, 0.5) if each is terms[0] else scores, *each)
        scores = build.reshape(make.builder, scores, (*self.dims(last), QUERIES, KEYS))
        weights = make.op(qc.SoftmaxOp(scores, scores.type, axis=len(shape_of(scores.type)) - 1))
        weights = build.reshape(make.builder, weights, (*lead, QUERIES, KEYS))
        make.finish(make.op(qc.BatchMatmulOp(weights, v, tensor((*lead, QUERIES, DEPTH), "f32"))))


SHORT = {(1, 1), (2, 3), ("b", 2)}
"""Images and heads in the short run: one of each, several, and a number that is not known."""


@pytest.mark.parametrize(
    ("chain", "batch", "windows", "heads"),
    [pytest.param(*case, marks=[] if (case[1], case[3]) in SHORT else [pytest.mark.slow]) for case in CASES],
)
def test_attention_is_raised_however_heads_are_joined(
    make: Any, chain: str, batch: int | str, windows: int, heads: int
) -> None:
    case = Chain(make, batch, windows, heads)
    case.build(*CHAINS[chain])
    make.run(RAISE, case.inputs)
    (attention,) = (op for op in make.module.walk() if isinstance(op, qc.AttentionOp))
    assert "qc.softmax" not in make.ops() and "qc.batch_matmul" not in make.ops()
    assert attention.scale.value.data == 0.5


@pytest.mark.parametrize("batch", [2, "b"])
def test_the_mask_of_windows_is_not_repeated_for_each_image(make: Any, batch: int | str) -> None:
    case = Chain(make, batch, 4, 2)
    case.build(*CHAINS["a bias for each head, then a mask for each window"])
    make.run(RAISE, case.inputs)
    (attention,) = (op for op in make.module.walk() if isinstance(op, qc.AttentionOp))
    assert shape_of(attention.mask.type) == (1, 4 * 2, QUERIES, KEYS)


@pytest.mark.parametrize("heads", [2, 3])
def test_joined_heads_are_read_where_they_lie(make: Any, heads: int) -> None:
    """The batch dims of q say where the heads are, though the scores have joined ones only: nothing is copied."""
    case = Chain(make, "b", 1, heads)
    q, k, v = (case.argument(("b", 6, heads, DEPTH)) for _ in range(3))
    lead = case.dims("bh")
    rows = [
        build.reshape(make.builder, build.transpose(make.builder, x, (0, 2, 1, 3)), (*lead, 6, 8)) for x in (q, k, v)
    ]
    turned = build.transpose(make.builder, rows[1], (0, 2, 1))
    scores = make.op(qc.BatchMatmulOp(rows[0], turned, tensor((*lead, 6, 6), "f32")))
    out = make.op(
        qc.BatchMatmulOp(make.op(qc.SoftmaxOp(scores, scores.type, axis=2)), rows[2], tensor((*lead, 6, 8), "f32"))
    )
    make.finish(build.reshape(make.builder, out, ("b", heads, 6, 8)))
    make.run(RAISE, case.inputs)
    assert make.ops() == ["linalg.transpose"] * 3 + ["qc.attention"]


def test_shapes_without_common_factors_stay_and_the_report_says_so(make: Any) -> None:
    """(4, 3) seen as (6, 2): neither is a grouping of the other's dims."""
    q, bias = make.arg((4, 3, 5, DEPTH)), make.arg((6, 1, 5, 5))
    turned = build.transpose(make.builder, q, (0, 1, 3, 2))
    scores = make.op(qc.BatchMatmulOp(q, turned, tensor((4, 3, 5, 5), "f32")))
    scores = make.pointwise(arith.AddfOp, build.reshape(make.builder, scores, (6, 2, 5, 5)), bias)
    scores = build.reshape(make.builder, scores, (4, 3, 5, 5))
    weights = make.op(qc.SoftmaxOp(scores, scores.type, axis=3))
    make.finish(make.op(qc.BatchMatmulOp(weights, q, q.type)))
    rng = np.random.default_rng(4)
    make.run(RAISE, [rng.standard_normal(shape_of(x.type)).astype(np.float32) for x in (q, bias)])
    assert "qc.attention" not in make.ops() and make.ops().count("qc.batch_matmul") == 2
    (line,) = (each for each in make.ctx.report.of("raise-idioms") if "stays" in each.what)
    assert "(6, 2, 5, 5)" in line.why and "(4, 3, 5, 5)" in line.why
