"""Lines on stderr for work that takes long. `QC_QUIET=1` silences them; stdout is never touched."""

from __future__ import annotations

import os
import sys
import time

EVERY = 5.0
"""Seconds between two lines about one piece of work."""


def note(text: str) -> None:
    if not os.environ.get("QC_QUIET"):
        print(f"qcompiler: {text}", file=sys.stderr, flush=True)


class Progress:
    """Counts bytes of a long piece of work, and says every few seconds how far it is; short work says nothing."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._said = time.monotonic()

    def step(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            note(f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB")
