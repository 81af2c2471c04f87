"""JSON from untrusted files: config.json, headers of safetensors files, indices of shards, states of layers.

`json.loads` accepts text that no writer intends: a key twice (the last one wins), integers of any length, lone
surrogates, which cannot be printed.  It raises a RecursionError for deeply nested brackets.  This module refuses all of
these with an error that names them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from qcompiler.errors import QCompilerError

MAX_FILE = 64 << 20
"""Maximum bytes of a JSON file. The index of a model with a hundred thousand tensors has 10 MB."""
MAX_DIGITS = 40
MAX_SHOWN = 200


def read_json_object(path: Path, error: type[QCompilerError]) -> dict[str, Any]:
    """The JSON object in a file; `error`, naming the file, for anything else."""
    return json_object(read_small_file(path, error), str(path), error)


def read_small_file(path: Path, error: type[QCompilerError], limit: int = MAX_FILE) -> bytes:
    """A regular file's bytes. `error` for a file that is missing, not regular (a pipe, a device), or too large."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise error(f"{path} has {size:,} bytes, more than the limit of {limit:,} for such a file")
            return file.read(limit)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise error(f"cannot read {path}: {cause}") from cause


def open_regular(path: Path) -> BufferedReader:
    """The file, opened for reading without waiting for a writer. OSError if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"'{path}' is no regular file")
    return os.fdopen(descriptor, "rb")


def json_object(raw: bytes, where: str, error: type[QCompilerError]) -> dict[str, Any]:
    """The JSON object in `raw`; `error`, beginning with `where`, for anything else."""
    try:
        text = raw.decode()
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        if "\\u" in text:
            _refuse_lone_surrogates(text)
    except RecursionError as cause:
        raise error(f"{where} is nested too deeply") from cause
    except ValueError as cause:  # JSONDecodeError, UnicodeDecodeError, and ours
        raise error(f"{where} is no JSON: {shown(cause)}") from cause
    if not isinstance(found, dict):
        raise error(f"{where} is no JSON object: {shown(found)}")
    return found


def shown(value: object) -> str:
    """A value for a message, cut if it is long."""
    if isinstance(value, dict | list | tuple) and len(value) > 16:
        return f"{type(value).__name__} of {len(value)}"
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it holds the key {shown(twice)} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits")
    return int(digits)


_ESCAPES = re.compile(
    r"(?:\\\\)+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, pairs of surrogates, and (the group) halves of a pair."""


def _refuse_lone_surrogates(text: str) -> None:
    """ValueError for half of a surrogate pair in an escape: no text can hold it, and it cannot be printed."""
    for match in _ESCAPES.finditer(text):
        if match[1]:
            raise ValueError(f"it holds half of a character, {match[1]}")


__all__ = ["json_object", "open_regular", "read_json_object", "read_small_file", "shown"]
