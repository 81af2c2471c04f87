"""How many launches a layer takes, on the CPU and on a GPU: today's numbers are upper bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from by_path import load

MOST = {
    "llama": 6, "mistral": 6, "qwen3": 11, "gemma3": 15, "phi3": 6, "gpt2": 6, "neox": 6, "mixtral": 14,
    "qwen3-moe": 18, "opt": 7, "bert": 7, "vit": 7, "flux-double": 27, "flux-single": 14,
}  # fmt: skip
"""Steps of one layer, on the target that takes more. docs/performance.md says what was aimed at and is not reached."""

QUICK = ("llama",)
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MOST]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_takes_no_more_launches_than_before(name: str) -> None:
    counts = load("tests/support/launches.py").per_layer(name)
    assert all(0 < count.total() <= MOST[name] for count in counts.values()), counts


def test_the_table_of_the_docs_has_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| \d", page, re.MULTILINE)
    assert {name: max(int(cpu), int(gpu)) for name, cpu, gpu in rows if name in MOST} == MOST
