"""The example of docs/large-models.md runs: plan, build, load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_plans_builds_and_runs_within_its_bound() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / "large_model.py"), "demo"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    planned, built = re.findall(r"^recipe nf4: .*$", done.stdout, re.MULTILINE)
    assert planned == built
    grown, largest = map(float, re.findall(r"([\d.]+) MB beside the start; .* ([\d.]+) MB", done.stdout)[0])
    assert grown <= 2 * largest + 20  # MB; the parts of torch that the first compile loads are among it
    assert "torch.Size([1, 5, 4096])" in done.stdout
