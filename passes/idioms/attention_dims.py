"""Which dim of an attention is what, when views reorder, join and split dims between the two matmuls.

All tensors between the matmuls are followed as factors (views/factors.py). The factors of the softmax's axis are the
keys. Those of a batch dim in both matmuls are the batch, and the heads of k and v. The others are rows of both: the
queries, and the heads that share a head of k and v.

    einsum("bqgrd,bkgd->bgrqk"), softmax, einsum("bgrqk,bkgd->bqgrd")     batch b, heads g, of each r queries q; keys k
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of
from qcompiler.passes.idioms.terms import Placed, Scores, Term
from qcompiler.passes.views import factors, views
from qcompiler.passes.views.factors import Dims, Factor
from qcompiler.plan.dims import Dim


@dataclass(frozen=True)
class Frame:
    """A tensor with the elements of the one above it, whose dims are listed in the order of these elements."""

    shape: tuple[Dim, ...]
    listing: tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """An operand of a matmul, and its dims."""

    value: SSAValue
    dims: Dims


@dataclass(frozen=True)
class AttentionDims:
    """The factors of an attention. `depth` is the dim that the scores sum over, `width` that of a value.

    `shared` are the batch and the heads of k and v, `groups` the heads that share one of these. The model has its heads
    from place `natural` of `shared` on. `result` are the dims of the second matmul's result.
    """

    shared: list[Factor]
    groups: list[Factor]
    queries: list[Factor]
    keys: list[Factor]
    depth: Factor
    width: Factor
    natural: int
    q: Operand
    k: Operand
    v: Operand
    result: Dims
    terms: tuple[Placed, ...]
    sinks: Placed | None

    @property
    def scores(self) -> Scores:
        groups = (self.shared, self.groups, self.queries, self.keys)
        return Scores(*(tuple(factor.size for factor in group) for group in groups))


@dataclass(frozen=True)
class Misfit:
    """Why the two matmuls around a softmax are no attention."""

    why: str


def dims_of(
    op: qc.BatchMatmulOp, position: int, above: Sequence[Frame], axis: int, matmul: qc.BatchMatmulOp,
    below: Sequence[Frame], terms: Sequence[Term], sinks: Term | None,
) -> AttentionDims | Misfit:  # fmt: skip
    """The dims of the attention whose weights are the operand `position` of `op`, and whose scores are of `matmul`.

    `above` leads from the operand down to the softmax along `axis`, `below` from there to the matmul. Sinks do not tell
    queries from heads: they may vary along heads alone.
    """
    chain = _followed(shape_of(op.operands[position].type), [*above, *below])
    if chain is None:
        shapes = [shape_of(op.operands[position].type), *(frame.shape for frame in (*above, *below))]
        return Misfit(f"its scores are seen with the dims {' and '.join(map(str, dict.fromkeys(shapes)))}")
    unjoined = _unjoined(chain[-1][:-2], matmul)
    *chain, unjoined = (factors.leaves(dims) for dims in (*chain, unjoined))
    top, weights, scores = chain[0], chain[len(above)], chain[-1]
    keys, batch = weights[axis], top[:-2]
    rows, summed = (top[-2], top[-1]) if position == 0 else (top[-1], top[-2])
    turned = scores[-1] != keys  # the keys are the rows of the first matmul
    if summed != keys or (turned and scores[-2] != keys):
        return Misfit("the softmax is not along the dim that the first matmul makes and the second one sums over")
    if set(_flat(batch)) != set(_flat(scores[:-2])):
        return Misfit("a dim of the batch of one matmul is a dim of rows or columns of the other")
    others = [dims for n, dims in enumerate(weights) if n != axis]
    at = [chain[-1 - term.level] for term in terms]
    used = {f for term, dims in zip(terms, at, strict=True) for n in term.varies for f in dims[n]}
    queries = _queries(others, rows, used)
    shared = [factor for factor in _flat(others) if factor not in rows]
    groups = [factor for factor in _flat(others) if factor in rows and factor not in queries]
    order = [*shared, *groups, *queries, *keys]
    depth, width = Factor(shape_of(matmul.a.type)[-1]), Factor(shape_of(op.result.type)[-1 - position])
    turn = -1 if turned else 1
    q, k = (
        Operand(value, [*scores[:-2], *pair])
        for value, pair in zip(
            (matmul.a, matmul.b)[::turn],
            (([scores[-2], [depth]], [[depth], scores[-1]]))[::turn],
            strict=True,
        )
    )
    flip = -1 if position == 1 else 1
    v = Operand(op.operands[1 - position], [*batch, *([keys, [width]][::flip])])
    leads = [_lead(others, rows, queries), scores[:-2], *(_without(rows, dims[:-2]) for dims in at), unjoined]
    return AttentionDims(
        shared, groups, queries, keys, depth, width, _natural(leads, shared), q, k, v,
        [*batch, *([rows, [width]][::flip])],
        tuple(Placed.of(term, dims, order) for term, dims in zip(terms, at, strict=True)),
        None if sinks is None else Placed.of(sinks, chain[-1 - sinks.level], order),
    )  # fmt: skip


def _followed(shape: Sequence[Dim], frames: Iterable[Frame]) -> list[Dims] | None:
    """The dims of a tensor and of all frames below it in common factors; None if there are none."""
    chain = [factors.fresh(shape)]
    for frame in frames:
        found = factors.reshaped(_flat(chain[-1][n] for n in frame.listing), frame.shape)
        if found is None:
            return None
        chain.append(found)
    return chain


def _unjoined(batch: Dims, matmul: qc.BatchMatmulOp) -> Dims:
    """The batch of the scores as q has it before a reshape joins its dims: that tells batch and heads apart."""
    shape, source = shape_of(matmul.a.type), shape_of(views.unreshaped(matmul.a).type)
    found = factors.reshaped(_flat(batch), source[:-2]) if source[-2:] == shape[-2:] else None
    return batch if found is None else found


def _queries(others: Dims, rows: Sequence[Factor], used: set[Factor]) -> list[Factor]:
    """The rows that are queries: those next to the keys, unless a mask tells of others. `others` are the dims of the
    softmax without its axis."""
    near = others[-1] if others else []
    if not set(near) <= set(rows):
        near = next((dims for dims in reversed(others) if set(dims) & set(rows)), [])
    masked = [factor for factor in _flat(others) if factor in rows and factor in used]
    symbolic = [factor for factor in _flat(others) if factor in rows and not isinstance(factor.size, int)]
    if near and masked and not set(masked) & set(near):
        near = masked
    return near if set(symbolic) <= set(near) else [f for f in _flat(others) if f in symbolic]


def _lead(dims: Dims, rows: Sequence[Factor], queries: Sequence[Factor]) -> Dims:
    """The dims of batch and heads: those without rows. A dim of size 1 at the end is the one query."""
    kept = _without(rows, dims)
    return kept[:-1] if kept and not kept[-1] and not queries else kept


def _without(rows: Sequence[Factor], dims: Dims) -> Dims:
    return [each for each in dims if not set(each) & set(rows)]


def _natural(leads: Sequence[Dims], shared: Sequence[Factor]) -> int:
    """How many factors come before the heads in the model: the last of several leading dims are heads."""
    parted = next((lead for lead in leads if len(lead) > 1), None)
    return len(shared) if parted is None else len(_flat(parted[:-1]))


def _flat(dims: Iterable[Sequence[Factor]]) -> list[Factor]:
    return [factor for each in dims for factor in each]
