"""Native code as bytes: read from the user's cache, compared with its digest, and loaded from these same bytes.

A library is mapped from memory that no other process can write (a sealed memfd), never from the file it was read from.
So the verified bytes are the bytes that run, and cutting or overwriting the file later does not affect the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcompiler.errors import CompileFailedError
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import keep, read_own


@dataclass(frozen=True)
class Code:
    """Native code: its path, and its verified bytes."""

    path: Path
    data: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read_code(path: Path, sha256: object) -> Code | None:
    """The code in a file of the cache, if it has this digest."""
    data = read_own(path)
    if data is None or hashlib.sha256(data).hexdigest() != sha256:
        return None
    return Code(path, data)


def read_record(path: Path) -> dict[str, Any]:
    """A record of the cache: a JSON object. Empty if it is missing or damaged."""
    data = read_own(path)
    if data is None:
        return {}
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def remember(record: Path, code: Code, **facts: str) -> None:
    """Records a library and its digest, so that it is found again without a compiler."""
    keep(record, json.dumps({"library": code.path.name, "sha256": code.sha256, **facts}).encode())


_loaded: dict[str, tuple[ctypes.CDLL, int]] = {}
_loading = threading.Lock()


def load(code: Code) -> ctypes.CDLL:
    """The loaded library: equal bytes once per process, never unloaded. CompileFailedError if the system refuses it."""
    sanitize.require_runtime()
    digest = code.sha256
    with _loading:
        if digest not in _loaded:
            try:
                _loaded[digest] = _open(code)
            except OSError as error:
                raise CompileFailedError(f"cannot load the compiled kernels {code.path}: {error}") from error
        return _loaded[digest][0]


def _open(code: Code) -> tuple[ctypes.CDLL, int]:
    """The library and the descriptor of its memory, which stays open: the loader identifies libraries by name, and the
    name contains the descriptor's number."""
    if not sanitize.wanted() and hasattr(os, "memfd_create"):  # a sanitiser's report reads the file
        with contextlib.suppress(OSError):  # if the system runs no code from memory, load from the user's folder
            descriptor = os.memfd_create(code.path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(code.data)
                fcntl.fcntl(
                    descriptor,
                    fcntl.F_ADD_SEALS,
                    fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
                )
                return ctypes.CDLL(f"/proc/self/fd/{descriptor}"), descriptor
            except BaseException:
                os.close(descriptor)
                raise
    return ctypes.CDLL(str(code.path)), -1
