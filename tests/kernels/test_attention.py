"""Attention against float64: lengths over several blocks, grouped queries, masks, causality, strides, narrow types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_cases import BY_NAME, CASES, Case, inputs, reference, run

TOLERANCE = {"f32": 2e-6, "bf16": 1.2e-2, "f16": 1.5e-3}


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([case.spec for case in CASES], isa)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention_matches_float64(kernels: Any, case: Case) -> None:
    arrays = inputs(case)
    out = run(kernels, case, arrays)
    error = np.abs(out.astype(np.float64) - reference(case, arrays)).max()
    assert error <= TOLERANCE[case.dtype] * 3, error


@pytest.mark.parametrize("name", ["bool_mask", "decode_masked"])
def test_query_that_sees_no_key_gives_zeros(kernels: Any, name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    arrays[3][0] = False
    out = run(kernels, case, arrays)
    assert not out[0].any()
    assert out[1].astype(np.float32).any()


def test_padding_behind_the_mask_cannot_leak(kernels: Any) -> None:
    """Keys and values that a mask hides may hold anything, infinities of the scores included."""
    case = BY_NAME["key_mask"]
    arrays = inputs(case)
    want = run(kernels, case, arrays)
    hidden = ~arrays[3][:, 0]
    arrays[1][hidden] = 1e30
    assert run(kernels, case, arrays).tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["cache_odd_dims", "cache_decode_grouped"])
def test_rows_of_a_cache_that_are_not_seen_may_hold_anything(kernels: Any, name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    want = run(kernels, case, arrays)
    for b in range(case.batch):
        end = int(arrays[-1][b].max()) + 1
        arrays[1][b, end:] = arrays[2][b, end:] = -1  # the scale is a NaN
    assert run(kernels, case, arrays).tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["last", "decode_last", "last_window"])
def test_what_lies_behind_the_last_key_is_not_used(kernels: Any, name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    want = run(kernels, case, arrays)
    for b in range(case.batch):
        end = int(arrays[-1][b].max()) + 1
        arrays[1][b, end:] = np.nan
        arrays[2][b, end:] = np.nan
    assert run(kernels, case, arrays).tobytes() == want.tobytes()


def test_nan_reaches_every_query_that_sees_it(kernels: Any) -> None:
    case = BY_NAME["causal"]
    arrays = inputs(case)
    arrays[1][0, 100] = np.nan
    out = run(kernels, case, arrays)
    assert np.isnan(out[0, 100:]).all()
    assert not np.isnan(out[0, :100]).any()


def test_decode_takes_nan_from_any_piece_and_nothing_from_hidden_ones(kernels: Any) -> None:
    """Keys of one query are cut into pieces; a piece may be hidden as a whole, and a NaN in one reaches the result."""
    case = BY_NAME["decode_pieces_masked"]
    arrays = inputs(case)
    arrays[3][0, :, :400] = False  # all of the first piece
    arrays[3][1] = False
    out = run(kernels, case, arrays)
    error = np.abs(out - reference(case, arrays)).max()
    assert error <= TOLERANCE["f32"] * 3 and not out[1].any()
    for key in (410, 699):
        spoilt = [*arrays[:1], arrays[1].copy(), *arrays[2:]]
        spoilt[3][0, :, key] = True
        spoilt[1][0, key] = np.nan
        assert np.isnan(run(kernels, case, spoilt)[0]).all()


def test_large_scores_do_not_overflow(kernels: Any) -> None:
    case = BY_NAME["long"]
    arrays = inputs(case)
    arrays[0] *= 1000
    out = run(kernels, case, arrays)
    assert np.isfinite(out).all()
    assert np.abs(out - reference(case, arrays)).max() < 5e-2
