"""Two drawings as SVG: the front of recipes, and a bar for each layer. Both have a logarithmic scale of costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Protocol

from qcompiler.errors import ArgumentError
from qcompiler.runtime.files import replacing

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 440, 80, 50, 40, 20
LINE, MARK, TEXT, RULE = "#3465a4", "#cc0000", "#222222", "#dddddd"
BAR = 16
"""Pixels for each layer."""
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


def save(path: str | Path, text: str) -> None:
    """Writes a drawing. ArgumentError for a name that does not end in .svg."""
    path = Path(path)
    if path.suffix != ".svg":
        raise ArgumentError(f"{path}: drawings are SVG; give a name that ends in .svg")
    with replacing(path) as file:
        file.write(text.encode())


def front(points: Sequence[Drawn], chosen: str, measure: str) -> str:
    """Estimates as a line with points, true distances as crosses, the chosen point in red."""
    costs = [each.estimate for each in points] + [each.measured for each in points if each.measured is not None]
    low, high = _decades(costs)
    least, most = min(each.bits for each in points), max(each.bits for each in points)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(bits: float, cost: float) -> tuple[float, float]:
        share = (math.log10(max(cost, SMALLEST)) - low) / (high - low)
        return LEFT + width * (bits - least) / ((most - least) or 1), TOP + height * (1 - share)

    parts = [_rule(LEFT, at(least, 10.0**place)[1], width, f"1e{place}") for place in range(low, high + 1)]
    for bits in range(math.ceil(least), math.floor(most) + 1):
        parts.append(_text(at(bits, 1)[0], HEIGHT - BOTTOM + 18, f"{bits}", "middle"))
    parts.append(_text(LEFT + width / 2, HEIGHT - 12, "bits per weight", "middle"))
    parts.append(_text(LEFT, 22, f"{measure}: line estimated, crosses measured", "start"))
    line = " ".join("{:.1f},{:.1f}".format(*at(each.bits, each.estimate)) for each in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    for each in points:
        colour, (x, y) = MARK if each.name == chosen else LINE, at(each.bits, each.estimate)
        title = f"{each.name}: {each.bits:.3f} bits, estimate {each.estimate:.3g}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(title)}</title></circle>')
        if each.measured is not None:
            x, y = at(each.bits, each.measured)
            cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10M{x - 5:.1f} {y + 5:.1f}l10 -10"
            parts.append(f'<path d="{cross}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
    return _page(WIDTH, HEIGHT, parts)


def bars(rows: Sequence[tuple[str, str, float]], heading: str) -> str:
    """A bar for each (name, format, cost), the names on the left."""
    low, high = _decades([cost for _, _, cost in rows])
    left = 20 + 7 * max((len(name) for name, _, _ in rows), default=0)
    width, height = 360, BAR * len(rows)

    def at(cost: float) -> float:
        return left + width * (math.log10(max(cost, SMALLEST, 10.0**low)) - low) / (high - low)

    parts = [_text(left, 16, heading, "start")]
    for place in range(low, high + 1):
        x = at(10.0**place)
        parts.append(f'<path d="M{x:.1f} {TOP}v{height}" stroke="{RULE}"/>')
        parts.append(_text(x, TOP - 6, f"1e{place}", "middle"))
    for number, (name, text, cost) in enumerate(rows):
        y = TOP + BAR * number
        size = f'width="{at(cost) - left:.1f}" height="{BAR - 4}"'
        parts.append(f'<rect x="{left}" y="{y + 2}" {size} fill="{LINE}"><title>{cost:.3g}</title></rect>')
        parts.append(_text(left - 6, y + 12, name, "end"))
        parts.append(_text(at(cost) + 6, y + 12, text, "start"))
    return _page(left + width + 140, TOP + height + 10, parts)


def _decades(costs: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the costs."""
    known = [max(cost, SMALLEST) for cost in costs if cost > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return low, max(high, low + 1)


def _rule(x: float, y: float, width: float, label: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f}h{width}" stroke="{RULE}"/>' + _text(x - 8, y + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{TEXT}">{escape(text)}</text>'


def _page(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


__all__ = ["bars", "front", "save"]
