"""JAX's own cases of its primitives: every one is right, or refused with a reason (harnesses.py says how)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from by_path import ROOT, load

harnesses = load("tests/jax/harnesses.py")

PARTS = 12
QUICK = 199
"""Every so manieth case runs in each run: a prime, so that types and parameters vary."""


def check(cases: list[Any]) -> list[Any]:
    judged = [harnesses.judge(each) for each in cases]
    bad = [f"{each.name} is {each.outcome}: {each.detail}" for each in judged if each.outcome in ("wrong", "error")]
    assert not bad, "\n".join(bad[:20])
    return judged


def test_some_cases_mean_what_jax_computes() -> None:
    judged = check(harnesses.harnesses()[::QUICK])
    assert sum(each.outcome == "equal" for each in judged) > len(judged) / 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_means_what_jax_computes(part: int) -> None:
    check(harnesses.harnesses()[part::PARTS])


def test_the_page_lists_every_primitive_and_nothing_wrong() -> None:
    page = (ROOT / "docs" / "jax-primitives.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    groups = {each.group_name for each in harnesses.harnesses()}
    missing = groups - {row[0] for row in rows}
    assert len(rows) > 100 and len(missing) < 3, "those that jax.jit refuses on a CPU have no row"
    for name, cases, equal, refused, wrong, errors in rows:
        assert int(cases) == int(equal) + int(refused), name
        assert wrong == errors == "0", name


def test_the_judge_finds_a_wrong_result_and_an_exception() -> None:
    """The judge itself, on a case that gives another result when it is traced the second time."""
    case = next(each for each in harnesses.harnesses(["add"]) if each.dtype == np.float32)
    assert harnesses.judge(case).outcome == "equal"
    calls = iter(range(10))

    class Other:
        def __getattr__(self, name: str) -> Any:
            return getattr(case, name)

        def dyn_fun(self, *args: Any) -> Any:
            return case.dyn_fun(*args) + jnp.float32(next(calls))

    assert harnesses.judge(Other()).outcome == "wrong"
    assert dataclasses.asdict(harnesses.judge(case))["detail"] == ""
