"""Modules that no package holds: files beside tests or in other folders of tests, benchmarks, examples.

    from by_path import load

    zoo = load("tests/models/zoo.py")

Tests are no packages (pytest runs with `--import-mode=importlib`), so that they cannot import each other by name.
`pythonpath` in pyproject.toml lets them import this file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """The module in a file of the repository, made once per process: all who ask share it, and what it remembers."""
    name = "qcompiler_file_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up while it is made
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def environment() -> dict[str, str]:
    """This process's, for one that imports files of tests/support, too."""
    path = [str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
