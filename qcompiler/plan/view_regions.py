"""The bytes of a buffer that a view covers: bounds over all values of the symbols, and proofs that two views are
disjoint.

All positions are in bytes from the start of the buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qcompiler import formats
from qcompiler.errors import DimError
from qcompiler.plan.dims import Dim, Expr, Range, contiguous_strides, dim, never_negative, product
from qcompiler.plan.kernel import ITEMSIZE, Operand
from qcompiler.plan.plan import View

Ranges = Mapping[str, Range]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The bytes of a view. They lie in [low, high); `min` and `max` bound this range over all symbol values.

    `axes` are pairs of (extent, stride in bytes). Strides are made positive, since reversing an axis does not change
    which bytes it covers. Axes that add no byte are left out: extent 1, or stride 0 with an extent that is never 0.
    `size` is the number of bytes of one element.
    """

    low: Expr
    high: Expr
    min: int
    max: int
    axes: tuple[tuple[Expr, Expr], ...]
    size: int


def is_packed(view: View | Operand) -> bool:
    """Whether the view's bytes are those of a format or of a kernel's layout, not of a strided tensor."""
    return view.format is not None or view.layout not in (None, "canonical")


def begin_of(view: View) -> Expr:
    """The byte offset of a view's first element in its buffer. A packed view begins where its buffer begins."""
    return dim(0) if is_packed(view) else dim(view.offset) * ITEMSIZE[view.dtype]


def nbytes_of(view: View) -> Expr:
    """The number of bytes of a view without gaps: of its elements, or of its format's canonical form."""
    if view.format is None:
        return product(view.shape) * ITEMSIZE[view.dtype]
    rows, cols = (dim(size).value for size in view.shape)
    return dim(int(formats.get(view.format.name, **view.format.params).nbytes(rows, cols)))


def is_contiguous(view: View) -> bool:
    """Row-major without gaps (dims of extent 1 may have any stride)."""
    wanted = contiguous_strides(view.shape)
    return all(
        extent == 1 or stride == want or dim(stride) == dim(want)
        for extent, stride, want in zip(view.shape, view.strides, wanted, strict=True)
    )


def region_of(dtype: str, shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim, ranges: Ranges) -> Region:
    """The region of a strided view. DimError if a symbol has no range or a stride has no definite sign."""
    size = ITEMSIZE[dtype]
    low = dim(offset) * size
    high = low + size
    axes: list[tuple[Expr, Expr]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1 or (stride == 0 and _bound(dim(extent), ranges)[0] > 0):
            continue
        step = dim(stride) * size
        span = (dim(extent) - 1) * step
        smallest, largest = _bound(step, ranges)
        if smallest >= 0:
            high = high + span
        elif largest <= 0:
            low, step = low + span, -step
        else:
            raise DimError(f"the stride '{stride}' may be positive or negative ({smallest} to {largest} bytes)")
        axes.append((dim(extent), step))
    return Region(low, high, _bound(low, ranges)[0], _bound(high, ranges)[1], tuple(axes), size)


def whole(nbytes: int) -> Region:
    """The region of a packed view: all `nbytes` of its buffer."""
    return Region(dim(0), dim(nbytes), 0, nbytes, (), nbytes)


def moved(region: Region, by: int) -> Region:
    """The region `by` bytes further on."""
    return dataclasses.replace(
        region, low=region.low + by, high=region.high + by, min=region.min + by, max=region.max + by
    )


def _bound(expr: Expr, ranges: Ranges) -> Range:
    return (expr.value, expr.value) if expr.is_static else expr.tight_bounds(ranges)


def proven_at_most(a: Expr, b: Expr, ranges: Ranges) -> bool:
    """Whether `never_negative` proves a <= b for all symbol values."""
    return never_negative(b - a, ranges)


def disjoint(a: Region, b: Region, ranges: Ranges) -> bool:
    """Whether two regions of one buffer are proven to share no byte, for all symbol values.

    Either one ends before the other begins. Or both have an axis of the same stride S, each stays within its rows of S
    bytes, and the parts of a row that they cover are disjoint.
    """
    if a.max <= b.min or b.max <= a.min:
        return True
    return _disjoint((a.low, a.size, a.axes), (b.low, b.size, b.axes), ranges)


_Lattice = tuple[Expr, int, tuple[tuple[Expr, Expr], ...]]


def _disjoint(a: _Lattice, b: _Lattice, ranges: Ranges) -> bool:
    if proven_at_most(_end(a), b[0], ranges) or proven_at_most(_end(b), a[0], ranges):
        return True
    for stride in dict.fromkeys(step for _, step in a[2]):
        a_row, b_row = _without(a, stride), _without(b, stride)
        if len(a_row[2]) == len(a[2]) or len(b_row[2]) == len(b[2]):
            continue
        inside = all(
            proven_at_most(dim(0), row[0], ranges) and proven_at_most(_end(row), stride, ranges)
            for row in (a_row, b_row)
        )
        if inside and _disjoint(a_row, b_row, ranges):
            return True
    return False


def _without(lattice: _Lattice, stride: Expr) -> _Lattice:
    low, size, axes = lattice
    return low, size, tuple(axis for axis in axes if axis[1] != stride)


def _end(lattice: _Lattice) -> Expr:
    low, size, axes = lattice
    for extent, step in axes:
        low = low + (extent - 1) * step
    return low + size
