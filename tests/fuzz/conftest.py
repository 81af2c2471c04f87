"""`graphfuzz` is importable from the tests of this folder, and kernels are compiled into a cache of this test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test never meets another run's libraries, and leaves none behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("QC_ISA", raising=False)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Eager torch on tensors this small loses time with more, and sums in an order that depends on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
