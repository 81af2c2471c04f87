"""Plots as SVG text: lines against two logarithmic axes, with a legend beside them. The standard library alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 460, 320, 62, 30, 44, 190
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5fb0", "#e08e0b", "#00798c", "#7a5c3d", "#c2478f", "#5b6770", "#9aa21b")

DASHES = {True: ("", "14 3", "14 3 3 3"), False: ("5 3", "2 2", "8 3 2 3")}
"""Of bold lines and of others; the next one is used when the colours have all been."""


@dataclass(frozen=True)
class Line:
    """Points in ascending order of x. `bold` lines are ours; `marked` are the x of points that stand out."""

    name: str
    points: Sequence[tuple[float, float]]
    bold: bool = False
    marked: frozenset[float] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.begin + share * (self.end - self.begin)


def number(value: float) -> str:
    return f"{value:g}" if value < 10_000 else f"{value / 1000:g}k"


def steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; powers of ten alone where these are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]


def spread(values: Iterable[float], apart: float = 1.25) -> list[float]:
    """Of ascending values those that are at least `apart` times the one before: labels that do not touch."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= apart * kept[-1]:
            kept.append(value)
    return kept


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def _grid(x: Axis, y: Axis, sizes: Sequence[float]) -> list[str]:
    out = []
    for value in spread(sizes):
        at = x.at(value)
        out.append(f'<path class="grid" d="M{at:.1f} {y.begin:.1f}V{y.end:.1f}"/>')
        out.append(text(at, y.begin + 16, number(value), 'text-anchor="middle"'))
    for value in steps(y.low, y.high):
        at = y.at(value)
        out.append(f'<path class="grid" d="M{x.begin:.1f} {at:.1f}H{x.end:.1f}"/>')
        out.append(text(x.begin - 6, at + 4, number(value), 'text-anchor="end"'))
    return out


def _line(x: Axis, y: Axis, line: Line, number: int) -> list[str]:
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[line.bold]
    dash, place = dashes[number // len(COLOURS) % len(dashes)], TOP + 10 + 18 * number
    points = [(x.at(a), y.at(b)) for a, b in line.points]
    width = 2.6 if line.bold else 1.3
    dash = dash and f' stroke-dasharray="{dash}"'
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    out = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>']
    for (size, _), (a, b) in zip(line.points, points, strict=True):
        out.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.2" fill="{colour}"/>')
        if size in line.marked:
            out.append(f'<circle class="marked" cx="{a:.1f}" cy="{b:.1f}" r="6" fill="none" stroke="{colour}"/>')
    side = x.end + 14
    out.append(f'<path d="M{side} {place}h18" stroke="{colour}" stroke-width="{width}"{dash}/>')
    return [*out, text(side + 24, place + 4, line.name)]


def lines(title: str, across: str, up: str, drawn: Sequence[Line]) -> str:
    """The SVG of a plot. ValueError without a point."""
    points = [point for line in drawn for point in line.points]
    if not points:
        raise ValueError(f"the plot {title!r} has no point")
    sizes, values = sorted({a for a, _ in points}), [b for _, b in points]
    rows = max(HEIGHT, TOP + BOTTOM + 18 * len(drawn))
    x = Axis(sizes[0] / 1.1, sizes[-1] * 1.1, LEFT, LEFT + WIDTH)
    y = Axis(min(values) / 1.2, max(values) * 1.2, rows - BOTTOM, TOP)
    out = _grid(x, y, sizes)
    for i, line in enumerate(drawn):
        out += _line(x, y, line, i)
    middle = (x.begin + x.end) / 2
    out.append(text(middle, 18, title, 'text-anchor="middle" font-weight="bold"'))
    out.append(text(middle, rows - 8, across, 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 14 {rows / 2:.0f})"'
    out.append(text(14, rows / 2, up, turned))
    whole = LEFT + WIDTH + LEGEND
    style = "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd;fill:none}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {rows}" width="{whole}" height="{rows}">',
        f"<style>{style}</style>", f'<rect width="{whole}" height="{rows}" fill="#fff"/>', *out, "</svg>\n",
    ])  # fmt: skip
