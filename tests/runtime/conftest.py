"""A cache of its own for this test run, and the program `small` (tests/support/hand_plans.py) on this processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hand_plans import Small, small_on_cpu

from qcompiler.runtime import LoadedProgram


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels are compiled into a cache of this test run, so a test never meets another run's libraries."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("cache")
    patch.setenv("QC_CACHE_DIR", str(path))
    patch.delenv("QC_ISA", raising=False)
    patch.delenv("QC_NUM_THREADS", raising=False)
    return path


@pytest.fixture(scope="session")
def small(own_cache: Path) -> Small:
    return small_on_cpu()


@pytest.fixture(scope="session")
def loaded(small: Small) -> Callable[..., object]:
    """`loaded(**options)`: the program made ready to run."""
    return lambda **options: LoadedProgram.from_image(small.image, **options)
