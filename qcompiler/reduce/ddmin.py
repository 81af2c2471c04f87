"""Delta debugging: which things of a case can go.

The algorithm is ddmin of Zeller and Hildebrandt (Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2),
2002): try each of n parts alone, then all but each part, then halve the parts.  What is left is 1-minimal: none of its
things can go alone.  LLVM's llvm-reduce and MLIR's mlir-reduce do the same for IR, with reductions by name, as here.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import pairwise

from qcompiler.reduce.case import Case

Count = Callable[[Case], int]
Without = Callable[[Case, Set[int]], Case | None]
Accept = Callable[[Case], bool]


def minimise(case: Case, count: Count, without: Without, accept: Accept) -> Case:
    """Removes as many of the `count(case)` things as possible.

    `without(case, numbers)` is the case without these things, or None where that cannot be made; `accept(candidate)`
    says whether it still fails in the same way.
    """
    parts = 2
    while (total := count(case)) > 0:
        smaller, kept = _reduced(case, total, min(parts, total), count, without, accept)
        if smaller is not None:
            case, parts = smaller, max(kept, 2)
        elif parts >= total:
            return case
        else:
            parts = min(2 * parts, total)
    return case


def _reduced(
    case: Case, total: int, parts: int, count: Count, without: Without, accept: Accept
) -> tuple[Case | None, int]:
    """The first smaller case that is accepted, and the number of parts to go on with."""
    bounds = [total * number // parts for number in range(parts + 1)]
    chunks = [frozenset(range(begin, end)) for begin, end in pairwise(bounds)]
    everything = frozenset(range(total))
    attempts = [(everything, 2)] if parts <= 2 else []
    if parts > 1:
        attempts += [(everything - chunk, 2) for chunk in chunks]  # each part alone
    if parts > 2:
        attempts += [(chunk, parts - 1) for chunk in reversed(chunks)]  # all but one; users stand behind definitions
    for removed, go_on in attempts:
        candidate = without(case, removed)
        if candidate is not None and count(candidate) < total and accept(candidate):
            return candidate, go_on
    return None, parts


__all__ = ["minimise"]
