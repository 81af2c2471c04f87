"""Points that stand out from the trend of their neighbours: time against a size.

The trend at a point is the straight line, in logarithms of both, through the points at its sides.  The first point has
the time of the second, since less work should not take longer; the last one grows from the point before it in
proportion to the size.  A time of more than `ALLOWED` times the trend marks a size that a kernel serves badly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALLOWED = 1.3


@dataclass(frozen=True)
class Outlier:
    """A point, and how many times the trend its time is."""

    size: float
    ratio: float


def trend(sizes: Sequence[float], times: Sequence[float], at: int) -> float:
    """The time that its neighbours give the point at this place."""
    if at == 0:
        return times[1]
    if at == len(sizes) - 1:
        return times[at - 1] * sizes[at] / sizes[at - 1]
    a, b = at - 1, at + 1
    x, y = [math.log(sizes[i]) for i in (a, b)], [math.log(times[i]) for i in (a, b)]
    slope = (y[1] - y[0]) / (x[1] - x[0])
    return math.exp(y[0] + slope * (math.log(sizes[at]) - x[0]))


def outliers(sizes: Sequence[float], times: Sequence[float], allowed: float = ALLOWED) -> list[Outlier]:
    """The points above `allowed` times their trend. Sizes ascend; of fewer than three nothing can be said."""
    if len(sizes) < 3:
        return []
    ratios = [times[i] / trend(sizes, times, i) for i in range(len(sizes))]
    return [Outlier(size, ratio) for size, ratio in zip(sizes, ratios, strict=True) if ratio > allowed]
