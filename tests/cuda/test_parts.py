"""Launches of several parts on the device: each part against NumPy, in two orders of threads; row numbers; NVRTC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_path import load

CASES = load("tests/support/parts_cases.py")


@pytest.mark.parametrize("rows", [0, 1, 7, 601])
@pytest.mark.parametrize("at", [0, CASES.LENGTH - 1])
def test_every_part_computes_what_it_would_alone(sim_run: Any, rows: int, at: int) -> None:
    given = CASES.arrays(rows, at)
    for seed in (0, 1):
        got = sim_run(CASES.case(), [*given[:2], given[2].T, *given[3:]], {"n": rows}, seed=seed)
        for value, want in zip(got, CASES.expected(given), strict=True):
            if want.dtype == np.float32 and want.size == 1:
                np.testing.assert_allclose(value, want, rtol=1e-6)
            else:
                assert np.ascontiguousarray(value).tobytes() == want.tobytes()


@pytest.mark.parametrize("bad", [-1, CASES.LENGTH, 2**40])
def test_a_row_out_of_range_writes_nothing_and_leaves_the_other_parts(sim_run: Any, bad: int) -> None:
    given = CASES.arrays(7, bad)
    b, x, z, _ = sim_run(CASES.case(), [*given[:2], given[2].T, *given[3:]], {"n": 7}, partial=True)
    assert b.tobytes() == (given[0] + given[0]).tobytes()
    assert x.tobytes() == given[6].tobytes() and z.tobytes() == given[7].tobytes()


@pytest.mark.slow
def test_every_architecture_compiles_it_without_spills(nvrtc: Any, arch: str) -> None:
    taken = nvrtc([CASES.case()], arch)["parts"]
    assert not taken.uses_local_memory
