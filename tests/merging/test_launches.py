"""How many launches a layer takes, on the CPU and on a GPU: today's numbers are upper bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from by_path import load

MOST = {
    "llama": 8, "mistral": 8, "qwen3": 10, "gemma3": 14, "phi3": 8, "gpt2": 8, "neox": 8, "mixtral": 15,
    "qwen3-moe": 16, "opt": 8, "bert": 7, "vit": 7, "flux-double": 23, "flux-single": 12,
}  # fmt: skip
"""Steps of one layer; what was aimed at and is not reached stands in docs/performance.md."""

QUICK = ("llama",)
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MOST]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_takes_no_more_launches_than_before(name: str) -> None:
    counts = load("tests/support/launches.py").per_layer(name)
    assert all(0 < count.total() <= MOST[name] for count in counts.values()), counts


def test_the_table_of_the_docs_has_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| (\d+) \| \d+ \| ", page, re.MULTILINE))
    assert {name: int(count) for name, count in rows.items() if name in MOST} == MOST
