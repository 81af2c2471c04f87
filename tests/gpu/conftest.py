"""Loads the modules beside the tests: with importlib mode pytest puts no folder on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def beside(name: str) -> ModuleType:
    """A module of this folder."""
    full = f"qcompiler_gpu_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def conformance() -> ModuleType:
    return beside("conformance")


@pytest.fixture(scope="session")
def devices() -> ModuleType:
    return beside("devices")
