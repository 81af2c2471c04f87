"""The multiple-choice knapsack: one option for each item, the least total cost within a number of bytes.

    minimise    cost[0][j0] + cost[1][j1] + …
    subject to  bytes[0][j0] + bytes[1][j1] + …  <=  budget

Dynamic programming over bytes solves it for every budget at once, so one solution is the whole Pareto front (Kellerer,
Pferschy, Pisinger, "Knapsack Problems", 2004, chapter 11).  Options that are worse in both respects are left out first.

Bytes are counted in units of the greatest common divisor of all differences, which is exact.  If that needs a table of
more than `CELLS` cells, the unit is larger and each option's bytes are rounded up: a solution never exceeds its budget,
and it costs no more than the best one for a budget smaller by `Front.slack` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

CELLS = 1 << 26
"""The most cells of the table, a byte each: items times units."""


@dataclass(frozen=True)
class Option:
    """What one choice for an item takes and costs. Costs are finite and not negative."""

    nbytes: int
    cost: float


@dataclass(frozen=True)
class Front:
    """The best choices for every budget. `best[u]` is the least cost with `u` units above `least` bytes."""

    items: tuple[tuple[Option, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    """The options of each item that are not dominated, by ascending bytes."""
    least: int
    unit: int
    slack: int
    best: Float64
    choices: tuple[npt.NDArray[np.uint8], ...]
    """For each item and number of units the place in `kept`."""

    @property
    def most(self) -> int:
        """The budget from which on every item has its option of the least cost."""
        return self.budget([kept[-1] for kept in self.kept])

    @property
    def lowest(self) -> float:
        """The least cost, without a budget."""
        return float(self.best[-1])

    def budget(self, chosen: Sequence[int]) -> int:
        """The budget for which `within` finds a choice as good as this one: its bytes, each option's rounded up."""
        units = sum(
            _units(item[place].nbytes - item[kept[0]].nbytes, self.unit)
            for item, kept, place in zip(self.items, self.kept, chosen, strict=True)
        )
        return self.least + units * self.unit

    def within(self, nbytes: int) -> list[int] | None:
        """The option of each item, of least total cost within so many bytes; None if nothing fits."""
        if nbytes < self.least:
            return None
        units = min((nbytes - self.least) // self.unit, len(self.best) - 1)
        found = [0] * len(self.items)
        for number in reversed(range(len(self.items))):
            item, kept = self.items[number], self.kept[number]
            place = kept[int(self.choices[number][units])]
            units -= _units(item[place].nbytes - item[kept[0]].nbytes, self.unit)
            found[number] = place
        return found

    def reaching(self, cost: float) -> list[int] | None:
        """The option of each item, of the fewest bytes whose total cost is at most this; None if none reaches it."""
        enough = np.flatnonzero(self.best <= cost)
        return self.within(self.least + int(enough[0]) * self.unit) if enough.size else None

    def nbytes(self, chosen: Sequence[int]) -> int:
        """The bytes of a choice."""
        return sum(item[place].nbytes for item, place in zip(self.items, chosen, strict=True))

    def cost(self, chosen: Sequence[int]) -> float:
        """The total cost of a choice."""
        return math.fsum(item[place].cost for item, place in zip(self.items, chosen, strict=True))


def solve(items: Sequence[Sequence[Option]], cells: int = CELLS) -> Front:
    """The front of `items`, each with one option at least."""
    given = tuple(tuple(item) for item in items)
    kept = tuple(_undominated(item) for item in given)
    more = [[item[place].nbytes - item[places[0]].nbytes for place in places] for item, places in _both(given, kept)]
    width = sum(each[-1] for each in more)
    exact = math.gcd(*(extra for each in more for extra in each)) or 1
    room = max(cells // max(len(given), 1), 1)
    unit = exact if width // exact < room else -(-width // room)
    rounded = [[_units(extra, unit) for extra in each] for each in more]
    count = sum(each[-1] for each in rounded) + 1
    best = np.zeros(count)
    choices = []
    for (item, places), units in zip(_both(given, kept), rounded, strict=True):
        best, chosen = _with(best, [item[place].cost for place in places], units)
        choices.append(chosen)
    least = sum(item[places[0]].nbytes for item, places in _both(given, kept))
    return Front(given, kept, least, unit, 0 if unit == exact else len(given) * unit, best, tuple(choices))


def _with(best: Float64, costs: Sequence[float], units: Sequence[int]) -> tuple[Float64, npt.NDArray[np.uint8]]:
    """The table with one more item; of options of equal cost, the one of fewer bytes."""
    made = best + costs[0]
    chosen = np.zeros(len(best), np.uint8)
    for place in range(1, len(units)):
        shift = units[place]
        other = np.full(len(best), np.inf)
        other[shift:] = best[: len(best) - shift] + costs[place]
        better = other < made
        made[better], chosen[better] = other[better], place
    return made, chosen


def _undominated(item: Sequence[Option]) -> tuple[int, ...]:
    """The places of options for which no other has as few bytes and as little cost."""
    kept: list[int] = []
    for place in sorted(range(len(item)), key=lambda at: (item[at].nbytes, item[at].cost)):
        if not kept or item[place].cost < item[kept[-1]].cost:
            kept.append(place)
    return tuple(kept)


def _units(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit)


def _both(
    items: Sequence[tuple[Option, ...]], kept: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[Option, ...], tuple[int, ...]]]:
    return list(zip(items, kept, strict=True))


__all__ = ["Front", "Option", "solve"]
