"""Two charts: the front of recipes, and a bar for each layer. Both have a logarithmic scale of costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from qcompiler.recipes.drawing import Bar, Circle, Drawing, Line, Shape, Words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 440, 80, 50, 40, 20
LINE, MARK, RULE = "#3465a4", "#cc0000", "#dddddd"
BAR, ARM = 16, 5
"""Pixels for each layer, and of half a cross."""
SMALLEST = 1e-12
"""Costs below this are drawn at it: a logarithm has no zero."""


class Drawn(Protocol):
    """What a point of the front has."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> float: ...
    @property
    def estimate(self) -> float: ...
    @property
    def measured(self) -> float | None: ...


def front(points: Sequence[Drawn], chosen: str, measure: str) -> Drawing:
    """Estimates as a line with points, true distances as crosses, the chosen point in red."""
    costs = [each.estimate for each in points] + [each.measured for each in points if each.measured is not None]
    low, high = _decades(costs)
    least, most = min(each.bits for each in points), max(each.bits for each in points)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(bits: float, cost: float) -> tuple[float, float]:
        share = (math.log10(max(cost, SMALLEST)) - low) / (high - low)
        return LEFT + width * (bits - least) / ((most - least) or 1), TOP + height * (1 - share)

    shapes: list[Shape] = []
    for place in range(low, high + 1):
        y = at(least, 10.0**place)[1]
        shapes += [Line(((LEFT, y), (LEFT + width, y)), RULE), Words(LEFT - 8, y + 4, f"1e{place}", "end")]
    for bits in range(math.ceil(least), math.floor(most) + 1):
        shapes.append(Words(at(bits, 1)[0], HEIGHT - BOTTOM + 18, f"{bits}", "middle"))
    shapes.append(Words(LEFT + width / 2, HEIGHT - 12, "bits per weight", "middle"))
    shapes.append(Words(LEFT, 22, f"{measure}: line estimated, crosses measured"))
    shapes.append(Line(tuple(at(each.bits, each.estimate) for each in points), LINE, 1.5))
    for each in points:
        colour, (x, y) = MARK if each.name == chosen else LINE, at(each.bits, each.estimate)
        shapes.append(Circle(x, y, 4, colour, f"{each.name}: {each.bits:.3f} bits, estimate {each.estimate:.3g}"))
        if each.measured is not None:
            x, y = at(each.bits, each.measured)
            shapes += [
                Line(((x - ARM, y - ARM * sign), (x + ARM, y + ARM * sign)), colour, 1.5) for sign in (1, -1)
            ]  # fmt: skip
    return Drawing(WIDTH, HEIGHT, shapes)


def bars(rows: Sequence[tuple[str, str, float]], heading: str) -> Drawing:
    """A bar for each (name, format, cost), the names on the left."""
    low, high = _decades([cost for _, _, cost in rows])
    left = 20 + 7 * max((len(name) for name, _, _ in rows), default=0)
    width, height = 360, BAR * len(rows)

    def at(cost: float) -> float:
        return left + width * (math.log10(max(cost, SMALLEST, 10.0**low)) - low) / (high - low)

    shapes: list[Shape] = [Words(left, 16, heading)]
    for place in range(low, high + 1):
        x = at(10.0**place)
        shapes += [Line(((x, TOP), (x, TOP + height)), RULE), Words(x, TOP - 6, f"1e{place}", "middle")]
    for number, (name, text, cost) in enumerate(rows):
        y = TOP + BAR * number
        shapes.append(Bar(left, y + 2, at(cost) - left, BAR - 4, LINE, f"{cost:.3g}"))
        shapes += [Words(left - 6, y + 12, name, "end"), Words(at(cost) + 6, y + 12, text)]
    return Drawing(left + width + 140, TOP + height + 10, shapes)


def _decades(costs: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the costs."""
    known = [max(cost, SMALLEST) for cost in costs if cost > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return low, max(high, low + 1)


__all__ = ["bars", "front"]
