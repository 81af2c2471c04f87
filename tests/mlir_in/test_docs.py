"""The page about MLIR: its first example runs as it stands (tests/mlir runs the one of torch-mlir)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "doors.md"


def test_the_example_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = (each for each in blocks if "mlir_module()" in each)
    names: dict[str, Any] = {}
    exec(block, names)
    assert np.allclose(names["y"], 128.0, rtol=1e-5)  # tanh(64) is 1
    assert {row.parameters[0]: row.format for row in names["prog"].ledger} == {
        "params.up": "nf4:block=64", "params.down": "nf4:block=64",
    }  # fmt: skip
