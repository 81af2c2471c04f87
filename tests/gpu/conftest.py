"""Loads the modules beside the tests: with importlib mode pytest puts no folder on sys.path."""

from __future__ import annotations

from types import ModuleType

import pytest
from by_path import load

from qcompiler.runtime.backends import registry

collect_ignore = [] if registry.is_available("cuda:0") else ["test_conformance_gpu.py"]
"""What only hardware can run is collected only there (`make gpu-check`); its sim counterpart runs everywhere."""


@pytest.fixture(scope="session")
def conformance() -> ModuleType:
    return load("tests/gpu/conformance.py")


@pytest.fixture(scope="session")
def devices() -> ModuleType:
    return load("tests/gpu/devices.py")
