"""A timeline as text: one row for each stream, `[…]` on the critical path, `(…)` beside it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from qcompiler.errors import ArgumentError
from qcompiler.units import counted

if TYPE_CHECKING:
    from qcompiler.runtime.timeline import Slice, Timeline

LEAST_COLUMNS = 80
"""Minimum columns: with fewer, rows of long stream names have no room for bars."""

MOST_LISTED = 6
"""Maximum number of kernels listed below the chart."""


def chart(shown: Timeline, width: int, begin: float, end: float) -> str:
    """The chart between two times. ArgumentError for an empty interval, or fewer than 80 columns."""
    if width < LEAST_COLUMNS:
        raise ArgumentError(f"a timeline of {width} columns is too narrow; give it {LEAST_COLUMNS} or more")
    if not 0 <= begin < max(end, 1e-9):
        raise ArgumentError(f"from {begin:g} to {end:g} us is no part of a timeline of {shown.span:.1f} us")
    margin = max((len(stream) for stream in shown.streams), default=0) + 1
    columns = width - margin
    rows = [" " * margin + _axis(begin, end, columns)]
    for stream in shown.streams:
        rows.append(f"{stream:{margin}}" + _row(shown, stream, columns, begin, end))
    return "\n".join([*_title(shown, width), "", *(row.rstrip() for row in rows), "", *_longest(shown, width)])


def _title(shown: Timeline, width: int) -> list[str]:
    sizes = ", ".join(f"{name}={size}" for name, size in shown.symbols.items())
    path = [shown.slices[number] for number in shown.critical]
    busy = sum(each.end - each.begin for each in path)
    steps, waits = counted(len(shown.slices), "step"), counted(shown.waits, "wait")
    times = "measured" if shown.measured else f"estimated for {shown.device}, not measured"
    lines = [
        f"{shown.entry}{f'({sizes})' if sizes else ''}: {shown.span:.1f} us; {times}",
        f"one after the other {shown.serial:.1f} us; critical path: {len(path)} of {steps}, {busy:.1f} us, "
        f"and {max(0.0, shown.span - busy):.1f} us of waiting for other streams; {waits}",
    ]
    return [line[:width] for line in lines]


def _axis(begin: float, end: float, columns: int) -> str:
    """Times at about every tenth of the chart, at round numbers."""
    step = _round((end - begin) / 8)
    cells = [" "] * columns
    mark = math.ceil(begin / step) * step
    while mark < end:
        text = f"|{mark:g} us" if mark == 0 else f"|{mark:g}"
        at = int((mark - begin) / (end - begin) * columns)
        if at + len(text) <= columns:
            cells[at : at + len(text)] = text
        mark = round(mark + step, 9)
    return "".join(cells)


def _round(value: float) -> float:
    """The smallest of 1, 2, 5, 10, … that is at least `value`."""
    power = 1e-3
    while True:
        for digit in (1, 2, 5):
            if digit * power >= value:
                return digit * power
        power *= 10


def _row(shown: Timeline, stream: str, columns: int, begin: float, end: float) -> str:
    """A stream's bars; a slice too short for a bar is a mark where no bar is."""
    marks: dict[int, str] = {}
    cells = ["."] * columns
    critical = set(shown.critical)
    scale = columns / (end - begin)
    for number, each in enumerate(shown.slices):
        if each.stream != stream or each.end <= begin or each.begin >= end:
            continue
        low = max(0, round((each.begin - begin) * scale))
        high = min(columns, round((each.end - begin) * scale))
        if low < high:
            cells[low:high] = _bar(each, high - low, number in critical)
        else:
            at = min(low, columns - 1)
            marks[at] = "#" if at in marks else "|" if number in critical else ":"
    return "".join(marks.get(at, cell) if cell == "." else cell for at, cell in enumerate(cells))


def _bar(each: Slice, cells: int, critical: bool) -> str:
    left, right, fill = ("[", "]", "=") if critical else ("(", ")", "-")
    if cells == 1:
        return "|" if critical else ":"
    return left + each.label[: cells - 2].center(cells - 2, fill) + right


def _longest(shown: Timeline, width: int) -> list[str]:
    total: dict[str, float] = {}
    count: Counter[str] = Counter()
    for each in shown.slices:
        name = each.kernel or each.template
        total[name] = total.get(name, 0.0) + each.alone
        count[name] += 1
    most = sorted(total.items(), key=lambda item: -item[1])[:MOST_LISTED]
    lines = ["[..] on the critical path   (..) beside it   | and : the same, short   # several   . nothing"]
    names = max((len(name) for name, _ in most), default=0)
    for name, time in most:
        share = 100 * time / max(shown.serial, 1e-9)
        lines.append(f"  {name:{names}}  {count[name]:4} x  {time:10.1f} us  {share:3.0f} %")
    if len(total) > MOST_LISTED:
        lines.append(f"  and {len(total) - MOST_LISTED} more")
    return [line[:width] for line in lines]
