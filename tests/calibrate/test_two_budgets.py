"""The knapsack with two budgets against all combinations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompiler.calibrate import two_budgets
from qcompiler.calibrate.knapsack import Option, solve
from qcompiler.calibrate.two_budgets import TOLERANCE, LimitedFront, TwoBudgets

option = st.tuples(st.integers(0, 60), st.integers(0, 40).map(lambda n: n / 8), st.integers(0, 50))
items = st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=4)
Given = list[list[tuple[int, float, int]]]


def split(given_items: Given) -> tuple[list[list[Option]], list[list[int]]]:
    return [[Option(b, c) for b, c, _ in each] for each in given_items], [[t for *_, t in each] for each in given_items]


def best(given_items: Given, nbytes: int, limit: int) -> float:
    """The least cost of all combinations within both budgets; infinite if none fits."""
    fits = (
        sum(c for _, c, _ in each) for each in itertools.product(*given_items)
        if sum(b for b, *_ in each) <= nbytes and sum(t for *_, t in each) <= limit
    )  # fmt: skip
    return min(fits, default=math.inf)


@settings(max_examples=60, deadline=None)
@given(items, st.integers(0, 200), st.integers(0, 160))
def test_no_combination_within_both_budgets_costs_less(given_items: Given, nbytes: int, limit: int) -> None:
    options, ns = split(given_items)
    expected = best(given_items, nbytes, limit)
    for tolerance in (0.0, TOLERANCE):
        found = TwoBudgets(options, ns, tolerance).solve(nbytes, limit)
        if found is None:
            assert math.isinf(expected)
            continue
        taken = [each[place] for each, place in zip(given_items, found.chosen, strict=True)]
        assert sum(b for b, *_ in taken) <= nbytes and sum(t for *_, t in taken) <= limit
        assert found.cost == sum(c for _, c, _ in taken)
        assert found.bound <= expected + 1e-9 and found.cost <= expected / (1 - tolerance) + 1e-9


@settings(max_examples=30, deadline=None)
@given(items, st.integers(0, 160), st.integers(0, 100))
def test_the_front_within_a_limit_has_its_ends_and_its_crossings(given_items: Given, limit: int, eighths: int) -> None:
    options, ns = split(given_items)
    combinations = [
        (sum(b for b, *_ in each), sum(c for _, c, _ in each)) for each in itertools.product(*given_items)
        if sum(t for *_, t in each) <= limit
    ]  # fmt: skip
    if not combinations:
        assert TwoBudgets(options, ns).smallest(limit) is None
        return
    front = LimitedFront(solve(options), ns, limit)
    assert front.least == min(b for b, _ in combinations)
    least = min(c for _, c in combinations)
    assert least <= front.lowest <= least / (1 - TOLERANCE) + 1e-9
    reached = front.reaching(eighths / 8)
    fitting = [b for b, c in combinations if c <= eighths / 8 * (1 - TOLERANCE)]
    assert reached is None or front.cost(reached) <= eighths / 8
    if fitting:
        assert reached is not None and front.nbytes(reached) <= min(fitting)


def test_a_model_of_many_layers_is_solved_to_the_tolerance() -> None:
    """240 linears of three shapes and seven formats, the sizes of a 32-layer model: the bound proves the choice."""
    generator = np.random.default_rng(0)
    bits, slow = [3.5, 4.25, 4.5, 5.5, 6.56, 8.5, 4.6], [1.4, 1.3, 1.0, 1.6, 1.5, 1.8, 1.1]
    options, ns = [], []
    for number in range(240):
        elements, factor = [(1 << 24, 1.0), (7 << 23, 3.5), (7 << 23, 3.6)][number % 3]
        weight = generator.lognormal(0, 1.5)
        options.append([Option(int(elements * b / 8), weight * 4**-b * generator.lognormal(0, 0.2)) for b in bits])
        ns.append([int(1e6 * factor * each) for each in slow])
    nbytes, limit = int(1.03 * sum(each[2].nbytes for each in options)), int(1.2 * sum(each[2] for each in ns))
    found = TwoBudgets(options, ns).solve(nbytes, limit)
    assert found is not None and found.cost * (1 - TOLERANCE) <= found.bound <= found.cost


def test_labels_that_were_dropped_are_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    given_items = [[(int(b), float(c), int(t)) for b, c, t in generator.integers(1, 50, (4, 3))] for _ in range(6)]
    options, ns = split(given_items)
    nbytes, limit = 120, 110
    expected = best(given_items, nbytes, limit)
    monkeypatch.setattr(two_budgets, "LABELS", 2)
    found = TwoBudgets(options, ns, 0.0).solve(nbytes, limit)
    assert found is not None and found.bound <= expected <= found.cost
    assert found.bound < found.cost, "two labels prove nothing here"
