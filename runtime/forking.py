"""Locks across fork: in a child, no other thread is left to release a lock."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Locked(Protocol):
    """An object with a lock that only calls in progress hold."""

    _lock: threading.Lock


_owners: weakref.WeakSet[Locked] = weakref.WeakSet()


def free_after_fork(owner: Locked) -> None:
    """Gives the owner a new lock in every child process."""
    _owners.add(owner)


def _free_all() -> None:
    for owner in list(_owners):
        owner._lock = threading.Lock()


os.register_at_fork(after_in_child=_free_all)
