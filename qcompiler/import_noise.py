"""Keeps away what torchao says when a package that the user named imports it.

transformers imports torchao, where it is installed, together with its quantisers, and so does diffusers.  torchao then
logs that libraries of its own do not fit this machine, and torch that classes of torchao are registered in an old way:
four lines about a package that neither the user nor qcompiler imported.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import FrameType

_LOGGERS = ("torchao", "torch.utils._pytree")
_IMPORTERS = frozenset({"transformers", "diffusers", "peft", "accelerate"})
_BETWEEN = frozenset({"logging", "torch", "torchao", "importlib", "qcompiler"})
"""Packages whose frames lie between a record and the module that caused the import."""


@contextlib.contextmanager
def without_import_noise() -> Iterator[None]:
    """Drops these lines within the block. What torchao logs when it runs, or when the user's own code imports it,
    stays."""
    noise = _Noise()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    try:
        for logger in loggers:
            logger.addFilter(noise)
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(noise)


class _Noise(logging.Filter):
    """Refuses a record that is logged while one of `_IMPORTERS` imports another module."""

    def filter(self, record: logging.LogRecord) -> bool:
        frame: FrameType | None = sys._getframe(1)
        importing = False
        while frame is not None:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            importing = importing or package == "importlib"
            if package not in _BETWEEN:
                return not (importing and package in _IMPORTERS)
            frame = frame.f_back
        return True
