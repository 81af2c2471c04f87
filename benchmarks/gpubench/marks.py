"""Compares measured with predicted: whether a time is in its range, which limit it is near, and verdicts of claims.

mark(row)     Mark("slower", 2.1, "latency", …)     of a timed cell that has a prediction
judged(…)     each claim with its number and verdict
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench.claims import MEASURES
from gpubench.document import Document, Row

NEAR = 0.65
"""From this share of a limit's best rate on, the kernel is bound by that limit."""


@dataclass(frozen=True)
class Mark:
    """`factor` is the distance from the range: measured / high if slower, low / measured if faster, else 1.

    `where` is the nearest limit of the time, and `share` how near: the limit's best time over the measured one.
    """

    verdict: str
    factor: float
    where: str
    share: float


def mark(row: Row) -> Mark | None:
    """None for a cell without a time or without a prediction."""
    median, predicted = row.median, row.predicted
    if median is None or not predicted:
        return None
    low, high = float(predicted["low_us"]), float(predicted["high_us"])
    where, share = nearest(median, predicted["terms"])
    if median > high:
        return Mark("slower", median / high, where, share)
    if median < low:
        return Mark("faster", low / median, where, share)
    return Mark("right", 1.0, where, share)


def nearest(median: float, terms: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """The nearest limit of a time; "waiting" if none is near: then latency and barriers determine the time."""
    fixed = sum(terms[name][1] for name in ("fixed", "table") if name in terms)
    if fixed >= NEAR * median:
        return "launch", fixed / median
    shares = {name: best / median for name, (best, _) in terms.items() if name not in ("fixed", "table")}
    if not shares:
        return "waiting", 0.0
    name = max(shares, key=lambda each: shares[each])
    return (name if shares[name] >= NEAR else "waiting"), shares[name]


@dataclass(frozen=True)
class Judged:
    """A claim and its number in a run; `verdict` is "right", "wrong" or "not measured", `aim` whether it was
    reached."""

    claim: Mapping[str, Any]
    value: float | None
    verdict: str
    aim: str


LESS_IS_BETTER = ("decode_8k_us", "layer_launches", "wrong_cells")


def judged(document: Document, claims: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Every claim of the frozen predictions. ValueError for an unknown measure."""
    found = []
    for claim in claims:
        if claim["measure"] not in MEASURES:
            raise ValueError(f"a claim is held to {claim['measure']!r}; there are {', '.join(MEASURES)}")
        value = MEASURES[claim["measure"]](document)
        if value is None:
            found.append(Judged(claim, None, "not measured", ""))
            continue
        verdict = "right" if claim["low"] <= value <= claim["high"] else "wrong"
        aim = claim.get("aim")
        better = None if aim is None else value <= aim if claim["measure"] in LESS_IS_BETTER else value >= aim
        found.append(Judged(claim, value, verdict, "" if better is None else "reached" if better else "missed"))
    return found
