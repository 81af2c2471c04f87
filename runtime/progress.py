"""What is said on stderr of work that takes long. `QC_QUIET=1` silences it; stdout is never touched."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from qcompiler.units import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

EVERY = 5.0
"""Seconds between two lines about one piece of work, where stderr is no terminal."""

BAR_AFTER = 2.0
"""Seconds after which a terminal shows a bar."""


def note(text: str) -> None:
    if not os.environ.get("QC_QUIET"):
        print(f"qcompiler: {text}", file=sys.stderr, flush=True)


class Progress:
    """Counts bytes of a long piece of work; any thread may. Short work says nothing.

    with Progress("packing weights", total) as progress:
        progress.step(nbytes)

    On a terminal work of more than two seconds shows a bar, with the rate and the time that is left; elsewhere a line
    is printed every five seconds.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._said = time.monotonic()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bar: tuple[Bar, TaskID] | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and not os.environ.get("QC_QUIET"):
            self._timer = threading.Timer(BAR_AFTER, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            bar, self._timer, self._bar = self._bar, None, None
        if bar is not None:
            bar[0].stop()

    def step(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        with self._lock:
            self._reached(self._done + nbytes)

    def reach(self, nbytes: int) -> None:
        """`nbytes` are done in all: for work of which only parts were counted."""
        with self._lock:
            self._reached(nbytes)

    def _reached(self, done: int) -> None:
        self._done = done
        if self._timer is not None:
            if self._bar is not None:
                self._bar[0].update(self._bar[1], completed=done)
            return
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            note(f"{self._what}: {human_bytes(done)} of {human_bytes(self._total)}")

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with self._lock:
            if self._timer is None:  # finished meanwhile
                return
            bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar = bar, bar.add_task(self._what, total=self._total, completed=self._done)
            bar.start()
