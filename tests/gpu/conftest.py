"""Loads the modules beside the tests: with importlib mode pytest puts no folder on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qcompiler.runtime.backends import registry

collect_ignore = [] if registry.is_available("cuda:0") else ["test_conformance_gpu.py"]
"""What only hardware can run is collected only there (`make gpu-check`); its sim counterpart runs everywhere."""


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
