"""PyTorch's operator database: every sample is right, or refused with a reason (opinfo.py says how they are judged)."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from by_path import ROOT, load

opinfo = load("tests/frontends/opinfo.py")

PARTS = 12
QUICK = (
    "amax",
    "gather",
    "div",
    "scatter_reduce",
    "var",
    "cumsum",
    "nn.functional.avg_pool2d",
    "index_put",
    "where",
    "sort",
)
"""Of several families: a reduction, picking, rounding, writing, statistics, a scan, windows, a choice, an order."""


@functools.cache
def infos() -> tuple[Any, ...]:
    return tuple(opinfo.documented())


def check(chosen: tuple[Any, ...], execute: Any, most: int) -> None:
    judged = list(opinfo.examine(chosen, execute, most, 24))
    assert judged
    bad = [f"{s.name} is {s.outcome}: {s.detail}" for s in judged if s.outcome not in ("equal", "refused")]
    assert not bad, "\n".join(bad[:20])


@pytest.mark.parametrize("name", QUICK)
def test_some_samples_mean_what_torch_computes(name: str) -> None:
    chosen = tuple(info for info in infos() if info.name == name)
    assert chosen, f"docs/operators.md does not list {name}"
    check(chosen[:1], opinfo.interpreted, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_means_what_torch_computes(part: int) -> None:
    check(infos()[part::PARTS], opinfo.interpreted, 10**6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_samples_run_as_compiled_kernels(part: int) -> None:
    check(infos()[part::PARTS], opinfo.compiled, 2)


def test_the_page_lists_every_operator_and_nothing_wrong() -> None:
    page = (ROOT / "docs/opinfo.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([\w, ]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    listed = {row[0] for row in rows}
    missing = {opinfo.named(info) for info in infos()} - listed
    without_samples = {
        opinfo.named(info) for info in infos() if opinfo.named(info) in missing and not _has_samples(info)
    }
    assert missing == without_samples, "run tests/frontends/opinfo.py --out … and --page docs/opinfo.md"
    for name, _, samples, equal, refused, wrong, errors in rows:
        assert int(samples) == int(equal) + int(refused), name
        assert wrong == errors == "0", name


def _has_samples(info: Any) -> bool:
    return any(True for dtype in opinfo.DTYPES for _ in opinfo.samples(info, dtype, 1))


def test_a_wrong_result_and_a_python_exception_are_found() -> None:
    """The judge itself: a sum that is off by one, and an executor that fails."""
    (info,) = (info for info in infos() if info.name == "amax")
    sample = next(opinfo.samples(info, torch.float32, 1))
    opinfo.judge([sample], lambda batch: [t + 1 for s in batch for t in s.wanted])
    assert sample.outcome == "wrong"
    opinfo.judge([sample], lambda batch: [t for s in batch for t in s.wanted][len(sample.wanted)])
    assert sample.outcome == "error" and "IndexError" in sample.detail
