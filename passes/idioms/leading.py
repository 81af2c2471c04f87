"""The dims in front of the last two of scores, which models join and part: the factors that all of them are made of.

    heads joined with the batch      (b*4, s, t), with a mask added to (b, 4, s, t)             factors (b, 4)
    windows joined with the batch    (b*16, 2, s, t), with a mask added to (b, 16, 2, s, t)     factors (b, 16, 2)

Every shape here is the same elements in the same order, so a dim of one shape is the product of a run of factors.
Factors of 1 are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.plan.dims import Dim, Expr, dim, product

Lead = tuple[Dim, ...]


def common_factors(leads: Sequence[Lead]) -> Lead | None:
    """The fewest factors that every shape is made of; None where there are none, such as for (4, 3) and (6, 2)."""
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
    """value / divisor, where that is one of the sizes that dims have."""
    quotient = value // divisor
    return quotient if quotient * divisor == value else None


def runs(lead: Lead, factors: Lead) -> list[range]:
    """The factors that each dim of a shape is the product of."""
    found, start = [], 0
    for size in lead:
        stop = start
        while product(factors[start:stop]) != dim(size):
            stop += 1
        found.append(range(start, stop))
        start = stop
    return found
