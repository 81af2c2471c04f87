"""The identity of an emitter: a digest of the files that decide a kernel's text. A changed template, record or format
never meets an old build."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

_SHARED = ("qcompiler.kernels", "qcompiler.plan", "qcompiler.formats")
_OTHERS = {"cpu": ("cuda", "sim"), "cuda": ("cpu", "sim")}
"""Folders of the kernels that an emitter does not read."""


@functools.cache
def emitter_version(target: Literal["cpu", "cuda"]) -> str:
    """Sixteen hexadecimal digits."""
    state = hashlib.sha256()
    for package in _SHARED:
        for name, data in sorted(_texts(resources.files(package), "", _OTHERS[target])):
            state.update(f"{package}/{name}".encode() + b"\0" + data)
    return state.hexdigest()[:16]


def _texts(folder: Traversable, prefix: str, others: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for file in folder.iterdir():
        if file.is_dir() and file.name not in (*others, "__pycache__"):
            yield from _texts(file, f"{prefix}{file.name}/", others)
        elif file.name.endswith((".py", ".h", ".cpp", ".cuh")):
            yield prefix + file.name, file.read_bytes()
