"""benchmarks/foreign_models.py: what counts as an error, that a model cannot end or hold up the run, and the page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_path import load
from torch import nn

script = load("benchmarks/foreign_models.py")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The script runs with one thread; other tests do not."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_differences_are_of_the_largest_magnitude_and_shapes_and_infinities_count() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert script.difference(wanted, torch.tensor([1.0, -4.5])) == 0.125
    assert script.difference(wanted, wanted[:1]) == float("inf")
    assert script.difference(wanted, torch.tensor([1.0, float("inf")])) == float("inf")
    assert script.difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1.0
    assert script.difference(torch.zeros(0), torch.zeros(0)) == 0.0


def hangs() -> Any:
    time.sleep(60)


def dies() -> Any:
    os._exit(3)


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'timbre'\nand more")


@pytest.mark.parametrize(
    ("make", "limit", "failure"),
    [
        (hangs, 0.3, "not done within"),
        (dies, 30, "the process ended"),
        (missing, 30, "ModuleNotFoundError: No module named 'timbre'"),
    ],
)
def test_a_model_that_hangs_dies_or_is_missing_is_a_line(make: Any, limit: float, failure: str) -> None:
    line = script.in_a_process(script.Foreign("none", "none", make), limit)
    assert line["failure"].startswith(failure) and "\n" not in line["failure"]


def test_a_model_with_state_is_compared_from_the_same_beginning() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            return x * self.n

    line = script.examine(script.Foreign("none", "counts", lambda: script.Made(Counts().eval(), (torch.ones(3),))))
    assert line["stage"] == "done" and line["error"] == 0 and line["ratio"] > 0


def test_the_page_counts_what_compiles_and_names_what_does_not() -> None:
    done = {"key": "a/b", "package": "a", "name": "b", "real": True, "stage": "done", "parameters": 10, "error": 1e-7}
    done |= {"torch_s": 2e-3, "ours_s": 1e-3, "ratio": 0.5, "compile_s": 1.0}
    failed = {"key": "a/c", "package": "a", "name": "c", "real": False, "stage": "compile"}
    failed["failure"] = "UnsupportedOperatorError: no a|b (/home/me/lib/pkg/model.py:3)"
    absent = {**failed, "key": "a/d", "name": "d", "stage": "build", "failure": "ModuleNotFoundError: no"}
    text = script.page([failed, done, absent])
    assert "1 of 2 models compile, 1 of them with real weights" in text
    assert "| a | b | 0.00 M | 1.0e-07 | 2.00 | 1.00 | 0.50 | 1.0 |" in text
    assert "no a\\|b (pkg/model.py:3)" in text and "## Not examined" in text
