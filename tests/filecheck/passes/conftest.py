"""`pytest tests/filecheck/passes --update-goldens` writes what the passes make now into the CHECK lines."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite the CHECK lines of the pass goldens")
