"""Statistics of inputs: streamed in any portions they are those of all values at once."""

from __future__ import annotations

import numpy as np
import pytest

from qcompiler.config import QuantConfig
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.observers import BINS, InputStatistics, Magnitudes

RNG = np.random.default_rng(0)


def test_columns_mean_squares_do_not_depend_on_how_rows_came() -> None:
    x = RNG.normal(size=(1000, 7)).astype(np.float32)
    found = InputStatistics.of(7, magnitudes=False)
    for part in np.split(x, [1, 10, 500]):
        found.add("l", part)
    assert found.rows == 1000 and found.magnitudes is None
    np.testing.assert_allclose(found.importance, (x.astype(np.float64) ** 2).mean(0), rtol=1e-6)
    assert InputStatistics(np.zeros(4), 8).importance is None  # a search for scales would have no error to weight


def test_a_value_that_is_not_finite_names_the_module() -> None:
    x = np.ones((4, 3), np.float32)
    x[2, 1] = np.inf
    with pytest.raises(CalibrationError, match=r"'layer\.up' .*column 1"):
        InputStatistics.of(3, magnitudes=True).add("layer.up", x)


def test_bins_that_grow_count_what_bins_of_the_last_width_would() -> None:
    x = (RNG.normal(size=20000) * np.exp2(RNG.integers(-20, 12, 20000))).astype(np.float32)
    grown = Magnitudes()
    for part in np.array_split(np.concatenate([np.zeros(5, np.float32), np.sort(np.abs(x))]), 15):
        grown.add(part)
    expected, _ = np.histogram(np.abs(x), BINS, (0, grown.limit))
    expected[0] += 5
    assert (grown.counts == expected).all()
    assert grown.largest == np.abs(x).max() and grown.limit / 2 <= grown.largest < grown.limit


def test_a_power_of_two_lies_inside() -> None:
    found = Magnitudes()
    found.add(np.array([-4.0, 1.0], np.float32))
    found.add(np.array([4.0, 0.0], np.float32))
    assert found.counts.sum() == 4 and found.clip("minmax") == 4 and found.clip("percentile:100") == 4


@pytest.mark.parametrize("percent", [50.0, 99.0, 99.9])
def test_percentile_is_within_a_bin(percent: float) -> None:
    x = RNG.normal(size=100_000).astype(np.float32)
    found = Magnitudes()
    found.add(x)
    exact = np.percentile(np.abs(x), percent)
    assert abs(found.clip(f"percentile:{percent}") - exact) <= found.limit / BINS


def test_mse_clips_an_outlier_that_minmax_keeps() -> None:
    x = np.concatenate([RNG.normal(size=200_000), [40.0]]).astype(np.float32)
    found = Magnitudes()
    found.add(x)

    def error(clip: float) -> float:
        step = clip / 127
        return float(np.square(np.clip(np.rint(x / step), -127, 127) * step - x).mean())

    assert found.clip("minmax") == 40
    assert error(found.clip("mse")) < 0.8 * error(40)
    best = min(error(clip) for clip in np.linspace(1, 40, 200))
    assert error(found.clip("mse")) < 1.1 * best


def test_nothing_but_zeros_has_no_range() -> None:
    found = Magnitudes()
    found.add(np.zeros(10, np.float32))
    assert [found.clip(name) for name in ("minmax", "percentile", "mse")] == [0, 0, 0]


@pytest.mark.parametrize("text", ["median", "percentile:0", "percentile:x", "mse:3", "percentile:101", "percentile:"])
def test_other_observers_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="choose 'minmax'"):
        QuantConfig(observer=text)
