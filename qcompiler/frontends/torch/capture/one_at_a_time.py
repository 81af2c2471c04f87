"""Models may be compiled by several threads at once: what they share is used by one after another."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import nn

TRACING = threading.RLock()
"""Held while a model is traced, and while its graph is rewritten and imported: torch keeps what traces for the whole
process, so that a size that another thread computes would become a node of this model's graph; and replaced functions
of torch and of transformers serve all threads. Passes and kernels of several compilations go on meanwhile."""

_found = threading.Lock()
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """For as long as a model of transformers is changed or traced: a thread that asks for the same model, or for a
    module that holds it, waits. It is asked for before `TRACING`."""
    with _found:
        parts = [each for each in model.modules() if hasattr(type(each), "set_attn_implementation")]
        # all threads take them in one order
        locks = [_locks.setdefault(each, threading.RLock()) for each in sorted(parts, key=id)]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


__all__ = ["TRACING", "alone"]
