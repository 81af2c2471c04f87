"""Measured seconds of steps, with what they were measured on: what a profile hands to whoever shows times."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from qcompiler.errors import ArgumentError

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Setting:
    """What an entry point was measured on (a device and its threads, in words), and its sizes."""

    on: str
    symbols: Mapping[str, int]


class StepSeconds(dict[str, float]):
    """Seconds by the id of the step (`"main/12"`), with the setting of each entry point that was measured.

    `a | b` has the entry points of both, since a profile times one entry point. Of one that both have, `b` counts:
    times of different sizes do not mix.
    """

    def __init__(self, seconds: Mapping[str, float], settings: Mapping[str, Setting]) -> None:
        super().__init__(seconds)
        self.settings = dict(settings)

    def __or__(self, other: StepSeconds) -> StepSeconds:  # type: ignore[override]  # a dict has no settings
        if not isinstance(other, StepSeconds):
            return NotImplemented
        kept = {step: each for step, each in self.items() if step.rpartition("/")[0] not in other.settings}
        return StepSeconds({**kept, **other}, {**self.settings, **other.settings})

    def __ior__(self, other: StepSeconds) -> StepSeconds:  # type: ignore[override]
        """As `a = a | b`: a dict's own `|=` would keep the settings of `a` beside the times of `b`."""
        return self | other


def by_entry(times: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """`{"main/12": seconds}` as `{"main": {12: seconds}}`. ArgumentError for an id or a time that is none."""
    found: dict[str, dict[int, float]] = {}
    for step, seconds in times.items():
        entry, _, number = step.rpartition("/") if isinstance(step, str) else ("", "", "")
        if not entry or not _NUMBER.fullmatch(number):
            raise ArgumentError(f"times of {step!r}: name a step as 'main/12', as Profile.seconds() does")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ArgumentError(f"times of '{step}': {seconds!r} is no number of seconds")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ArgumentError(f"times of '{step}': {seconds!r} is no time in seconds")
        found.setdefault(entry, {})[int(number)] = float(seconds)
    return found
