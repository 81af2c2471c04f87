"""How many launches a layer takes, on the CPU and on a GPU, and the bytes between them: today's are upper bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from by_path import load

MOST = {
    "llama": 6, "mistral": 6, "qwen3": 6, "gemma3": 6, "qwen3-tokens": 6, "gemma3-tokens": 6, "phi3": 6, "gpt2": 6,
    "neox": 6, "mixtral": 8, "qwen3-moe": 8, "opt": 6, "llama-mixed": 7, "bert": 5, "vit": 5, "flux-double": 14,
    "flux-single": 9,
}  # fmt: skip
"""Steps of one layer, on the target that takes more. docs/performance.md says what was aimed at and is not reached."""

BYTES = {
    "llama": 4496, "mistral": 4496, "qwen3": 4496, "gemma3": 5008, "qwen3-tokens": 4496, "gemma3-tokens": 5008,
    "phi3": 4496, "gpt2": 5648, "neox": 4912, "mixtral": 5872, "qwen3-moe": 5456, "opt": 4368, "llama-mixed": 5008,
    "bert": 37632, "vit": 73984, "flux-double": 100352, "flux-single": 115712,
}  # fmt: skip
"""Bytes of activations that the steps of one layer read and write on the CPU."""

MORE = {"mixtral": 1, "qwen3-moe": 1}
"""Additional steps with int8 activations: rows of int8 for the experts' second product are made apart."""

QUICK = ("qwen3-tokens",)
"""Without an entry point for prompts a model compiles in half of the time; the step of one token counts anyway."""
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MOST]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_takes_no_more_launches_than_before(name: str) -> None:
    counts = load("tests/support/launches.py").per_layer(name)
    assert all(0 < steps.kinds.total() <= MOST[name] for steps in counts.values()), counts
    assert 0 < counts["cpu"].nbytes <= BYTES[name], counts


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MOST])
def test_int8_activations_add_launches_to_experts_alone(name: str) -> None:
    launches = load("tests/support/launches.py")
    plain, rows = (launches.per_layer(name, launches.int8(activations)) for activations in (None, "int8"))
    more = {target: rows[target].kinds.total() - plain[target].kinds.total() for target in plain}
    assert max(more.values()) == MORE.get(name, 0), more


def test_the_table_of_the_docs_has_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    page, _, with_int8 = page.partition("With int8 activations")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| (\d+) \| ", page, re.MULTILINE)
    assert {name: max(int(cpu), int(gpu)) for name, cpu, gpu, _ in rows if name in MOST} == MOST
    assert {name: int(nbytes) for name, _, _, nbytes in rows if name in MOST} == BYTES
    found = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ", with_int8, re.MULTILINE)
    more = {name: max(int(made) - int(cpu), int(gpu_made) - int(gpu)) for name, cpu, made, gpu, gpu_made in found}
    assert more == {name: MORE.get(name, 0) for name in MOST}
