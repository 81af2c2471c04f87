"""`qc.search(speed=)`: measured times of linears as a second budget."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import BudgetError, QCompilerError, RecipeError, UnknownFormatError
from qcompiler.frontends.quantise.sensitivity import Study
from qcompiler.recipes import linear_times, search
from qcompiler.recipes.linear_times import Case, copies_for, last_cache, measured
from qcompiler.recipes.speed import Speed
from qcompiler.runtime.profile_cpu import Figures

NS = {"int3": 1900, "int4": 1000, "int8": 1500, "float": 4000, "q8_0": 1200}


def made_up(cases: Iterable[Case], threads: int) -> dict[Case, int]:
    """Nanoseconds for each 4096 elements, times the rows of x."""
    return {case: case.n * case.k // 4096 * NS[case.format] * case.rows for case in cases}


class Mixed(nn.Module):
    """Three linears (one of them read twice), a table, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.conv = nn.Embedding(32, 64), nn.Conv1d(64, 64, 3, padding=1)
        self.first, self.twice, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.words(ids).transpose(1, 2)).transpose(1, 2)
        return self.last(self.twice(torch.tanh(self.twice(torch.tanh(self.first(x))))))


IDS = torch.randint(0, 32, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(search, "measured", made_up)


def searched(speed: str, budget: str = "7 bits", **how: Any) -> qc.SearchResult:
    options: dict[str, Any] = {"candidates": ("int3", "int4", "int8"), "measure": "error", **how}
    return qc.search(Mixed().eval(), [IDS], budget, speed=speed, **options)


# --- the budget as text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 ms", (3e6, None, 1)), ("<= 800us", (8e5, None, 1)), ("1.2 x int4", (1.2, "int4", 1)),
        ("1.05×q4_K at 32 rows", (1.05, "q4_K", 32)), ("0.5x float", (0.5, "float", 1)),
        ("2 s at 1 row", (2e9, None, 1)),
    ],
)  # fmt: skip
def test_a_speed_is_a_time_or_a_multiple_of_a_format(text: str, expected: tuple[float, str | None, int]) -> None:
    found = Speed.of(text)
    assert (found.amount, found.reference, found.rows) == expected
    assert Speed.of(found.text) == found


@pytest.mark.parametrize("text", ["3", "ms", "x int4", "-1 ms", "0 ms", "nan ms", "1e999 ms", "3 ms at 0 rows",
                                  "3 ms at 2.5 rows", "3 ms at 99999999 rows", "1.2 int4", "", 3, b"3 ms"])  # fmt: skip
def test_what_is_no_speed_is_an_error_with_the_grammar(text: Any) -> None:
    with pytest.raises(BudgetError, match=r"'1\.2 x int4'"):
        Speed.of(text)
    if isinstance(text, str):
        return
    with pytest.raises(UnknownFormatError, match="nonsense"):
        Speed.of("2 x nonsense")


# --- the search ------------------------------------------------------------------------------------------------------


def test_each_point_keeps_the_time_and_none_that_does_is_better() -> None:
    result = searched("1.2 x int4")
    assert result.times is not None
    # first 1, twice 2 x 1, last 2, each in units of 64 x 64; the table and the convolution take no time
    assert result.times.limit == int(1.2 * 5 * 1000)
    assert all(each.ns is not None and each.ns <= result.times.limit for each in result.front)
    chosen = result.chosen
    expected = math.inf
    for texts in itertools.product(*(item.texts for item in result.items)):
        nbytes = sum(item.nbytes(text) for item, text in zip(result.items, texts, strict=True))
        if result.kept.bits(nbytes) <= 7 and result.times.total(texts) <= result.times.limit:
            cost = sum(result.effects[layer.path, text].cost or 0.0
                       for item, text in zip(result.items, texts, strict=True) for layer in item.layers)  # fmt: skip
            expected = min(expected, cost)
    assert chosen.bits <= 7 and expected <= chosen.estimate <= 1.001 * expected
    (line,) = [line for line in result.table().splitlines() if line.startswith("->")]
    assert chosen.ns is not None and f"{chosen.ns / 1e3:.4g} us" in line
    assert "at most 6 us (1.2 x int4)" in result.table()
    assert "no recipe within both budgets has an estimate lower by more than" in result.table()
    assert "operators of 1 weight (" in result.table() and "conv.weight" in result.table()


@pytest.mark.slow
def test_a_limit_of_any_size_is_a_limit() -> None:
    result = searched("1e30 x int4")
    assert result.times is not None and result.chosen.ns is not None and result.chosen.ns < result.times.limit


@pytest.mark.slow
def test_the_recipe_file_says_the_time(tmp_path: Path) -> None:
    result = searched("3 ms", "error<0.01", candidates=("int4", "int8"))
    assert result.chosen.measured is not None and result.chosen.measured < 0.01
    result.save(tmp_path / "recipe.toml")
    assert "(at most 3 ms)" in (tmp_path / "recipe.toml").read_text().splitlines()[0]


@pytest.mark.slow
def test_rows_and_a_reference_that_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Case] = []
    monkeypatch.setattr(search, "measured", lambda cases, threads: (made_up(given := list(cases), threads),
                                                                    seen.extend(given))[0])  # fmt: skip
    result = searched("1.5 x q8_0 at 8 rows", num_threads=2)
    assert result.times is not None and result.times.limit == int(1.5 * 5 * 1200 * 8)
    assert {case.format for case in seen} == {"int3", "int4", "int8", "q8_0"} and {case.rows for case in seen} == {8}


@pytest.mark.parametrize(
    ("speed", "budget", "kind", "message"),
    [
        ("4 us", "7 bits", BudgetError, "'4 us' is 4 us: the linears of the fastest recipe .* take 5 us"),
        ("1 x int4", "4 bits", BudgetError, "the smallest recipe of these candidates that keep '1 x int4' takes"),
        pytest.param(
            "2 x q4_K", "7 bits", RecipeError, "'first.weight' cannot be in q4_K: .*256", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_budgets_that_no_recipe_meets_are_refused_before_anything_is_measured(
    speed: str, budget: str, kind: type[QCompilerError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "effects", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(kind, match=message):
        searched(speed, budget, workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_model_without_linears_has_no_time_to_save() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    with pytest.raises(RecipeError, match="none of the weights belongs to a linear"):
        qc.search(model, [torch.randn(1, 32, 8, 8)], "7 bits", ("int4", "int8"), speed="3 ms")


# --- the clock -------------------------------------------------------------------------------------------------------


def test_a_weight_comes_back_as_cold_as_in_its_model() -> None:
    assert copies_for(1 << 10, 1 << 10) == 1, "a model of one weight keeps it in the caches"
    assert copies_for(1 << 10, (1 << 13) - 5) == 8
    assert copies_for(1 << 20, 1 << 50) == 2 * last_cache() >> 20


def test_a_real_time_is_measured_once_and_a_damaged_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_times, "SECONDS", 0.0)
    small, large = (Case(n, 256, "int8", "f32", rows=1, copies=2) for n in (64, 2048))
    monkeypatch.setattr(linear_times, "cache_dir", lambda name: tmp_path)  # the kernels stay in the usual cache
    first = measured([small, large], 1)
    assert 0 < first[small] < first[large], "32 times the work"
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 and {json.loads(file.read_text())["ns"] for file in files} == set(first.values())
    calls: list[int] = []
    measure = linear_times._Walk.nanoseconds
    monkeypatch.setattr(linear_times._Walk, "nanoseconds", lambda self: (calls.append(1), measure(self))[1])
    assert measured([small, large], 1) == first and not calls
    files[0].write_text('{"ns": -5}')
    assert measured([small, large], 1).keys() == first.keys() and calls == [1]
    monkeypatch.setattr(linear_times, "VERSION", 0)
    measured([small], 1)
    assert calls == [1, 1], "another version of the code measures again"


def test_a_time_is_the_best_pass_and_no_sum_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool adds to figures. Copies take 5 and 9 us in the best pass; the median is between them."""
    passes = iter([(90, 90), (7, 9), (5, 20), *[(8, 30)] * linear_times.PASSES])

    def run(steps: int, count: int, context: int, figures: int, counts: bool) -> int:
        for figure, us in zip((Figures * count).from_address(figures), next(passes), strict=True):
            figure.ns += 1000 * us
        return 0

    monkeypatch.setattr(linear_times, "SECONDS", 0.0)
    monkeypatch.setattr(linear_times, "profiler", lambda: run)
    kernel = linear_times._Kernel.of(Case(16, 256, "int8", "f32", rows=1, copies=2), 1)
    assert linear_times._Walk(kernel, 0).nanoseconds() == 7000


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rows"), [("f32", 1), ("bf16", 5), ("f16", 40)])
def test_every_format_has_a_real_time(dtype: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_times, "SECONDS", 0.0)
    cases = [Case(64, 512, name, dtype, rows, 2) for name in ("float", "nf4", "q4_K", "mxfp4", "nvfp4", "fp8_e4m3")]
    assert all(ns > 0 for ns in measured(cases, 2).values())
