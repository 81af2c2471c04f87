"""Ctrl-C only at safe moments.

    with uninterrupted:
        …                         # SIGINT is recorded here, and raised at the end of the outermost block
        interruption_point()      # or here, where a long piece of work may stop

Python runs its handler of SIGINT between any two bytecodes of the main thread, also between taking a lock and the `try`
that would release it.  Inside the block another handler is installed, which only records the signal.  If SIGINT has no
Python handler (it is ignored, or ends the process), nothing is changed.  Only KeyboardInterrupt is deferred: the
handlers of other signals may still raise.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class _Uninterrupted:
    """The process's only block; it nests. On other threads, which are never interrupted, it does nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._noted = False
        self._handler: Any = None
        self._thread = 0
        os.register_at_fork(after_in_child=self._forget_after_fork)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._depth:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):
                handler = None
            self._noted, self._thread = False, threading.get_ident()
            if handler is not None:
                signal.signal(signal.SIGINT, self._note)  # from here on nothing below can be interrupted
            self._handler = handler
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread() or not self._depth:
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, noted, self._handler = self._handler, self._noted, None
        signal.signal(signal.SIGINT, handler)
        if noted or self._noted:
            handler(signal.SIGINT, sys._getframe())

    def point(self) -> None:
        """Raises the recorded interrupt."""
        if self._noted and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._noted = False
            self._handler(signal.SIGINT, sys._getframe())

    def _forget_after_fork(self) -> None:
        """In a forked child of another thread, no thread is left to end the block."""
        if self._depth and threading.get_ident() != self._thread:
            self._depth = 0
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
                self._handler = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


uninterrupted = _Uninterrupted()
interruption_point = uninterrupted.point
