"""The mask of `qc.attention`: the operations on scores before their softmax.

select(keep, scores, -inf)     a boolean mask
select(keep, scores, -3.4e38)  a boolean mask if every row keeps a key; else the float mask select(keep, 0, -3.4e38),
                               with which a row that keeps nothing gives all its keys the same weight
scores + a                     the float mask a
(scores + a) + b, …            one float mask, computed once by a loop nest for all layers that share the terms

The leading dims of the scores may be joined or split differently for each term (leading.py). So each term is viewed
over the common factors, which then become the batch and the heads of the attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.passes.idioms.leading import Lead, runs
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.masks.mask_proof import DROPS
from qcompiler.passes.masks.masks import MaskReader
from qcompiler.plan.dims import Dim, dim, product


@dataclass(frozen=True)
class Term:
    """Adds `tensor[index]` to the scores. With `dropped`, scores become that number where `tensor[index]` is false.

    The index is over the dims of the scores at this point: the leading ones, `lead`, and the last two.
    """

    tensor: SSAValue
    index: Index
    lead: Lead
    dropped: float | None = None


@dataclass(frozen=True)
class Scores:
    """The dims of the scores: the factors of the leading dims, queries and keys."""

    factors: Lead
    queries: Dim
    keys: Dim

    @property
    def shape(self) -> tuple[Dim, ...]:
        return (*self.factors, self.queries, self.keys)

    def attention(self, split: int) -> tuple[Dim, Dim, Dim, Dim]:
        """(batch, heads, queries, keys); the batch is the product of the first `split` factors."""
        batch, heads = product(self.factors[:split]), product(self.factors[split:])
        return batch.to_dim(), heads.to_dim(), self.queries, self.keys


class Masks:
    """The masks of one function. Equal masks are built once."""

    def __init__(self, reader: MaskReader) -> None:
        self._reader = reader
        self._made: dict[tuple[tuple[Term, ...], Scores, int], SSAValue | None] = {}

    def split(self, terms: Sequence[Term], scores: Scores, natural: int) -> int | None:
        """The number of factors that form the batch: the one that gives the smallest mask, preferably `natural`.

        A mask may repeat along the whole batch or along all heads, but not along some factors of them. None if the
        number of heads would not be fixed.
        """
        used = {n for term in terms for n in _factors_of(term, scores)}
        parts = range(len(scores.factors) + 1)
        possible = [n for n in parts if isinstance(scores.attention(n)[1], int)]

        def size(split: int) -> int:
            groups = (range(split), range(split, len(scores.factors)))
            held = [n for group in groups if used & set(group) for n in group]
            return math.prod(self._reader.longest(scores.factors[n]) for n in held)

        return min(possible, key=lambda split: (size(split), split != natural), default=None)

    def build(self, before: qc.BatchMatmulOp, terms: Sequence[Term], scores: Scores, split: int) -> SSAValue | None:
        """The mask (B|1, H|1, S|1, T|1) that combines the terms, built before an op. None if there is no such mask."""
        key = (tuple(terms), scores, split)
        if key not in self._made:
            self._made[key] = self._build(before, terms, scores, split)
        return self._made[key]

    def _build(self, before: qc.BatchMatmulOp, terms: Sequence[Term], scores: Scores, split: int) -> SSAValue | None:
        parts = []
        for term in terms:
            value = _over_factors(before, term, scores)
            if value is None or not _is_mask(term, value):
                return None
            parts.append((term, value))
        first, value = parts[0]
        if len(parts) == 1:
            mask = _over_heads(before, value, scores, split)
            if first.dropped is None or self._hides(first, mask):
                return mask
        if any(term.dropped is not None and term.dropped > DROPS for term, _ in parts):
            return None  # adding such a number to a score does not give that number
        return _over_heads(before, _joined(before, parts), scores, split)

    def _hides(self, term: Term, mask: SSAValue) -> bool:
        """Whether a boolean mask that hides the dropped keys gives the same result."""
        if term.dropped == float("-inf"):
            return True
        band = self._reader.band(mask)
        return band is not None and band.window is None and term.dropped is not None and term.dropped <= _LEAST


_LEAST = -1e4
"""A score this much below another one has weight 0 in fp32."""


def _is_mask(term: Term, value: SSAValue) -> bool:
    boolean = tensor_dtype(value.type) == "i1"
    return boolean == (term.dropped is not None) and tensor_dtype(value.type) in ("i1", "f32", "bf16", "f16")


def _factors_of(term: Term, scores: Scores) -> list[int]:
    """The factors along which a term does not repeat."""
    positions = {e.position for e in term.index if isinstance(e, AffineDimExpr)}
    return [n for at, run in enumerate(runs(term.lead, scores.factors)) if at in positions for n in run]


def _over_factors(before: qc.BatchMatmulOp, term: Term, scores: Scores) -> SSAValue | None:
    """A term as a view over the factors, queries and keys, with unit dims where it repeats. None if there is no such
    view."""
    if not can_be_extra(term.tensor, term.index):
        return None
    places = [*runs(term.lead, scores.factors), *([len(scores.factors) + n] for n in range(2))]
    sizes: list[Dim] = []
    index: list[AffineExpr] = []
    for expr, size in zip(term.index, shape_of(term.tensor.type), strict=True):
        dims = list(places[expr.position]) if isinstance(expr, AffineDimExpr) else []
        if product(scores.shape[n] for n in dims) != dim(size):
            return None
        sizes += [scores.shape[n] for n in dims] or [1]
        index += [loops.dim_expr(n) for n in dims] or [loops.ZERO]
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    return as_extra(before, build.reshape(builder, term.tensor, sizes), tuple(index), scores.shape)


def _over_heads(before: qc.BatchMatmulOp, value: SSAValue, scores: Scores, split: int) -> SSAValue:
    """Reshapes a tensor over (factors, queries, keys) to (batch, heads, queries, keys)."""
    shape = list(shape_of(value.type))
    for group in (range(split), range(split, len(scores.factors))):
        if any(shape[n] != 1 for n in group):
            for n in group:
                shape[n] = scores.factors[n]
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    whole = build.broadcast_to(builder, value, shape)
    batch, heads = product(shape[:split]), product(shape[split : len(scores.factors)])
    return build.reshape(builder, whole, (batch.to_dim(), heads.to_dim(), *shape[-2:]))


def _joined(before: qc.BatchMatmulOp, parts: Sequence[tuple[Term, SSAValue]]) -> SSAValue:
    """One float mask: starts from 0 and applies each term in order."""
    shapes = [shape_of(value.type) for _, value in parts]
    shape = [next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True)]
    builder = build.with_path(InsertPoint.before(before), path_of(before))

    def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
        total: SSAValue | None = None
        for (term, _), scalar in zip(parts, scalars, strict=False):
            if term.dropped is not None:
                kept = total if total is not None else build.scalar(inner, 0.0, "f32")
                hidden = build.scalar(inner, term.dropped, "f32")
                total = inner.insert(arith.SelectOp(scalar, kept, hidden)).result
            else:
                added = _widened(inner, scalar)
                total = added if total is None else inner.insert(arith.AddfOp(total, added)).result
        assert total is not None
        return total

    return build.pointwise(builder, [value for _, value in parts], shape, "f32", body)


def _widened(inner: Builder, value: SSAValue) -> SSAValue:
    wide = ELEMENT_TYPES["f32"]
    return value if value.type == wide else inner.insert(arith.ExtFOp(value, wide)).result
