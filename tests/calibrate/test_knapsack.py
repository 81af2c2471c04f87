"""The multiple-choice knapsack against all combinations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompiler.calibrate.knapsack import Front, Option, solve

options = st.builds(
    Option, st.integers(0, 60).map(lambda n: 7 * n), st.integers(0, 40).map(lambda n: n / 8)
)  # costs of eighths add up without rounding
items = st.lists(st.lists(options, min_size=1, max_size=4), min_size=1, max_size=4)


def best(given_items: list[list[Option]], nbytes: int) -> float:
    """The least cost of all combinations within so many bytes; infinite if none fits."""
    combinations = itertools.product(*given_items)
    return min((sum(o.cost for o in each) for each in combinations if sum(o.nbytes for o in each) <= nbytes),
               default=math.inf)  # fmt: skip


def cost(front: Front, nbytes: int) -> float:
    chosen = front.within(nbytes)
    if chosen is None:
        return math.inf
    assert front.nbytes(chosen) <= nbytes
    return front.cost(chosen)


@settings(max_examples=40, deadline=None)
@given(items, st.integers(0, 1700))
def test_no_combination_within_the_budget_costs_less(given_items: list[list[Option]], nbytes: int) -> None:
    front = solve(given_items)
    assert front.slack == 0
    for budget in (nbytes, front.least, front.least - 1, front.most):
        assert cost(front, budget) == best(given_items, budget)


@settings(max_examples=40, deadline=None)
@given(items, st.integers(0, 1700), st.integers(1, 200))
def test_a_small_table_is_as_good_as_its_slack_says(given_items: list[list[Option]], nbytes: int, cells: int) -> None:
    front = solve(given_items, cells)
    assert len(front.best) <= max(cells // len(given_items), 1) + len(given_items) or front.slack == 0
    assert best(given_items, nbytes) <= cost(front, nbytes) <= best(given_items, nbytes - front.slack)


@settings(max_examples=20, deadline=None)
@given(items, st.integers(0, 160))
def test_the_fewest_bytes_for_a_cost(given_items: list[list[Option]], eighths: int) -> None:
    front, bound = solve(given_items), eighths / 8
    chosen = front.reaching(bound)
    if chosen is None:
        assert best(given_items, 10**6) > bound
        return
    assert front.cost(chosen) <= bound
    assert best(given_items, front.nbytes(chosen) - 1) > bound


def test_what_is_larger_and_no_better_is_never_chosen() -> None:
    front = solve([[Option(10, 1.0), Option(20, 1.0), Option(30, 0.5), Option(40, 0.5)]])
    assert [front.within(nbytes) for nbytes in (9, 10, 29, 30, 100)] == [None, [0], [0], [2], [2]]


@pytest.mark.parametrize("cells", [40, 100, 1 << 20])
def test_the_budget_of_a_choice_finds_one_as_good(cells: int) -> None:
    """Also where sizes are rounded; the largest budget takes the least cost of every item."""
    rng = np.random.default_rng(cells)
    items = [[Option(int(rng.integers(1, 1000)), float(rng.random())) for _ in range(4)] for _ in range(6)]
    front = solve(items, cells)
    least = sum(min(each.cost for each in item) for item in items)
    chosen = front.within(front.most)
    assert chosen is not None and math.isclose(front.cost(chosen), least)
    for cost in np.linspace(least, 2 * least, 9)[1:]:
        reached = front.reaching(float(cost))
        assert reached is not None
        found = front.within(front.budget(reached))
        assert found is not None and front.cost(found) <= cost + 1e-12
