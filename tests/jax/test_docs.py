"""The page about functions of JAX: its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "doors.md"


def test_the_example_of_the_page_runs() -> None:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["y"].shape == (3, 64)
    assert np.allclose(names["y"], names["reference"], rtol=1e-5)
    assert [row.format for row in names["prog"].ledger] == ["nf4:block=64"] * 2
