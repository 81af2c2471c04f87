"""The leading dims of scores (all but the last two), as factors. Models join and split these dims by reshapes.

    heads joined with the batch      (b*4, s, t), with a mask added to (b, 4, s, t)             factors (b, 4)
    windows joined with the batch    (b*16, 2, s, t), with a mask added to (b, 16, 2, s, t)     factors (b, 16, 2)

All shapes have the same elements in the same order, so each dim of a shape is the product of consecutive factors.
Factors of 1 are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim, Expr, dim, product

Lead = tuple[Dim, ...]


def common_factors(leads: Sequence[Lead]) -> Lead | None:
    """The fewest factors whose products give every shape. None if there are none, as for (4, 3) and (6, 2)."""
    found, *others = (tuple(size for size in lead if size != 1) for lead in leads)
    for lead in others:
        if lead == found:
            continue
        if 0 in (*lead, *found) or product(found) != product(lead):
            return None
        refined = _refined(list(map(dim, found)), list(map(dim, lead)))
        if refined is None:
            return None
        found = refined
    return found


def _refined(left: list[Expr], right: list[Expr]) -> Lead | None:
    """The factors of two shapes of equal product."""
    factors: list[Dim] = []
    while left and right:
        for one, other in ((left, right), (right, left)):
            quotient = _quotient(one[0], other[0])
            if quotient is not None:
                factors.append(other.pop(0).to_dim())
                one[:1] = [quotient] if quotient != dim(1) else []
                break
        else:
            return None
    return tuple(factors)


def _quotient(value: Expr, divisor: Expr) -> Expr | None:
    """value / divisor, if that is a valid size of a dim."""
    quotient = value // divisor
    return quotient if quotient * divisor == value else None


def runs(lead: Lead, factors: Lead) -> list[range]:
    """For each dim of a shape, the range of factors whose product it is."""
    found, start = [], 0
    for size in lead:
        stop = start
        while product(factors[start:stop]) != dim(size):
            stop += 1
        found.append(range(start, stop))
        start = stop
    return found
