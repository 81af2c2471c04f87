"""Progress of long work: on stderr, or to a function of the caller's.

    with Stages(23, progress=print):          # api.qcompile; `progress` may be None
        stage("export")                       # code below reports the stage
        with Progress("packing weights", total) as progress:
            progress.step(nbytes)

Bytes come with the rate and the time left.  After two seconds a terminal shows bars; elsewhere a line names the work,
and another follows every five seconds.
`QC_QUIET=1` silences it; stdout is never used.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from qcompiler.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EVERY = 5.0
"""Seconds between two lines about one piece of work, if stderr is not a terminal."""

BAR_AFTER = 2.0
"""Seconds before the first output: shorter work prints nothing."""


def note(text: str) -> None:
    if not is_quiet():
        print(f"qcompiler: {text}", file=sys.stderr, flush=True)


@functools.cache
def note_once(text: str) -> None:
    """Prints a note once per process."""
    note(text)


def is_quiet() -> bool:
    return bool(os.environ.get("QC_QUIET"))


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A stage of a compile at its beginning: number `number` of `of`, `seconds` after the compile began.

    `left` is the estimated number of seconds until the stage ends, where there is an estimate, and `rate` is what the
    estimate rests on, in words.
    """

    stage: str
    number: int
    of: int
    seconds: float
    left: float | None = None
    rate: str = ""

    def __str__(self) -> str:
        return f"{self.stage} ({self.where})"

    @property
    def where(self) -> str:
        """`stage 3 of 31, 12 s, about 5 s left at 40 kB/s`."""
        place = f"stage {self.number} of {self.of}, " if self.of > 1 else ""
        rate = f" at {self.rate}" if self.rate else ""
        left = f", about {human_seconds(self.left)} left{rate}" if self.left is not None else ""
        return f"{place}{self.seconds:.0f} s{left}"


OnStep = Callable[[Step], None]

_CURRENT: ContextVar[Stages | None] = ContextVar("qcompiler_stages", default=None)


def stage(name: str) -> None:
    """Reports the beginning of a stage to the current `Stages`, if there is one."""
    if (current := _CURRENT.get()) is not None:
        current.begin(name)


@contextmanager
def expecting(what: str, seconds: float | None, rate: str = "") -> Iterator[None]:
    """While it is entered, the current stage shows the time left: it is expected to take so many seconds more.

    `rate` is what that rests on, such as "40 kB/s".  Without a current stage, `what` is one of its own.  None for
    work that cannot be estimated.
    """
    current = _CURRENT.get()
    if current is not None:
        current.expect(seconds, rate)
        try:
            yield
        finally:
            current.expect(None)
        return
    with Stages(1) as alone:
        alone.begin(what)
        alone.expect(seconds, rate)
        yield


class Stages:
    """Follows work of a known number of stages. `progress` is called as each begins; its exceptions end the work."""

    def __init__(self, total: int, progress: OnStep | None = None) -> None:
        self._total, self._progress = total, progress
        self._began = time.monotonic()
        self._name, self._number = "start", 0
        self._done = threading.Event()
        self._bar: TaskID | None = None
        self._expected: tuple[float, str] | None = None  # one attribute, since the speaker reads it at any time

    def __enter__(self) -> Stages:
        self._speaker = threading.Thread(target=self._speak, name="qcompiler-progress", daemon=True)
        try:  # Ctrl-C may come while the thread starts: then __exit__ is not called
            if not is_quiet():
                self._speaker.start()
            self._token = _CURRENT.set(self)
        except BaseException:
            self._done.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        self._done.set()
        if self._speaker.ident is not None:
            self._speaker.join()

    def begin(self, name: str) -> None:
        """The next stage begins."""
        self._name, self._number, self._expected = name, self._number + 1, None
        if self._bar is not None:
            BARS.update(self._bar, self._number - 1, self.step.where, name)
        if self._progress is not None:
            self._progress(self.step)

    def expect(self, seconds: float | None, rate: str = "") -> None:
        """The present stage is expected to take so many seconds more, by a rate; None if that is not known."""
        self._expected = None if seconds is None else (time.monotonic() + seconds, rate)

    @property
    def step(self) -> Step:
        now, expected = time.monotonic(), self._expected
        seconds = now - self._began
        if expected is None or expected[0] <= now:  # longer than expected: no time left would be true
            return Step(self._name, self._number, self._total, seconds)
        until, rate = expected
        return Step(self._name, self._number, self._total, seconds, until - now, rate)

    def _speak(self) -> None:
        """Waits for two seconds, then speaks until the work is done."""
        if self._done.wait(BAR_AFTER):
            return
        if not sys.stderr.isatty():
            note(str(self.step))
            while not self._done.wait(EVERY):
                note(str(self.step))
            return
        self._bar = BARS.add(self._name, self._total)
        BARS.update(self._bar, self._number - 1, self.step.where, self._name)
        while not self._done.wait(1.0):
            BARS.update(self._bar, self._number - 1, self.step.where, self._name)
        BARS.remove(self._bar)


# --- bytes -----------------------------------------------------------------------------------------------------------


class Progress:
    """Counts bytes of a long piece of work; any thread may.

    A total that is 0, or less than what is done, is not known: then neither it nor a time left is told.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not is_quiet():
            self._timer = threading.Timer(BAR_AFTER, self._show)
            self._timer.daemon = True
            try:  # Ctrl-C may come while the thread starts: then __exit__ is not called
                self._timer.start()
            except BaseException:
                self._timer.cancel()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            bar, self._timer, self._bar = self._bar, None, None
        if bar is not None:
            BARS.remove(bar)

    def step(self, nbytes: int) -> None:
        """`nbytes` more bytes are done."""
        with self._lock:
            self._reached(self._done + nbytes)

    def reach(self, nbytes: int) -> None:
        """`nbytes` bytes are done in total: for work of which only parts were counted."""
        with self._lock:
            self._reached(nbytes)

    @property
    def _far(self) -> str:
        taken = time.monotonic() - self._began
        rate = f", {human_bytes(int(self._done / taken))}/s" if self._done and taken > 0 else ""
        total = f" of {human_bytes(self._total)}" if self._is_known else ""
        return f"{human_bytes(self._done)}{total}{rate}{self._left}"

    @property
    def _is_known(self) -> bool:
        """Whether the total can be true."""
        return self._total > 0 and self._done <= self._total

    @property
    def _left(self) -> str:
        """The time that the rest takes at the mean rate up to now; nothing before the first and behind the last."""
        if not 0 < self._done < self._total:
            return ""
        left = (time.monotonic() - self._began) * (self._total - self._done) / self._done
        return f", {human_seconds(left)} left"

    def _reached(self, done: int) -> None:
        self._done = done
        if self._timer is not None:
            if self._bar is not None:
                BARS.update(self._bar, done, self._far)
            return
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            note(f"{self._what}: {self._far}")

    def _show(self) -> None:
        with self._lock:
            if self._timer is None:  # finished meanwhile
                return
            self._bar = BARS.add(self._what, self._total or None)
            BARS.update(self._bar, self._done, self._far)


class Counted(Progress):
    """Counts things of equal work, such as tokens; text tells how many are done, the rate, and the time left."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        super().__init__(what, total)
        self._unit = unit

    @property
    def _far(self) -> str:
        taken = time.monotonic() - self._began
        rate = f", {_number(self._done / taken)}/s" if self._done and taken > 0 else ""
        total = f" of {self._total}" if self._is_known else ""
        return f"{self._done}{total} {self._unit}{rate}{self._left}"


def _number(rate: float) -> str:
    """Three figures, `0.5`, `12.3`, or a whole number, `123,400` instead of `1.23e+05`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


class Runs(Counted):
    """Counts runs whose work differs: `work` is the work of each."""

    def __init__(self, what: str, work: Sequence[int]) -> None:
        super().__init__(what, sum(work), "runs")
        self._runs, self._of = 0, len(work)

    def step(self, nbytes: int) -> None:
        """One more run is done, of so much work."""
        self._runs += 1
        super().step(nbytes)

    @property
    def _far(self) -> str:
        return f"{self._runs} of {self._of} runs{self._left}"


# --- a terminal ------------------------------------------------------------------------------------------------------


class _Bars:
    """The bars on the terminal: one display for all running work, as long as there is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Bars | None = None

    def add(self, what: str, total: int | None) -> TaskID:
        with self._lock:
            if self._bars is None:
                self._bars = _display()
                self._bars.start()
            return self._bars.add_task(what, total=total, far="")

    def update(self, bar: TaskID, done: int, far: str, what: str | None = None) -> None:
        with self._lock:
            if self._bars is not None:
                self._bars.update(bar, completed=done, far=far, description=what)

    def remove(self, bar: TaskID) -> None:
        with self._lock:
            if self._bars is None:
                return
            self._bars.refresh()  # shows the final state
            self._bars.remove_task(bar)
            if not self._bars.task_ids:
                self._bars.stop()
                self._bars = None


def _display() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    # Names of files may have brackets, which are no markup.
    what, far = (TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[far]}"))
    # rich prints above the bars what others write while they are shown, on stderr: not if that belongs into a file.
    above = sys.stdout is not None and sys.stdout.isatty()
    return Bars(what, BarColumn(), far, console=Console(stderr=True), transient=True, redirect_stdout=above)


BARS = _Bars()
