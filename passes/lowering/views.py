"""The tensor view ops, applied to strided views of buffers. All sizes, strides and offsets are shape expressions.

A function returns None if no strided view gives the result; the caller then copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from qcompiler.plan.dims import Dim, Expr, contiguous_strides, dim, product
from qcompiler.plan.kernel import DType
from qcompiler.plan.plan import View


def contiguous(buffer: str, dtype: DType, shape: Sequence[Dim]) -> View:
    """The whole of a buffer, row-major."""
    shape = tuple(shape)
    return View(buffer=buffer, dtype=dtype, shape=shape, strides=contiguous_strides(shape))


def is_contiguous(view: View) -> bool:
    """Row-major without gaps (dims of size 1 may have any stride)."""
    wanted = contiguous_strides(view.shape)
    triples = zip(view.shape, view.strides, wanted, strict=True)
    return all(size == 1 or stride == want for size, stride, want in triples)


def with_shape(view: View, shape: Sequence[Dim | Expr], strides: Sequence[Dim | Expr], offset: Dim | Expr = 0) -> View:
    """The view with other sizes and strides. `offset`, in elements, is added."""
    return msgspec.structs.replace(
        view,
        shape=tuple(dim(d).to_dim() for d in shape),
        strides=tuple(dim(d).to_dim() for d in strides),
        offset=(dim(view.offset) + dim(offset)).to_dim(),
    )


def transpose(view: View, permutation: Sequence[int]) -> View:
    return with_shape(view, [view.shape[i] for i in permutation], [view.strides[i] for i in permutation])


def broadcast(view: View, added: Sequence[int], shape: Sequence[Dim]) -> View:
    """linalg.broadcast: the dims numbered `added` in `shape` are new and have stride 0."""
    old = iter(view.strides)
    return with_shape(view, shape, [0 if i in added else next(old) for i in range(len(shape))])


def slice_(view: View, offsets: Sequence[Dim], sizes: Sequence[Dim], steps: Sequence[Dim]) -> View:
    start = Expr.constant(0)
    for offset, stride in zip(offsets, view.strides, strict=True):
        start = start + dim(offset) * dim(stride)
    return with_shape(view, sizes, [dim(s) * dim(t) for s, t in zip(view.strides, steps, strict=True)], start)


def expand(view: View, groups: Sequence[Sequence[int]], shape: Sequence[Dim]) -> View:
    """tensor.expand_shape: group i of the result's dims splits dim i (row-major within the group)."""
    strides: list[Dim | Expr] = [1] * len(shape)
    for stride, group in zip(view.strides, groups, strict=True):
        step = dim(stride)
        for index in reversed(group):
            strides[index] = step
            step = step * dim(shape[index])
    return with_shape(view, shape, strides)


def collapse(view: View, groups: Sequence[Sequence[int]]) -> View | None:
    """tensor.collapse_shape. None unless the dims of each group can be one dim with one stride."""
    sizes: list[Expr] = []
    strides: list[Expr] = []
    for group in groups:
        merged = _merge([(view.shape[i], view.strides[i]) for i in group])
        if merged is None:
            return None
        sizes.append(merged[0])
        strides.append(merged[1])
    return with_shape(view, sizes, strides)


def _merge(dims: Sequence[tuple[Dim, Dim]]) -> tuple[Expr, Expr] | None:
    """(size, stride) of several dims as one, or None."""
    kept = [(dim(size), dim(stride)) for size, stride in dims if size != 1]
    if not kept:
        return Expr.constant(1), Expr.constant(1)
    for (_, outer), (inner_size, inner) in itertools.pairwise(kept):
        if outer != inner * inner_size:
            return None
    return product([str(size) for size, _ in kept]), kept[-1][1]


def as_matrix(view: View) -> View | None:
    """(…, cols) as (rows, cols) with unit column stride, or None. A vector becomes one row."""
    rank = len(view.shape)
    if view.shape[-1] != 1 and view.strides[-1] != 1:
        return None
    groups = [tuple(range(rank - 1)), (rank - 1,)]
    matrix = collapse(view, groups)
    if matrix is None:
        return None
    return with_shape(matrix, matrix.shape, (matrix.strides[0], 1))


def as_rows_of_rows(view: View) -> View | None:
    """(…, cols) as (rows, inner, cols) with unit column stride, or None."""
    rank = len(view.shape)
    if view.shape[-1] != 1 and view.strides[-1] != 1:
        return None
    for cut in range(1, rank - 1):
        found = collapse(view, [tuple(range(cut)), tuple(range(cut, rank - 1)), (rank - 1,)])
        if found is not None:
            return with_shape(found, found.shape, (*found.strides[:-1], 1))
    return None


def spread(view: View, shape: Sequence[Dim]) -> View:
    """`view` broadcast to `shape`: stride 0 where its dim is 1. Its other dims must equal those of `shape`."""
    triples = zip(view.shape, shape, view.strides, strict=True)
    return with_shape(view, shape, [0 if have == 1 and want != 1 else stride for have, want, stride in triples])


def broadcast_as_matrix(view: View, shape: Sequence[Dim]) -> View | None:
    """`view` broadcast to `shape`, as a (rows, cols) matrix; None if strides do not allow it."""
    strides = [
        0 if have == 1 and want != 1 else s for have, want, s in zip(view.shape, shape, view.strides, strict=True)
    ]
    full = with_shape(view, shape, strides)
    return collapse(full, [tuple(range(len(full.shape) - 1)), (len(full.shape) - 1,)])


def as_vector(view: View) -> View | None:
    """The view with all its dims as one, or None."""
    return collapse(view, [tuple(range(len(view.shape)))])
