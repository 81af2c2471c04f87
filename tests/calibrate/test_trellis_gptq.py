"""GPTQ by the sequence: against nearest paths, against the plain search, and its compiled search against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from qcompiler.calibrate import gptq, trellis_gptq
from qcompiler.formats.tq import TQ
from qcompiler.formats.trellis import Trellis
from qcompiler.formats.trellis_search import choose
from qcompiler.runtime.encoder import path_solver

BITS = (2, 3, 4)


def correlated(cols: int) -> np.ndarray:
    """Second moments of inputs of which a few directions hold most of the energy."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1024, 32)) @ rng.standard_normal((32, cols)) + 0.7 * rng.standard_normal((1024, cols))
    return x.T @ x


@pytest.mark.parametrize("bits", BITS)
def test_paths_that_make_up_for_their_errors_leave_a_fifth_of_them(bits: int) -> None:
    """0.11 to 0.14 were seen."""
    weights = np.random.default_rng(6).standard_normal((8, 512)).astype(np.float32)
    solved = gptq.solve(weights, TQ(bits=bits).encode(weights), correlated(512))
    assert 0 < solved.error < 0.2 * solved.nearest_error
    moments = correlated(512)
    left = weights - solved.packed.format.decode(solved.packed).astype(np.float64)
    told = solved.error * np.einsum("nk,nk->", weights @ moments, weights)
    assert np.isclose(np.einsum("nk,nk->", left @ moments, left), told, rtol=1e-4)


def test_without_correlations_a_path_is_the_nearest_one() -> None:
    trellis = TQ(bits=4).trellis
    rng = np.random.default_rng(7)
    wanted, weights = 147 * rng.standard_normal((3, 64)).astype(np.float32), rng.random(64, np.float32)
    windows = trellis_gptq.paths(trellis, wanted, weights, np.zeros((64, 64), np.float32))
    assert np.array_equal(_codes(trellis, windows), choose(trellis, wanted, np.tile(weights, (3, 1))))


def test_inputs_that_are_all_zero_leave_the_codes_as_they_were() -> None:
    weights = np.random.default_rng(8).standard_normal((2, 256)).astype(np.float32)
    nearest = TQ(bits=4).encode(weights)
    assert gptq.solve(weights, nearest, np.zeros((256, 256))).packed is nearest


@pytest.mark.parametrize("bits", BITS)
def test_the_compiled_search_gives_the_windows_of_numpys(bits: int) -> None:
    solver = path_solver(TQ(bits=bits))
    assert solver is not None
    rng = np.random.default_rng(bits)
    wanted, weights = 147 * rng.standard_normal((5, 64)).astype(np.float32), rng.random(64, np.float32)
    share = np.triu(rng.standard_normal((64, 64)) * 0.3, 1).astype(np.float32)
    assert np.array_equal(
        solver(wanted, weights, share), trellis_gptq.paths(TQ(bits=bits).trellis, wanted, weights, share)
    )


def _codes(trellis: Trellis, windows: np.ndarray) -> np.ndarray:
    return windows >> trellis.width - trellis.bits
