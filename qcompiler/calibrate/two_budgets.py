"""The multiple-choice knapsack with two budgets: the least total cost within a number of bytes and of nanoseconds.

    minimise    cost[0][j0] + cost[1][j1] + …
    subject to  bytes[0][j0] + bytes[1][j1] + …  <=  nbytes
                ns[0][j0]    + ns[1][j1]    + …  <=  limit

Both budgets get a price, p and q.  For all p, q >= 0 the sum over items of the least cost + p bytes + q ns, less the
price of both budgets, is at most the least cost (the Lagrangian bound).  The best prices are found by nested bisection:
the bound is concave, and what the choice takes of a budget beyond what there is, is its slope.

Then the items are added one after the other to partial choices ("labels").  A label goes away if it cannot stay within
a budget, if its cost so far with the bound of the other items is not below that of a complete choice that is known by
more than a tolerance, or if another one takes as much of both budgets and costs less.  The best label at the end, or
the choice that was known, is best up to the tolerance.  If more than `LABELS` labels are left after an item, those of
the lowest bounds go on.  `Solved.bound` is what is proven of the least cost, with all of this.  (Kellerer, Pferschy,
Pisinger, "Knapsack Problems", 2004, chapters 9 and 11.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate.knapsack import Front, Option

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LABELS = 1 << 14
"""The most labels after an item: with 8 options an item takes about 10 ms."""

TOLERANCE = 1e-3
"""A cost this share above the best one is good enough: costs are measured, and add up only nearly."""

BISECTIONS, FINEST = 32, 1e-18
"""Halvings of the range of a price on a logarithmic scale, and the low end of the range as a share of the high end.
They leave a factor of 1 + 1e-8."""

ANY = 1 << 62
"""A budget that every choice keeps."""


@dataclass(frozen=True)
class Solved:
    """A choice, its cost, and a cost below which no choice within both budgets lies."""

    chosen: tuple[int, ...]
    cost: float
    bound: float


class TwoBudgets:
    """Items, each with one option at least; `ns` has the nanoseconds of each option."""

    def __init__(
        self, items: Sequence[Sequence[Option]], ns: Sequence[Sequence[int]], tolerance: float = TOLERANCE
    ) -> None:
        self._tolerance = tolerance
        self._sizes, self._times = [[each.nbytes for each in item] for item in items], ns
        width = max(map(len, items))
        count = len(items)
        self._cost = np.full((count, width), np.inf)
        self._bytes, self._ns = np.zeros((count, width), np.int64), np.zeros((count, width), np.int64)
        for number, (item, times) in enumerate(zip(items, ns, strict=True)):
            self._cost[number, : len(item)] = [each.cost for each in item]
            self._bytes[number, : len(item)] = [each.nbytes for each in item]
            self._ns[number, : len(item)] = times
        self._exists = np.isfinite(self._cost)
        self._rows = np.arange(count)

    def smallest(self, limit: int) -> tuple[int, ...] | None:
        """The choice of the fewest bytes within so many nanoseconds; None if none is."""
        if int(np.where(self._exists, self._ns, ANY).min(1).sum()) > limit:
            return None
        exact = TwoBudgets([[Option(0, float(size)) for size in item] for item in self._sizes], self._times, 0.0)
        found = exact.solve(0, limit)
        return None if found is None else found.chosen

    def solve(self, nbytes: int, limit: int) -> Solved | None:
        """The choice of the least cost within both budgets; None if none keeps them."""
        return self._solve(self._cost, nbytes, limit)

    def _solve(self, cost: Float64, nbytes: int, limit: int) -> Solved | None:
        best: tuple[float, Int64] | None = None

        def tried(p: float, q: float) -> tuple[float, int, int]:
            """The bound for these prices, and what its choice leaves of the budgets."""
            nonlocal best
            priced = cost + p * self._bytes + q * self._ns
            chosen = priced.argmin(1)
            total = float(cost[self._rows, chosen].sum())
            left = nbytes - int(self._bytes[self._rows, chosen].sum()), limit - int(self._ns[self._rows, chosen].sum())
            if min(left) >= 0 and (best is None or total < best[0]):
                best = total, chosen
            return float(priced[self._rows, chosen].sum()) - p * nbytes - q * limit, *left

        prices = _prices(tried, 2 * _span(cost, self._exists))
        if best is not None:
            best = self._improved(cost, best[1], nbytes, limit)
        return self._labelled(cost, nbytes, limit, prices, best)

    def _improved(self, cost: Float64, chosen: Int64, nbytes: int, limit: int) -> tuple[float, Int64]:
        """The choice with what is left of the budgets spent where the cost falls most, one option at a time."""
        chosen = chosen.copy()
        while True:
            own = [each[self._rows, chosen] for each in (cost, self._bytes, self._ns)]
            fits = (self._bytes - own[1][:, None] <= nbytes - own[1].sum()) & self._exists
            fits &= self._ns - own[2][:, None] <= limit - own[2].sum()
            gain = np.where(fits, own[0][:, None] - np.where(fits, cost, 0.0), 0.0)
            item, place = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[item, place] <= 0:
                return float(own[0].sum()), chosen
            chosen[item] = place

    def _labelled(
        self, cost: Float64, nbytes: int, limit: int, prices: tuple[float, float], known: tuple[float, Int64] | None
    ) -> Solved | None:
        """The best choice by labels; `known` is a choice to beat."""
        p, q = prices
        priced = np.where(self._exists, cost + p * self._bytes + q * self._ns, np.inf)
        behind = _behind(priced.min(1)) - p * nbytes - q * limit
        least = [_behind(np.where(self._exists, each, ANY).min(1)) for each in (self._bytes, self._ns)]
        beat = math.inf if known is None else known[0] * (1 - self._tolerance)
        dropped = math.inf
        costs, taken, times = np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
        steps: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]] = []
        for number, exists in enumerate(self._exists):
            options = np.flatnonzero(exists)
            parent = np.repeat(np.arange(len(costs), dtype=np.int32), len(options))
            place = np.tile(options.astype(np.uint8), len(costs))
            made = [
                (before[:, None] + each[number, options]).reshape(-1)
                for before, each in ((costs, cost), (taken, self._bytes), (times, self._ns))
            ]
            bounds = made[0] + p * made[1] + q * made[2] + behind[number + 1]
            fits = (made[1] + least[0][number + 1] <= nbytes) & (made[2] + least[1][number + 1] <= limit)
            kept = np.flatnonzero(fits & (bounds < beat))
            kept = kept[_different(made[0][kept], made[1][kept], made[2][kept])]
            if len(kept) > LABELS:
                order = np.argsort(bounds[kept], kind="stable")
                dropped = min(dropped, float(bounds[kept[order[LABELS]]]))
                kept = kept[order[:LABELS]]
            costs, taken, times = (each[kept] for each in made)
            steps.append((parent[kept], place[kept]))
        root = float(behind[0])
        if not len(costs):
            return None if known is None else Solved(tuple(map(int, known[1])), known[0], max(root, min(dropped, beat)))
        label, chosen = int(costs.argmin()), []
        total = float(costs[label])
        for parents, places in reversed(steps):
            chosen.append(int(places[label]))
            label = int(parents[label])
        return Solved(tuple(reversed(chosen)), total, max(root, min(dropped, total)))


class LimitedFront:
    """The front of the best choices within a limit of nanoseconds: what `knapsack.Front` is without one.

    Each point is solved when it is asked for.  `gap`: no choice within both budgets costs less than one that was given
    out by more than so many per cent.
    """

    unit, slack = 1, 0

    def __init__(self, front: Front, ns: Sequence[Sequence[int]], limit: int) -> None:
        self._front, self._limit = front, limit
        self._both = TwoBudgets(front.items, ns)
        self._known: dict[int, Solved | None] = {}
        self.gap = 0.0
        smallest = self._both.smallest(limit)
        if smallest is None:
            raise ValueError("no choice is within the limit")
        self.least = front.nbytes(smallest)
        best = self._at(ANY)
        assert best is not None
        self.most = self.nbytes(best.chosen)
        self.lowest = best.cost

    def within(self, nbytes: int) -> list[int] | None:
        """The option of each item, of least total cost within so many bytes and the limit; None if nothing fits."""
        found = self._at(min(nbytes, self.most))
        return None if found is None else list(found.chosen)

    def reaching(self, cost: float) -> list[int] | None:
        """The option of each item, of the fewest bytes whose total cost is at most this; None if none reaches it."""
        if self.lowest > cost:
            return None
        low, high = self.least - 1, self.most  # the cost falls with the budget
        while high - low > 1:
            at = (low + high) // 2
            found = self._at(at)
            if found is not None and found.cost <= cost:
                high = self.nbytes(found.chosen)
            else:
                low = at
        return self.within(high)

    def budget(self, chosen: Sequence[int]) -> int:
        """The bytes of a choice."""
        return self.nbytes(chosen)

    def nbytes(self, chosen: Sequence[int]) -> int:
        """The bytes of a choice."""
        return self._front.nbytes(chosen)

    def cost(self, chosen: Sequence[int]) -> float:
        """The total cost of a choice."""
        return self._front.cost(chosen)

    def _at(self, nbytes: int) -> Solved | None:
        if nbytes not in self._known:
            found = self._known[nbytes] = self._both.solve(nbytes, self._limit)
            if found is not None:
                self.gap = max(self.gap, 100 * (1 - found.bound / found.cost) if found.cost else 0.0)
        return self._known[nbytes]


def _prices(tried: Callable[[float, float], tuple[float, int, int]], most: float) -> tuple[float, float]:
    """The prices (p, q) of the highest bound that was found; `most` is above both."""

    def inner(q: float) -> tuple[float, float, int]:
        """(bound, p, what is left of the limit) for the best p: where the choice begins to keep its bytes."""
        bound, left, other = tried(0.0, q)
        found = bound, 0.0, other
        low, high = FINEST * most, most
        for _ in range(BISECTIONS if left < 0 else 0):
            at = math.sqrt(low * high)
            bound, left, other = tried(at, q)
            found = max(found, (bound, at, other))
            low, high = (at, high) if left < 0 else (low, at)
        return found

    bound, p, left = inner(0.0)
    found, low, high = (bound, p, 0.0), FINEST * most, most
    for _ in range(BISECTIONS if left < 0 else 0):
        at = math.sqrt(low * high)
        bound, p, left = inner(at)
        found = max(found, (bound, p, at))
        low, high = (at, high) if left < 0 else (low, at)
    return found[1], found[2]


def _span(cost: Float64, exists: npt.NDArray[np.bool_]) -> float:
    """A price of one unit above which no item takes a unit more than it must: the largest difference of two costs."""
    most = np.where(exists, cost, -np.inf).max(1) - np.where(exists, cost, np.inf).min(1)
    return max(float(most.max()), np.finfo(np.float64).tiny / FINEST)


def _behind(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """For each place the sum of the values from there on; a 0 at the end."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], np.zeros(1, values.dtype)])


def _different(costs: Float64, taken: Int64, times: Int64) -> Int64:
    """The places of the labels for which no other takes the same and costs less."""
    order = np.lexsort((costs, times, taken))
    same = (np.diff(taken[order]) == 0) & (np.diff(times[order]) == 0)
    return order[np.concatenate([[True], ~same])] if len(order) else order


__all__ = ["LimitedFront", "Solved", "TwoBudgets"]
