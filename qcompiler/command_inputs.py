"""What several commands do with their arguments: models from functions, files to write."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from qcompiler.errors import ArgumentError


def from_factory(text: str) -> tuple[Any, Any, Any, Any]:
    """Calls `package.module:function`: (model, args, kwargs, dynamic_shapes); missing trailing items are empty."""
    check_factory(text)
    name, _, attribute = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"cannot find '{text}': {error}") from error
    result = function()
    parts = list(result) if isinstance(result, tuple) else [result]
    model, args, kwargs, dims = (parts + [None] * 4)[:4]
    return model, args or (), kwargs or {}, dims


def check_factory(text: str) -> None:
    """ArgumentError, before any work is done, for a text that does not have the form `package.module:function`."""
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        folder = ": the folder has no config.json, which that of a language model has" * Path(text).is_dir()
        raise ArgumentError(f"'{text}' must be package.module:function{folder}")


def check_writable(path: Path | None) -> None:
    """ArgumentError, before any work is done, for an output file that is a folder or whose folder does not exist."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ArgumentError(f"there is no folder '{path.parent}' to write {path.name} to: make it first")
    if path.is_dir():
        raise ArgumentError(f"'{path}' is a folder; name a file to write")


__all__ = ["check_factory", "check_writable", "from_factory"]
