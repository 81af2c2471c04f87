"""The mask of `qc.attention`: the operations on scores before their softmax.

select(keep, scores, -inf)     a boolean mask
select(keep, scores, -3.4e38)  a boolean mask if every row keeps a key or has a sink; else the float mask
                               select(keep, 0, -3.4e38), with which a row that keeps nothing gives all its keys the
                               same weight
scores + a                     the float mask a
(scores + a) + b, …            one float mask, computed once by a loop nest for all layers that share the terms

The dims of the scores may be joined, split and reordered differently for each term. So each term is viewed over the
common factors (attention_dims.py), which then become the batch, the heads, the queries and the keys of the attention.
"""

from __future__ import annotations

import itertools
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
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.masks.mask_proof import DROPS
from qcompiler.passes.masks.masks import MaskReader
from qcompiler.passes.views.factors import Dims, Factor
from qcompiler.plan.dims import Dim, dim, product
from qcompiler.plan.kernel_body import FLOATS

Sizes = tuple[Dim, ...]


@dataclass(frozen=True)
class Term:
    """Adds `tensor[index]` to the scores. With `dropped`, scores become that number where `tensor[index]` is false.

    The index is over the dims of the scores at this point, `level` frames above the matmul. `varies` are those along
    which the term does not repeat.
    """

    tensor: SSAValue
    index: Index
    varies: frozenset[int]
    level: int
    dropped: float | None = None


@dataclass(frozen=True)
class Placed:
    """A term over the factors of the attention: for each dim of the tensor, the places of its factors. None if the
    tensor is not read dim by dim. `used` are the factors along which the term does not repeat."""

    tensor: SSAValue
    places: tuple[tuple[int, ...], ...] | None
    used: frozenset[int]
    dropped: float | None

    @staticmethod
    def of(term: Term, dims: Dims, order: Sequence[Factor]) -> Placed:
        """The term where the scores have the dims `dims`; `order` are the factors of the attention."""
        used = frozenset(order.index(factor) for n in term.varies for factor in dims[n])
        if not can_be_extra(term.tensor, term.index):
            return Placed(term.tensor, None, used, term.dropped)
        own = [dims[e.position] if isinstance(e, AffineDimExpr) else [] for e in term.index]
        return Placed(term.tensor, tuple(tuple(order.index(f) for f in each) for each in own), used, term.dropped)


@dataclass(frozen=True)
class Scores:
    """The sizes of the factors of the scores: batch and heads of the keys, heads that share one of these, queries,
    keys."""

    shared: Sizes
    groups: Sizes
    queries: Sizes
    keys: Sizes

    @property
    def leading(self) -> Sizes:
        return (*self.shared, *self.groups)

    @property
    def sizes(self) -> Sizes:
        return (*self.leading, *self.queries, *self.keys)

    def heads(self, split: int) -> Dim:
        """The number of heads if the first `split` factors are the batch."""
        return product(self.leading[split:]).to_dim()

    def dims(self, split: int) -> list[range]:
        """The places of the factors of batch, heads, queries and keys."""
        ends = [0, split, len(self.leading), len(self.leading) + len(self.queries), len(self.sizes)]
        return [range(begin, end) for begin, end in itertools.pairwise(ends)]


class Masks:
    """The masks of one function. Equal masks are built once."""

    def __init__(self, reader: MaskReader) -> None:
        self._reader = reader
        self._made: dict[tuple[tuple[Placed, ...], Scores, int, bool], SSAValue | None] = {}

    def split(self, terms: Sequence[Placed], scores: Scores, natural: int) -> int | None:
        """The number of factors that form the batch: the one that gives the smallest mask, preferably `natural`.

        A mask may repeat along the whole batch or along all heads, but not along some factors of them. None if the
        number of heads would not be fixed.
        """
        used = {n for term in terms for n in term.used}
        possible = [n for n in range(len(scores.shared) + 1) if isinstance(scores.heads(n), int)]

        def size(split: int) -> int:
            held = [n for group in scores.dims(split)[:2] if used & set(group) for n in group]
            return math.prod(self._reader.longest(scores.sizes[n]) for n in held)

        return min(possible, key=lambda split: (size(split), split != natural), default=None)

    def build(
        self, before: qc.BatchMatmulOp, terms: Sequence[Placed], scores: Scores, split: int, has_sinks: bool
    ) -> SSAValue | None:
        """The mask (B|1, H|1, S|1, T|1) that combines the terms, built before an op. None if there is no such mask."""
        key = (tuple(terms), scores, split, has_sinks)
        if key not in self._made:
            self._made[key] = self._build(before, terms, scores, split, has_sinks)
        return self._made[key]

    def sinks(self, before: qc.BatchMatmulOp, found: Placed, scores: Scores, split: int) -> SSAValue | None:
        """The sinks (B|1, H|1, S|1, 1), as a view before an op; None if there is no such view."""
        value = _over_factors(before, found, scores)
        if value is None or tensor_dtype(value.type) not in FLOATS:
            return None
        return _over_heads(before, value, scores, split)

    def _build(
        self, before: qc.BatchMatmulOp, terms: Sequence[Placed], scores: Scores, split: int, has_sinks: bool
    ) -> SSAValue | None:
        parts = []
        for term in terms:
            value = _over_factors(before, term, scores)
            if value is None or not _is_mask(term, value):
                return None
            parts.append((term, value))
        first, value = parts[0]
        if len(parts) == 1:
            mask = _over_heads(before, value, scores, split)
            if first.dropped is None or self._hides(first, mask, has_sinks):
                return mask
        if any(term.dropped is not None and term.dropped > DROPS for term, _ in parts):
            return None  # adding such a number to a score does not give that number
        return _over_heads(before, _joined(before, parts), scores, split)

    def _hides(self, term: Placed, mask: SSAValue, has_sinks: bool) -> bool:
        """Whether a boolean mask that hides the dropped keys gives the same result. Beside a sink they have weight 0,
        also where no key is kept."""
        if term.dropped == float("-inf") or (has_sinks and term.dropped is not None and term.dropped <= DROPS):
            return True
        band = self._reader.band(mask)
        return band is not None and band.window is None and term.dropped is not None and term.dropped <= _LEAST


_LEAST = -1e4
"""A score this much below another one has weight 0 in fp32."""


def _is_mask(term: Placed, value: SSAValue) -> bool:
    boolean = tensor_dtype(value.type) == "i1"
    return boolean == (term.dropped is not None) and tensor_dtype(value.type) in ("i1", "f32", "bf16", "f16")


def _over_factors(before: qc.BatchMatmulOp, term: Placed, scores: Scores) -> SSAValue | None:
    """A term as a view over all factors, with unit dims where it repeats. None if there is no such view."""
    if term.places is None:
        return None
    sizes: list[Dim] = []
    index: list[AffineExpr] = []
    for places, size in zip(term.places, shape_of(term.tensor.type), strict=True):
        if product(scores.sizes[n] for n in places) != dim(size):
            return None
        sizes += [scores.sizes[n] for n in places] or [1]
        index += [loops.dim_expr(n) for n in places] or [loops.ZERO]
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    return as_extra(before, build.reshape(builder, term.tensor, sizes), tuple(index), scores.sizes)


def _over_heads(before: qc.BatchMatmulOp, value: SSAValue, scores: Scores, split: int) -> SSAValue:
    """Reshapes a tensor over all factors to (batch, heads, queries, keys)."""
    shape = list(shape_of(value.type))
    groups = scores.dims(split)
    for group in groups:
        if any(shape[n] != 1 for n in group):
            for n in group:
                shape[n] = scores.sizes[n]
    builder = build.with_path(InsertPoint.before(before), path_of(before))
    whole = build.broadcast_to(builder, value, shape)
    return build.reshape(builder, whole, [product(shape[n] for n in group).to_dim() for group in groups])


def _joined(before: qc.BatchMatmulOp, parts: Sequence[tuple[Placed, SSAValue]]) -> SSAValue:
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
