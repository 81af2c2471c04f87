"""Proves that emitted code computes sizes without overflow.

The verifier computes with exact integers, emitted code with int64_t. They agree if no intermediate result of emitted
code exceeds 64 bits. `magnitude` bounds all of these: it sums, over the terms of a polynomial, the coefficient times
the largest absolute value of each factor (at least 1). No partial sum and no partial product of the terms is larger, in
any order. It also bounds what emitters derive: the magnitude of a sum or product of polynomials is at most the sum or
product of their magnitudes.

So there are two limits: `LARGEST_SIZE` for each size, and `MOST_WORK` for the product of the extents that a kernel's
text multiplies. Emitters multiply a size by at most 2^9 (bytes, sizes rounded up to tiles) and a product by at most 2^8
(costs), which stays below 2^62. Neither limit bounds time: a plan may ask for years of work (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from qcompiler.errors import DimError
from qcompiler.plan.dims import CallAtom, Dim, Expr, Range, atom_bounds, dim, never_negative, parse
from qcompiler.plan.kernel import ITEMSIZE

LARGEST_SIZE = 1 << 53
"""The largest size, stride or offset, in elements or bytes, and the largest intermediate result of one. No machine
addresses as much memory."""

MOST_WORK = 1 << 54
"""The largest product of extents that the text of one launch computes. Today's models stay below: logits of 2^20 tokens
over 128,256 words at a width of 16,384 are 2^51."""

Ranges = Mapping[str, Range]


def magnitude(value: Dim | Expr, ranges: Ranges) -> int:
    """A bound, at least 1, of this size and of every intermediate result of its computation.

    DimError if the bound is above `LARGEST_SIZE`, for a divisor that may be zero or negative, and for an unknown
    symbol.
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


def _atom(atom: CallAtom | str, ranges: Ranges) -> int:
    if isinstance(atom, CallAtom):
        magnitude(parse(atom.lhs), ranges)
        magnitude(parse(atom.rhs), ranges)
    low, high = atom_bounds(atom, ranges)
    return max(abs(low), abs(high), 1)


def _limited(number: int, what: object) -> int:
    if number > LARGEST_SIZE:
        shown = str(what) if not isinstance(what, int) or abs(what) < 1 << 64 else "a number"
        raise DimError(
            f"the size {shown[:100]} may reach {number if number < 1 << 80 else 'more than 2**80'} on the way to its "
            f"value; the limit is {LARGEST_SIZE} (2**53)"
        )
    return number


def check_size(value: Dim, ranges: Ranges) -> None:
    """DimError unless emitted code computes this size without leaving 64 bits and without dividing by zero."""
    magnitude(value, ranges)


def check_view_sizes(dtype: str, shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim, ranges: Ranges) -> None:
    """DimError unless every byte offset of a view is proven to be at most `LARGEST_SIZE`."""
    total = magnitude(offset, ranges)
    for extent, stride in zip(shape, strides, strict=True):
        total += magnitude(extent, ranges) * magnitude(stride, ranges)
    if total * ITEMSIZE[dtype] > LARGEST_SIZE:
        raise DimError(f"the offsets of a view of {list(shape)} may be above {LARGEST_SIZE} (2**53)")


def check_extent(value: Dim, ranges: Ranges, least: Literal[0, 1] = 0) -> int:
    """The magnitude of an extent that is proven to be at least `least`. DimError otherwise."""
    found = magnitude(value, ranges)
    if not (value >= least if isinstance(value, int) else never_negative(dim(value) - least, ranges)):
        raise DimError(f"the extent '{value}' may be {'negative' if least == 0 else 'zero or negative'}")
    return found
