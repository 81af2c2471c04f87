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


def in_turns(
    works: Sequence[Callable[[int], float]], rounds: int, after_each: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Both works once in each round, in alternating order.

    A work takes the round's number and returns seconds. Returns the medians of both, and the median of the second's
    time over the first's within rounds.
    """
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            times[i].append(works[i](number))
        after_each()
    before, after = (statistics.median(found) for found in times)
    return before, after, statistics.median(new / old for old, new in zip(*times, strict=True))


def about(**what: Any) -> dict[str, Any]:
    """What figures hang on: the tree, the machine, the day, and `what`."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    tree = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {"after": tree, "machine": processor(), "date": datetime.date.today().isoformat()} | what
