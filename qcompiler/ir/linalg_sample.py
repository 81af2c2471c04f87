"""Lowers `qc.sample` to linalg: the words of `how` and the rule are those of plan/kinds/sample.py and sample_rule.py.

Sums are integers, so that the token is the same. The order of tokens is found by counting (linalg_orders.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue

from qcompiler.ir import build
from qcompiler.ir.linalg_base import LinalgLowering, Rule, dims, folded, points
from qcompiler.ir.linalg_orders import first_beyond, first_largest, part_of, ranks, row_sum
from qcompiler.ir.qc_index import SampleOp
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import shape_of
from qcompiler.plan.kinds import sample as rule

_LARGEST = float(np.finfo(np.float32).max)
_HALF = (1 << 32) - 1


@dataclass(frozen=True)
class _How:
    """The words of the sequence that a loop's first index names."""

    code: Code
    how: SSAValue

    def word(self, number: int) -> Scalar:
        return self.code.read(self.how, self.code.index(0), self.code.constant(number, "index"))

    def number(self, number: int) -> Scalar:
        """The lower half of a word as fp32."""
        return self.word(number).to("i32").bits("f32")

    def flag(self, bit: int) -> Scalar:
        return (self.word(rule.FLAGS) & bit).differs(0)


def _scores(b: Builder, op: SampleOp) -> SSAValue:
    """Logits after penalties and biases: f32 (batch, n)."""
    shape, rows = shape_of(op.tallies.type), build.dim_value(b, shape_of(op.x.type)[0])

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        how = _How(code, op.how)
        last = (code.scalar(rows) if isinstance(rows, SSAValue) else code.constant(rows, "index")) - 1
        row = how.word(rule.ROW).to("index").maximum(0).minimum(last)
        score = code.read(op.x, row, code.index(1)).to("f32")
        tally, bias, factor = s[0], s[1], how.number(rule.REPETITION)
        there = where(score > 0, score / factor, score * factor)
        told = where(tally.differs(0), there, score)
        made = where(tally >= float(rule.GIVEN), tally - float(rule.GIVEN), tally)
        amount = how.number(rule.PRESENCE) + how.number(rule.FREQUENCY) * made
        told = where(made.differs(0), told - amount, told)
        score = where(how.flag(rule.READS_TALLIES), told, score)
        added = where(bias.equals(float("-inf")), bias, score + bias)
        return where(how.flag(rule.READS_BIAS), added, score) + 0  # -0 becomes 0

    return points(b, [op.tallies, op.bias], shape, "f32", body)


def _weights(b: Builder, op: SampleOp, scores: SSAValue, best: SSAValue) -> SSAValue:
    """2^40 * 2^-((max - score) * scale), in fixed point: i64."""

    def body(code: Code, s: Sequence[Scalar]) -> Scalar:
        t = (s[1] - s[0]) * _How(code, op.how).number(rule.SCALE)
        lies = t < float(rule.WEIGHT_BITS + 1)
        q = (where(lies & (t > 0), t, 0) * float(1 << 24)).to("i64")
        x = ((q & ((1 << 24) - 1)) << 8) * rule.LN2 >> 32
        y = x.of(rule.TAYLOR[-1])
        for coefficient in rule.TAYLOR[-2::-1]:
            y = coefficient - (x * y >> 32)
        return where(lies, y << (rule.WEIGHT_BITS - 31) >> (q >> 24), 0)

    return points(b, [scores, best], shape_of(scores.type), "i64", body)


def _kept(b: Builder, op: SampleOp, scores: SSAValue, weights: SSAValue) -> SSAValue:
    """The weights of the tokens that may be drawn; 0 for all others."""
    shape, n = shape_of(scores.type), build.dim_value(b, shape_of(scores.type)[1])
    places = ranks(b, scores, 1, descending=True)

    def within_top_k(code: Code, s: Sequence[Scalar]) -> Scalar:
        count = _How(code, op.how).word(rule.TOP_K)
        size = (code.scalar(n) if isinstance(n, SSAValue) else code.constant(n, "index")).to("i64")
        cuts = (count > 0) & (count < size)
        return where(cuts & (s[1] >= count), s[0].of(0), s[0])

    weights = points(b, [weights, places], shape, "i64", within_top_k)

    def heavier(_: Code, s: Sequence[Scalar]) -> Scalar:
        return s[3] + where(s[1] < s[2], s[0], 0)

    before = folded(
        b, [(weights, dims(0, 2)), (places, dims(0, 2)), (places, dims(0, 1))], shape, "i64", heavier, start=0
    )

    def within_top_p(code: Code, s: Sequence[Scalar]) -> Scalar:
        how, (weight, earlier, total) = _How(code, op.how), s[:3]
        share = how.word(rule.TOP_P).maximum(0)
        cuts = share < (1 << rule.SHARE_BITS)
        wanted = part_of(total, share.minimum(1 << rule.SHARE_BITS), rule.SHARE_BITS).maximum(1)
        weight = where(cuts & (earlier >= wanted), weight.of(0), weight)
        least = how.word(rule.MIN_P).maximum(0).minimum(1 << rule.SHARE_BITS) << (rule.WEIGHT_BITS - rule.SHARE_BITS)
        return where(weight >= least, weight, 0)

    return points(b, [weights, before, row_sum(b, weights)], shape, "i64", within_top_p)


def _upper_product(draw: Scalar, total: Scalar) -> Scalar:
    """The upper 64 of the 128 bits of a product; the draw is unsigned, the total below 2^62."""
    high, low, top, rest = draw >> 32, draw & _HALF, total >> 32, total & _HALF
    crossed, other = high * rest, low * top
    carry = ((crossed & _HALF) + (other & _HALF) + (low * rest >> 32)) >> 32
    return high * top + (crossed >> 32) + (other >> 32) + carry


def _sample(op: SampleOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, batch = lowering.builder, shape_of(op.tallies.type)[0]
    scores = _scores(b, op)
    best = first_largest(b, scores, 1)
    peak = build.reduce(b, scores, [1], "max")
    weights = _weights(b, op, scores, build.reshape(b, peak, (batch, 1)))
    kept = _kept(b, op, scores, weights)
    total = row_sum(b, kept)
    beyond = points(
        b, [total], (batch, 1), "i64", lambda code, s: _upper_product(_How(code, op.how).word(rule.DRAW), s[0])
    )
    drawn = first_beyond(b, kept, beyond)
    rows = build.dim_value(b, shape_of(op.x.type)[0])

    def chosen(code: Code, s: Sequence[Scalar]) -> Scalar:
        how, (first, top, sum_, token) = _How(code, op.how), s[:4]
        token = where(sum_.equals(0) | how.number(rule.SCALE).equals(0.0), first, token)
        token = where(top.equals(float("-inf")), token.of(rule.NONE_ALLOWED), token)
        token = where(top <= _LARGEST, token, rule.BROKEN)
        row = how.word(rule.ROW)
        size = (code.scalar(rows) if isinstance(rows, SSAValue) else code.constant(rows, "index")).to("i64")
        return where((row >= 0) & (row < size), token, rule.NOT_ASKED)

    sums = build.reshape(b, total, (batch,))
    return [points(b, [best, peak, sums, drawn], (batch,), "i64", chosen)]


SAMPLE: dict[type[Operation], Rule] = {SampleOp: _sample}
