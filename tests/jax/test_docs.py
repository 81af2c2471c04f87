"""The page about functions of JAX: its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = np.random.default_rng(0).standard_normal((2, 300, 64)).astype(np.float32)
PAGE = Path(__file__).parents[2] / "docs" / "doors.md"


def test_the_example_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["y"].shape == (3, 64)
    assert np.allclose(names["y"], names["reference"], rtol=1e-5)
    (inside,) = (each for each in blocks if "qc.jax_callable" in each)
    exec(inside, names)
    assert np.allclose(names["step"](np.ones((3, 64), np.float32)), np.tanh(names["y"]), rtol=1e-5)
    assert [row.format for row in names["prog"].ledger] == ["nf4:block=64"] * 2


@pytest.mark.slow
def test_the_example_of_calibration_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (calibrated,) = (each for each in blocks if "calibrate=inputs" in each)
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    exec(calibrated, names | {"x": DATA[0], "inputs": [DATA[0], (DATA[1],)]})
