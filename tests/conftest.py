"""Marks the tests of tests/only_in_full.txt as slow; says how `make test` draws examples; keeps OpenMP and the garbage
collector from idle work.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).resolve().parent

# Before torch is imported: threads of OpenMP sleep between two parallel regions.  They wait in a loop by default, which
# took nine tenths of the processor time of eager models of this size, and the core of the other test process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("repeatable", derandomize=True)
"""Every run draws the same examples: `make test` fails for what changed in the tree, and not by chance.

The full run, and pytest without the option, draw new ones.
"""


def only_in_full() -> frozenset[str]:
    lines = (HERE / "only_in_full.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """UsageError for a name of the list whose file was collected as a whole, and which no test has."""
    listed = only_in_full()
    by_name = {item.nodeid: item for item in items}
    for name in listed & by_name.keys():
        by_name[name].add_marker(pytest.mark.slow)
    # A file is there as a whole if the run was asked for it or a folder above it, and not for single tests of it.
    single = bool(items) and any("::" in arg for arg in items[0].config.args)
    files = set() if single else {name.partition("::")[0] for name in by_name}
    if unknown := sorted(name for name in listed - by_name.keys() if name.partition("::")[0] in files):
        raise pytest.UsageError(f"tests/only_in_full.txt names no test: {', '.join(unknown)}")


def pytest_collection_finish() -> None:
    """Imports of torch and transformers leave a million objects that live as long as the process.

    The collector of reference cycles walked over them hundreds of times a run: a ninth of the time of an export.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
