"""Sizes as kernels compute them: every number on the way is proven to be small.

The verifier computes with exact integers, emitted code with int64_t.  They agree where no number that emitted code
forms leaves 64 bits.  `magnitude` bounds them all at once: the sum, over the terms of a polynomial, of the coefficient
times the largest absolute value of each factor (at least 1).  No partial sum and no partial product of the terms, in
any order, is larger.  And it bounds what emitters derive as well, since the magnitude of a sum or a product of
polynomials, expanded and cancelled or not, is at most the sum or the product of theirs.

So there are two limits: `LARGEST` for each size, and `MOST_WORK` for the product of the extents that a kernel's text
multiplies.  What emitters make of them (bytes, costs, sizes rounded up to tiles) multiplies them by at most 2^9 and
2^8, and stays below 2^62.  Neither is a limit of time: a plan may ask for years of work (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from qcompiler.errors import DimError
from qcompiler.plan.dims import Call, Dim, Expr, Range, atom_bounds, dim, never_negative, parse
from qcompiler.plan.kernel import ITEMSIZE

LARGEST = 1 << 53
"""Of a size, a stride, an offset, in elements or in bytes, and of everything on the way to it. No machine addresses as
much memory."""

MOST_WORK = 1 << 54
"""Products of extents that one launch's text forms.  The largest of today's models stay below: logits of 2^20 tokens
over 128,256 words at a width of 16,384 are 2^51."""

Ranges = Mapping[str, Range]


def magnitude(value: Dim | Expr, ranges: Ranges) -> int:
    """What no number on the way to this size exceeds (at least 1).

    DimError if that is more than `LARGEST`, for a divisor that may be zero or negative, and for an unknown symbol.
    """
    if isinstance(value, int):
        return _limited(max(abs(value), 1), value)
    expr = dim(value)
    total = 0
    for monomial, coefficient in expr.terms.items():
        product = abs(coefficient)
        for atom in monomial:
            product = _limited(product * _atom(atom, ranges), expr)
        total += product
    return _limited(max(total, 1), expr)


def _atom(atom: Call | str, ranges: Ranges) -> int:
    if isinstance(atom, Call):
        magnitude(parse(atom.lhs), ranges)
        magnitude(parse(atom.rhs), ranges)
    low, high = atom_bounds(atom, ranges)
    return max(abs(low), abs(high), 1)


def _limited(number: int, what: object) -> int:
    if number > LARGEST:
        shown = str(what) if not isinstance(what, int) or abs(what) < 1 << 64 else "a number"
        raise DimError(
            f"the size {shown[:100]} may reach {number if number < 1 << 80 else 'more than 2**80'} on the way to its "
            f"value; the limit is {LARGEST} (2**53)"
        )
    return number


def check_size(value: Dim, ranges: Ranges) -> None:
    """DimError unless emitted code computes this size without leaving 64 bits and without dividing by zero."""
    magnitude(value, ranges)


def check_view_sizes(dtype: str, shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim, ranges: Ranges) -> None:
    """DimError unless every offset of a view, in bytes, is proven to fit."""
    total = magnitude(offset, ranges)
    for extent, stride in zip(shape, strides, strict=True):
        total += magnitude(extent, ranges) * magnitude(stride, ranges)
    if total * ITEMSIZE[dtype] > LARGEST:
        raise DimError(f"the offsets of a view of {list(shape)} may be above {LARGEST} (2**53)")


def check_extent(value: Dim, ranges: Ranges, least: Literal[0, 1] = 0) -> int:
    """The magnitude of an extent that is proven to be at least `least`. DimError otherwise."""
    found = magnitude(value, ranges)
    if not (value >= least if isinstance(value, int) else never_negative(dim(value) - least, ranges)):
        raise DimError(f"the extent '{value}' may be {'negative' if least == 0 else 'zero or negative'}")
    return found
