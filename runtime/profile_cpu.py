"""Times the steps of a call on the CPU: each launch by itself, and what no step accounts for.

The profile runs the kernels of the loaded library with the same operands and in the same order as the compiled entry
point.  A loop in C calls them and reads the clock between two steps, which costs about 30 ns a step.  Regions and tasks
are counted in rounds of their own, since a reading at each task costs more.  The rounds take turns with ordinary calls,
so that what else the machine does touches all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from qcompiler.errors import ArgumentError
from qcompiler.plan.plan import Plan
from qcompiler.runtime.executor import Addressed, TorchStep
from qcompiler.runtime.native import kernel_error
from qcompiler.runtime.support import profiler

if TYPE_CHECKING:
    from qcompiler.runtime.backends.cpu import CpuKernel

WARM_UP = 3


class Step(ctypes.Structure):
    """`qc_step` of pool.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("operands", ctypes.c_void_p), ("symbols", ctypes.c_void_p))


class Figures(ctypes.Structure):
    """`qc_figures` of pool.cpp."""

    _fields_ = (
        ("ns", ctypes.c_int64),
        ("regions", ctypes.c_int64),
        ("tasks", ctypes.c_int64),
        ("task_ns", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Timing:
    """A step's number, the place of its kernel, and medians over the rounds in microseconds."""

    step: int
    us: float
    regions: int
    tasks: int
    task_us: float


@dataclass(frozen=True)
class Timings:
    """What the rounds gave: medians of the whole call, of the compiled function alone, of all its steps one by one, and
    of each step."""

    call_us: float
    entry_us: float
    round_us: float
    steps: tuple[Timing, ...]


def time_steps(walk: Walk, rounds: int, *, call: Callable[[], float], entry: Callable[[], float]) -> Timings:
    """Times the steps of a bound call.  `call` and `entry` run the whole call, and the compiled function alone, and
    return the seconds they took; `entry` leaves the arenas as the steps here expect them."""
    turns = [(call(), entry(), walk.run(counts=False), walk.run(counts=True)) for _ in range(WARM_UP + rounds)]
    calls, entries, timed, counted = zip(*turns[WARM_UP:], strict=True)
    steps = [
        Timing(
            number, median(each[place].ns for each in timed) / 1e3, counted[-1][place].regions,
            counted[-1][place].tasks, median(each[place].task_ns for each in counted) / 1e3,
        )
        for place, number in enumerate(walk.numbers)
    ]  # fmt: skip
    round_us = median(sum(step.ns for step in each) for each in timed) / 1e3
    return Timings(median(calls) * 1e6, median(entries) * 1e6, round_us, tuple(steps))


def check_rounds(rounds: int) -> None:
    """ArgumentError unless there are rounds."""
    if rounds < 1:
        raise ArgumentError(f"rounds={rounds}: a profile takes one round or more")


class Walk:
    """The steps of one bound call: arrays for C, one for each run of steps between torch calls."""

    def __init__(self, plan: Plan, steps: Sequence[Addressed | TorchStep], context: Any) -> None:
        self._plan = plan
        self._context = context
        self._call = profiler()
        self._kept: list[Any] = []
        self._parts: list[Any] = []
        self.numbers: list[int] = []
        """The number in the entry point of each step."""
        for native, part in groupby(steps, key=lambda step: isinstance(step, Addressed)):
            group = list(part)
            if native:
                self._parts.append((Step * len(group))(*(self._step(cast(Addressed, step)) for step in group)))
            else:
                self._parts += group
            self.numbers += [step.number for step in group]

    def _step(self, step: Addressed) -> Step:
        kernel = cast("CpuKernel", step.kernel).address if step.kernel is not None else None
        return Step(kernel, self._array(ctypes.c_void_p, step.operands), self._array(ctypes.c_int64, step.values))

    def _array(self, of: Any, values: Sequence[int]) -> int:
        array = (of * max(len(values), 1))(*values)
        self._kept.append(array)
        return ctypes.addressof(array)

    def run(self, *, counts: bool) -> list[Figures]:
        """Runs all steps once."""
        found: list[Figures] = []
        for part in self._parts:
            if isinstance(part, TorchStep):
                began = perf_counter()
                part.run(self._context)
                found.append(Figures(ns=int((perf_counter() - began) * 1e9)))
                continue
            figures = (Figures * len(part))()
            addresses = [ctypes.addressof(each) for each in (part, self._context, figures)]
            if self._call(addresses[0], len(part), addresses[1], addresses[2], counts):
                raise kernel_error(self._context, self._plan)
            found += list(figures)
        return found
