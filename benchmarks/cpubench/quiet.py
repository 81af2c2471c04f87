"""Whether other processes took the cores while something was measured, and measuring again where they did.

/proc/stat has the busy time of each core, in ticks of 10 ms, and the time that the hypervisor gave to other machines
("steal").  What is left of both after the processor time of the benchmark's own processes was taken by others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SHARE = 0.03
"""A measurement is disturbed if others took more than this share of the cores' time …"""

SECONDS = 0.05
"""… and more than this: ticks and the processes' own clocks differ by up to a tick for each core at either end."""

STAT = Path("/proc/stat")
NAMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Noise:
    """`seconds` of processor time that others took of `cores` during `wall` seconds; None: /proc/stat is not there."""

    seconds: float | None
    wall: float
    cores: int

    @property
    def share(self) -> float:
        return 0.0 if self.seconds is None else self.seconds / max(self.wall * self.cores, 1e-9)

    @property
    def disturbed(self) -> bool:
        return self.seconds is not None and self.seconds > SECONDS and self.share > SHARE


def busy_seconds(text: str, cores: frozenset[int], ticks: int) -> float:
    """The busy time of these cores since the machine started, from the text of /proc/stat."""
    total = 0
    for line in text.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            of = dict(zip(NAMES, map(int, values), strict=False))
            total += sum(of.values()) - of["idle"] - of["iowait"]
    return total / ticks


class Watch:
    """Of the cores that this process may use. `own` returns the processor time of the benchmark's processes."""

    def __init__(self, own: Callable[[], float]) -> None:
        self.own, self.cores = own, frozenset(os.sched_getaffinity(0))

    def _now(self) -> tuple[float | None, float, float]:
        try:
            busy = busy_seconds(STAT.read_text(), self.cores, os.sysconf("SC_CLK_TCK"))
        except FileNotFoundError:
            busy = None
        return busy, self.own(), time.perf_counter()

    def start(self) -> Callable[[], Noise]:
        """The function that is returned says what happened since."""
        before = self._now()

        def stop() -> Noise:
            busy, own, at = self._now()
            wall, cores = at - before[2], len(self.cores)
            if busy is None or before[0] is None:
                return Noise(None, wall, cores)
            return Noise(max(0.0, busy - before[0] - (own - before[1])), wall, cores)

        return stop


def until_quiet(measure: Callable[[], tuple[Found, Noise]], tries: int) -> tuple[Found, Noise, int]:
    """(what was found, the noise, how many times it was measured): the first time without a disturbance, or after
    `tries` times the one in which others took the smallest share, which is then still marked as disturbed."""
    best: tuple[Found, Noise] | None = None
    for count in range(1, tries + 1):
        found, noise = measure()
        if best is None or noise.share < best[1].share:
            best = found, noise
        if not noise.disturbed:
            return found, noise, count
    assert best is not None
    return *best, tries
