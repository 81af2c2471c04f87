"""What is done to scores before their softmax, as the mask of `qc.attention`.

select(keep, scores, -inf)     a boolean mask
select(keep, scores, -3.4e38)  the float mask select(keep, 0, -3.4e38): a row that keeps nothing weighs all its
                               keys alike.  A boolean mask where every row keeps a key
scores + a                     the float mask a
(scores + a) + b, …            one float mask, made by a loop nest, once for all layers that share the terms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.passes.support import loops
from qcompiler.passes.support.extras import as_extra, can_be_extra
from qcompiler.passes.support.loops import Index
from qcompiler.passes.support.mask_proof import DROPS
from qcompiler.passes.support.masks import MaskReader
from qcompiler.plan.dims import Dim

Full = tuple[Dim, Dim, Dim, Dim]


@dataclass(frozen=True)
class Term:
    """`tensor[index]` is added to the scores; or, with `dropped`, they become that number where it is false.

    The index is over the dims of the scores at that point: `rank` of them.
    """

    tensor: SSAValue
    index: Index
    rank: int
    dropped: float | None = None


class Masks:
    """The masks of one function, each made once."""

    def __init__(self, reader: MaskReader) -> None:
        self._reader = reader
        self._made: dict[tuple[tuple[Term, ...], Full], SSAValue | None] = {}

    def build(self, before: qc.BatchMatmulOp, terms: Sequence[Term], full: Full) -> SSAValue | None:
        """The mask (B|1, H|1, S|1, T|1) that the terms are together, made before an op; None if there is none."""
        key = (tuple(terms), full)
        if key not in self._made:
            self._made[key] = self._build(before, terms, full)
        return self._made[key]

    def _build(self, before: qc.BatchMatmulOp, terms: Sequence[Term], full: Full) -> SSAValue | None:
        parts = []
        for term in terms:
            value = _over_heads(before, term, full)
            if value is None or not _is_mask(term, value):
                return None
            parts.append((term, value))
        first, value = parts[0]
        if len(parts) == 1 and (first.dropped is None or self._hides(first, value)):
            return value
        if any(term.dropped is not None and term.dropped > DROPS for term, _ in parts):
            return None  # scores plus such a number are not that number
        return _joined(before, parts)

    def _hides(self, term: Term, mask: SSAValue) -> bool:
        """Whether it is the same to say that dropped keys are not seen."""
        if term.dropped == float("-inf"):
            return True
        band = self._reader.band(mask)
        return band is not None and band.window is None and term.dropped is not None and term.dropped <= _LEAST


_LEAST = -1e4
"""exp of it beside any kept score is 0 in fp32."""


def _is_mask(term: Term, value: SSAValue) -> bool:
    boolean = tensor_dtype(value.type) == "i1"
    return boolean == (term.dropped is not None) and tensor_dtype(value.type) in ("i1", "f32", "bf16", "f16")


def _over_heads(before: qc.BatchMatmulOp, term: Term, full: Full) -> SSAValue | None:
    """A term as a view of rank 4, unit dims where it repeats; None if it is no such view."""
    index = term.index
    if term.rank == 3 and full[1] != 1:  # batch and heads are joined: only a term of all of them can be taken apart
        shape = shape_of(term.tensor.type)
        if index != loops.own_index(shape) or shape[1:] != full[2:]:
            return None
        builder = build.with_path(InsertPoint.before(before), path_of(before))
        return build.reshape(builder, term.tensor, full)
    if term.rank == 3:
        index = tuple(e.replace_dims_and_symbols([loops.dim_expr(n) for n in (0, 2, 3)], []) for e in index)
    return as_extra(before, term.tensor, index, full) if can_be_extra(term.tensor, index) else None


def _joined(before: qc.BatchMatmulOp, parts: Sequence[tuple[Term, SSAValue]]) -> SSAValue:
    """One float mask: 0, then each term in order."""
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
