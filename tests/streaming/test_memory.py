"""How much anonymous memory a compile takes: never a second copy of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from by_path import environment, load

SLACK = {"linear": 6 << 20, "turned": 6 << 20, "conv": 14 << 20}
"""Bytes for the trace, the IR and the tiles of the encoders, whatever the weights: measured 2 to 5 MiB, and 8 to 11 for
the larger graphs of convolutions."""


measure = load("tests/streaming/measure.py")


def run(tmp_path: Path, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-P", str(measure.__file__), str(tmp_path), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=1200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def measured(tmp_path: Path, kind: str, source: str, layers: int, width: int, workdir: str) -> list[dict[str, Any]]:
    if source == "shards":
        measure.write(tmp_path, measure.filled(kind, layers, width))
    return [json.loads(line) for line in run(tmp_path, kind, source, layers, width, workdir).splitlines()]


def check(kind: str, facts: dict[str, Any]) -> None:
    bound = 2 * facts["largest"] + SLACK[kind]
    assert bound < facts["model"], "a copy of the weights must not fit into the bound"
    assert facts["growth"] <= bound, facts


@pytest.mark.parametrize("source", [pytest.param("shards", marks=pytest.mark.slow), "module"])
@pytest.mark.slow
def test_a_compile_takes_two_of_the_largest_tensor_beside_the_model(tmp_path: Path, source: str) -> None:
    """About 30 MB of weights in sixteen matrices: one that is kept twice breaks the bound."""
    facts = measured(tmp_path, "turned", source, 16, 700, str(tmp_path / "work"))
    assert [each["quant"] for each in facts] == ["nf4", None]
    for each in facts:
        check("turned", each)


@pytest.mark.slow
@pytest.mark.parametrize("workdir", [True, False], ids=["workdir", "no workdir"])
@pytest.mark.parametrize("source", ["shards", "module"])
@pytest.mark.parametrize("kind", ["linear", "turned", "conv"])
def test_the_bound_holds_for_three_hundred_megabytes(tmp_path: Path, kind: str, source: str, workdir: bool) -> None:
    """With or without a working folder; a second copy of the packed weights alone (42 MB) breaks the bound, too."""
    facts = measured(tmp_path, kind, source, 32, 1536, str(tmp_path / "work") if workdir else "")
    for each in facts:
        check(kind, each)
        assert 2 * each["largest"] + SLACK[kind] < each["packed"]
