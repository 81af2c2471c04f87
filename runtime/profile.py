"""Where the time of a call on the CPU goes: each step of the entry point, and what no step accounts for.

    print(program.run.profile(x))            or: qc bench model.qca --profile

The profile runs the kernels of the loaded library with the same operands and in the same order as the compiled entry
point.  A loop in C calls them and reads the clock between two steps, which costs about 30 ns a step.  Regions and tasks
are counted in rounds of their own, since a reading at each task costs more.  The rounds take turns with ordinary calls,
so that what else the machine does touches all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from qcompiler.errors import ArgumentError
from qcompiler.plan.plan import Launch, Plan, Select
from qcompiler.runtime.executor import Addressed, chosen_kernel
from qcompiler.runtime.native import kernel_error
from qcompiler.runtime.support import profiler

if TYPE_CHECKING:
    from qcompiler.runtime.backends.cpu import CpuKernel
    from qcompiler.runtime.binding import Binding
    from qcompiler.runtime.executor import ArenaArray, PlanExecutor

PRODUCTS = ("linear", "grouped_linear", "batch_matmul")
"""Kinds of kernel that are matrix products. Attention, which has products inside, is a kind of its own."""

WARM_UP = 3


class _Step(ctypes.Structure):
    """`qc_step` of pool.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("operands", ctypes.c_void_p), ("symbols", ctypes.c_void_p))


class _Figures(ctypes.Structure):
    """`qc_figures` of pool.cpp."""

    _fields_ = (
        ("ns", ctypes.c_int64),
        ("regions", ctypes.c_int64),
        ("tasks", ctypes.c_int64),
        ("task_ns", ctypes.c_int64),
    )


@dataclass(frozen=True)
class StepProfile:
    """One launch or copy: its number in the entry point, and medians over the rounds.

    `regions` counts the parallel regions that the step opens, `tasks` their tasks; a step without a region runs on the
    calling thread alone.  `task_us` is the time of all tasks on all threads.
    """

    step: int
    kind: str
    kernel: str
    us: float
    regions: int
    tasks: int
    task_us: float


@dataclass(frozen=True)
class KindProfile:
    """All steps of one kind of kernel."""

    kind: str
    launches: int
    regions: int
    tasks: int
    us: float
    share: float
    """The share of the whole call's time."""


@dataclass(frozen=True)
class Profile:
    """An entry point at one size. `call_us` is a call from Python, `entry_us` the compiled function alone."""

    entry: str
    symbols: dict[str, int]
    threads: int
    rounds: int
    call_us: float
    entry_us: float
    steps: tuple[StepProfile, ...]

    @property
    def steps_us(self) -> float:
        return sum(step.us for step in self.steps)

    @property
    def outside_us(self) -> float:
        """The part of a call that no step accounts for: binding arguments, allocating results, calling from Python."""
        return self.call_us - self.steps_us

    @property
    def not_product(self) -> float:
        """The share of the compiled function's time that is not matrix products."""
        return 1 - sum(step.us for step in self.steps if step.kind in PRODUCTS) / self.steps_us if self.steps else 0.0

    def kinds(self) -> list[KindProfile]:
        """The kinds of kernel, by falling time."""
        found = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            own = [step for step in self.steps if step.kind == kind]
            us = sum(step.us for step in own)
            regions, tasks = (sum(getattr(step, name) for step in own) for name in ("regions", "tasks"))
            found.append(KindProfile(kind, len(own), regions, tasks, us, us / self.call_us))
        return sorted(found, key=lambda each: -each.us)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.symbols.items())
        head = f"{self.entry}{f', {sizes}' if sizes else ''}: {self.threads} threads, medians of {self.rounds} rounds"
        rows = [f"{'kind':16}{'launches':>9}{'regions':>9}{'tasks':>9}{'us':>11}{'share':>8}"]
        for each in self.kinds():
            rows.append(
                f"{each.kind:16}{each.launches:9}{each.regions:9}{each.tasks:9}{each.us:11.1f}{each.share:8.1%}"
            )
        counted = [sum(getattr(step, name) for step in self.steps) for name in ("regions", "tasks")]
        for label, us, counts in (
            ("all steps", self.steps_us, (len(self.steps), *counted)),
            ("outside of steps", self.outside_us, ("", "", "")),
            ("the call", self.call_us, ("", "", "")),
        ):
            columns = "".join(f"{count:>9}" for count in counts)
            rows.append(f"{label:16}{columns}{us:11.1f}{us / self.call_us:8.1%}")
        last = (
            f"the compiled entry point alone: {self.entry_us:.1f} us; of the time in steps {self.not_product:.1%} are "
            "not matrix products"
        )
        return "\n".join([head, *rows, last])

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; times in microseconds."""
        return {
            "entry": self.entry, "symbols": self.symbols, "threads": self.threads, "rounds": self.rounds,
            "call_us": self.call_us, "entry_us": self.entry_us, "outside_us": self.outside_us,
            "not_product": self.not_product, "kinds": [asdict(each) for each in self.kinds()],
            "steps": [asdict(each) for each in self.steps],
        }  # fmt: skip


def profile(
    plan: Plan, executor: PlanExecutor, context: Any, arenas: ArenaArray, binding: Binding, *, rounds: int,
    call: Callable[[], float], entry: Callable[[], float],
) -> Profile:  # fmt: skip
    """Times the steps of a bound call.  `call` and `entry` run the whole call, and the compiled function alone, and
    return the seconds they took; `entry` leaves the arenas as the steps here expect them.
    ArgumentError without rounds."""
    if rounds < 1:
        raise ArgumentError(f"rounds={rounds}: a profile takes one round or more")
    point = plan.entries[binding.entry]
    names = {
        number: step.kernel if isinstance(step, Launch) else chosen_kernel(step, binding.symbols)
        for number, step in enumerate(point.steps)
        if isinstance(step, Launch | Select)
    }
    walk = _Walk(plan, executor.addressed(binding, arenas), context)
    turns = [(call(), entry(), walk.run(counts=False), walk.run(counts=True)) for _ in range(WARM_UP + rounds)]
    calls, entries, timed, counted = zip(*turns[WARM_UP:], strict=True)
    templates = {spec.name: spec.template for spec in plan.kernels}
    steps = []
    for place, number in enumerate(walk.numbers):
        kernel = names.get(number, "")
        last = counted[-1][place]
        steps.append(StepProfile(
            number, templates[kernel] if kernel else "copy" if number >= 0 else "torch", kernel,
            median(each[place].ns for each in timed) / 1e3, last.regions, last.tasks,
            median(each[place].task_ns for each in counted) / 1e3,
        ))  # fmt: skip
    return Profile(
        point.name, dict(binding.symbols), context.num_threads, rounds, median(calls) * 1e6, median(entries) * 1e6,
        tuple(steps),
    )  # fmt: skip


class _Walk:
    """The steps of one bound call: arrays for C, one for each run of steps between torch calls."""

    def __init__(self, plan: Plan, steps: Sequence[Addressed | Callable[[Any], None]], context: Any) -> None:
        self._plan = plan
        self._context = context
        self._call = profiler()
        self._kept: list[Any] = []
        self._parts: list[Any] = []
        self.numbers: list[int] = []
        """The number in the plan of each step; -1 for a torch call."""
        for native, part in groupby(steps, key=lambda step: isinstance(step, Addressed)):
            group = list(part)
            if native:
                self._parts.append((_Step * len(group))(*(self._step(cast(Addressed, step)) for step in group)))
            else:
                self._parts += group
            self.numbers += [step.number if isinstance(step, Addressed) else -1 for step in group]

    def _step(self, step: Addressed) -> _Step:
        kernel = cast("CpuKernel", step.kernel).address if step.kernel is not None else None
        return _Step(kernel, self._array(ctypes.c_void_p, step.operands), self._array(ctypes.c_int64, step.values))

    def _array(self, of: Any, values: Sequence[int]) -> int:
        array = (of * max(len(values), 1))(*values)
        self._kept.append(array)
        return ctypes.addressof(array)

    def run(self, *, counts: bool) -> list[_Figures]:
        """Runs all steps once."""
        found: list[_Figures] = []
        for part in self._parts:
            if callable(part):
                began = perf_counter()
                part(self._context)
                found.append(_Figures(ns=int((perf_counter() - began) * 1e9)))
                continue
            figures = (_Figures * len(part))()
            addresses = [ctypes.addressof(each) for each in (part, self._context, figures)]
            if self._call(addresses[0], len(part), addresses[1], addresses[2], counts):
                raise kernel_error(self._context, self._plan)
            found += list(figures)
        return found
