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
    found = {item.nodeid for item in items}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    whole = {file for file in {name.partition("::")[0] for name in listed} if _is_whole(items, file)}
    if unknown := sorted(name for name in listed - found if name.partition("::")[0] in whole):
        raise pytest.UsageError(f"tests/only_in_full.txt names no test: {', '.join(unknown)}")


def pytest_collection_finish() -> None:
    """Imports of torch and transformers leave a million objects that live as long as the process.

    The collector of reference cycles walked over them hundreds of times a run: a ninth of the time of an export.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _is_whole(items: Sequence[pytest.Item], file: str) -> bool:
    """Whether the run was asked for this file or a folder above it, and not for single tests of it."""
    mine = [item for item in items if item.nodeid.startswith(f"{file}::")]
    return bool(mine) and not any("::" in arg for arg in mine[0].config.args)
