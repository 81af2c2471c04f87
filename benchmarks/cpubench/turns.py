"""Two versions of one work, timed in turns."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpubench.processor import processor

ROOT = Path(__file__).resolve().parents[2]


def times_in_turns(
    works: Sequence[Callable[[int], float]], rounds: int, after_each: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Both works once in each round, in alternating order; a work takes the round's number and returns seconds."""
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            times[i].append(works[i](number))
        after_each()
    return times[0], times[1]


def ratio_within(times: tuple[list[float], list[float]]) -> float:
    """The median of the second's time over the first's within rounds."""
    return statistics.median(new / old for old, new in zip(*times, strict=True))


def in_turns(
    works: Sequence[Callable[[int], float]], rounds: int, after_each: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """The medians of both works' `times_in_turns`, and their `ratio_within` rounds."""
    times = times_in_turns(works, rounds, after_each)
    before, after = (statistics.median(found) for found in times)
    return before, after, ratio_within(times)


def about(**what: Any) -> dict[str, Any]:
    """What figures hang on: the tree, the machine, the day, and `what`."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    tree = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {"after": tree, "machine": processor(), "date": datetime.date.today().isoformat()} | what
