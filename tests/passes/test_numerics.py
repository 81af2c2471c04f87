"""What `verify_each="numerics"` lets a pass change: bits, units in the last place, orders of sums, codes of a cache."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qcompiler.formats import cache_rows
from qcompiler.passes.checks.numerics import Exact, Numerics, Reordered, Ulps, difference

BF16 = 2.0**-7


def refused(old: Any, new: Any, numerics: Numerics, *, deleted: int = 0, **more: Any) -> bool:
    found = difference([old], [new], numerics, roundings_deleted=deleted, epsilon=BF16, **more)
    return found is not None


def outlier() -> np.ndarray:
    """Elements of 1, and one of 6."""
    x = np.ones(64, ml_dtypes.bfloat16)
    x[5] = 6
    return x


@pytest.mark.parametrize(
    ("place", "units", "ok"), [(5, 1, True), (5, 2, True), (5, 4, False), (0, 2, True), (0, 4, False)]
)
def test_a_deleted_rounding_moves_an_element_by_two_of_its_own_last_places(place: int, units: int, ok: bool) -> None:
    """The last place of 6 is four times that of 1; two of 2**-7 of 6 are three of them."""
    old, new = outlier().astype(np.float64), outlier().astype(np.float64)
    new[place] += units * BF16 * (4 if place == 5 else 1)
    kind = ml_dtypes.bfloat16
    assert refused(old.astype(kind), new.astype(kind), Ulps(2), deleted=1) != ok
    assert refused(old.astype(kind), new.astype(kind), Ulps(2), deleted=0)
    assert refused(old.astype(kind), new.astype(kind), Exact())


def test_an_outlier_gives_a_reordered_sum_no_more_room() -> None:
    old = outlier().astype(np.float32)
    limit = 2e-5 * BF16 / 2.0**-23 * float(np.sqrt((old**2).mean()))
    for share, ok in ((0.9, True), (1.1, False)):
        new = old.copy()
        new[5] += share * limit
        assert refused(old, new, Reordered(2e-5)) != ok


@pytest.mark.parametrize("kind", cache_rows.KINDS)
def test_a_number_between_two_codes_may_become_either(kind: cache_rows.Kind) -> None:
    rows = cache_rows.quantise(np.linspace(-1, 1, 64, dtype=np.float32)[None], kind)
    moved, twice = rows.copy(), rows.copy()
    moved[0, 7] += 1
    twice[0, 7] += 2
    values = [cache_rows.dequantise(each, 64, kind) for each in (rows, moved, twice)]
    steps = {0: cache_rows.steps_of(rows, 64, kind)}
    tight = Reordered(1e-10)
    assert refused(values[0], values[1], tight) and not refused(values[0], values[1], tight, steps=steps)
    assert refused(values[0], values[2], tight, steps=steps)
    assert refused(values[0], values[1], Exact(), steps=steps)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_not_finite_stays(odd: float) -> None:
    old, new = outlier(), outlier()
    new[3] = odd
    assert refused(old, new, Ulps(2), deleted=9) and refused(new, old, Reordered(1.0))
    assert not refused(new, new.copy(), Exact())
