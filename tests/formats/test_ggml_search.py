"""The vectorised searches of GGUF's encoders against the same searches written as loops over one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcompiler.formats import ggml_search as search
from qcompiler.formats.iq4 import VALUES
from qcompiler.formats.k_quants import Q2_K, Q4_K, Q5_K

Float32 = npt.NDArray[np.float32]
F = np.float32


def total(values: list[Any]) -> Any:
    result = F(0)
    for value in values:
        result = result + value
    return result


def level(value: Any, low: int, high: int) -> Any:
    """The nearest integer as ggml finds it, clipped."""
    bits = int(np.asarray(F(value) + F(12582912)).view(np.int32))
    return F(min(max((bits & 0x7FFFFF) - 0x400000, low), high))


def extreme(x: Float32) -> Any:
    best = F(0)
    for value in x:
        if abs(value) > abs(best):
            best = value
    return best


def slow_scale(x: Float32, w: Float32, half: int) -> tuple[Any, list[Any]]:
    largest = extreme(x)
    if abs(largest) < F(1e-15):
        return F(0), [F(0)] * len(x)
    scale, best, kept = F(0), F(0), []
    for trial in [0, *range(-9, 0), *range(1, 10)]:
        inverse = -(F(half) + F(0.1) * F(trial)) / largest
        codes = [level(inverse * v, -half, half - 1) for v in x]
        lx = total([wi * v * c for wi, v, c in zip(w, x, codes, strict=True)])
        l2 = total([wi * c * c for wi, c in zip(w, codes, strict=True)])
        if trial == 0 or (l2 > 0 and lx * lx > best * l2):
            scale = lx / l2 if l2 != 0 else F(0)
            best, kept = scale * lx, codes
    return scale, [c + F(half) for c in kept]


def slow_descent(
    x: Float32, w: Float32, codes: list[Any], low: int, high: int, *, strict: bool
) -> tuple[Any, list[Any]]:
    lx = total([wi * v * c for wi, v, c in zip(w, x, codes, strict=True)])
    l2 = total([wi * c * c for wi, c in zip(w, codes, strict=True)])
    for _ in range(5):
        changed = False
        for i, (wi, v) in enumerate(zip(w, x, strict=True)):
            rest_lx, rest_l2 = lx - wi * v * codes[i], l2 - wi * codes[i] * codes[i]
            if rest_lx <= 0 or (strict and rest_l2 <= 0):
                continue
            code = level(v * rest_l2 / rest_lx, low, high)
            new_lx, new_l2 = rest_lx + wi * v * code, rest_l2 + wi * code * code
            if code != codes[i] and new_l2 > 0 and new_lx * new_lx * l2 > lx * lx * new_l2:
                codes[i], lx, l2, changed = code, new_lx, new_l2, True
        if not changed:
            break
    return (lx / l2 if l2 > 0 else F(0)), codes


def slow_descend(x: Float32, half: int) -> tuple[Any, list[Any]]:
    largest = extreme(x)
    if abs(largest) < F(1e-15):
        return F(0), [F(0)] * len(x)
    codes = [level(F(-half) / largest * v, -half, half - 1) for v in x]
    scale, codes = slow_descent(x, x * x, codes, -half, half - 1, strict=False)
    return scale, [c + F(half) for c in codes]


def slow_levels(x: Float32, w: Float32, largest: int) -> tuple[Any, list[Any]]:
    top = max(x.max(), F(0))
    if top < F(1e-15):
        return F(0), [F(0)] * len(x)
    inverse, best = F(0), F(np.inf)
    for trial in [0, *range(-4, 0), *range(1, 5)]:
        tried = (F(0.1) * F(trial) + F(largest)) / top
        off = [v - F(1) / tried * level(tried * v, -(1 << 22), largest) for v in x]
        error = total([wi * o * o for wi, o in zip(w, off, strict=True)])
        if error < best:
            inverse, best = tried, error
    return slow_descent(x, w, [level(inverse * v, 0, largest) for v in x], 0, largest, strict=True)


def slow_affine(x: Float32, w: Float32, largest: int, trials: search.Trials) -> tuple[Any, Any, list[Any]]:
    low, high = x[0], x[0]
    for v in x:
        low, high = (v if v < low else low), (v if v > high else high)
    low = F(0) if low > 0 else low
    if high == low:
        return F(0), low, [F(0)] * len(x)
    sum_w, sum_x = total(list(w)), total([wi * v for wi, v in zip(w, x, strict=True)])

    def error(scale: Any, minimum: Any, codes: list[Any]) -> Any:
        off = [scale * c + minimum - v for c, v in zip(codes, x, strict=True)]
        return total([wi * (abs(o) if trials.absolute else o * o) for wi, o in zip(w, off, strict=True)])

    inverse = F(largest) / (high - low)
    scale, kept = F(1) / inverse, [level(inverse * (v - low), 0, largest) for v in x]
    best = error(scale, low, kept)
    for trial in range(trials.count + 1):
        inverse = (F(trials.first) + F(trials.step) * F(trial) + F(largest)) / (high - low)
        codes = [level(inverse * (v - low), 0, largest) for v in x]
        l1 = total([wi * c for wi, c in zip(w, codes, strict=True)])
        l2 = total([wi * c * c for wi, c in zip(w, codes, strict=True)])
        lx = total([wi * c * v for wi, c, v in zip(w, codes, x, strict=True)])
        determinant = sum_w * l2 - l1 * l1
        if not determinant > 0:
            continue
        slope, minimum = (sum_w * lx - sum_x * l1) / determinant, (l2 * sum_x - l1 * lx) / determinant
        if minimum > 0:
            slope, minimum = lx / l2, F(0)
        found = error(slope, minimum, codes)
        if found < best:
            best, scale, low, kept = found, slope, minimum, codes
    return scale, low, kept


def slow_table_scale(x: Float32, w: Float32, trials: int) -> Any:
    largest = extreme(x)
    if abs(largest) < F(1e-15):
        return F(0)
    scale, best = F(0), F(0)
    for trial in [None, *range(-trials, trials + 1)]:
        inverse = F(1) / (-largest / F(VALUES[0])) if trial is None else (F(VALUES[0]) + F(trial)) / largest
        codes = [F(VALUES[slow_table_code(v * inverse)]) for v in x]
        qx = total([wi * q * v for wi, q, v in zip(w, codes, x, strict=True)])
        q2 = total([wi * q * q for wi, q in zip(w, codes, strict=True)])
        if trial is None:
            scale = qx / q2 if q2 > 0 else F(0)
            best = scale * qx
        elif q2 > 0 and qx * qx > best * q2:
            scale = qx / q2
            best = scale * qx
    return scale


def slow_table_code(value: Any) -> int:
    """The code of the nearest value, of two the upper one."""
    return max(range(16), key=lambda code: (-abs(float(value) - VALUES[code]), code))


numbers = st.one_of(
    st.floats(-1, 1, width=32),
    st.integers(-20, 20).map(lambda n: n / 2),
    st.sampled_from([0.0, -0.0, 1e-14, -3e-16, 1e-20, 2.0**-140, 300.0, -300.0]),
)
weights16 = hnp.arrays(np.float32, (3, 16), elements=numbers)
positive16 = hnp.arrays(np.float32, (3, 16), elements=st.one_of(st.floats(0, 2, width=32), st.sampled_from([0, 1e-6])))


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def each(check: Callable[[int], None]) -> None:
    with np.errstate(all="ignore"):
        for block in range(3):
            check(block)


@pytest.mark.parametrize("half", (4, 32))
@given(x=weights16, w=positive16)
@settings(max_examples=25, deadline=None)
def test_a_scale_is_that_of_the_loop(half: int, x: Float32, w: Float32) -> None:
    with np.errstate(all="ignore"):
        scale, codes = search.search_scale(x.T.copy(), w.T.copy(), half)

    def check(block: int) -> None:
        expected = slow_scale(x[block], w[block], half)
        same(scale[block], expected[0])
        same(codes[:, block], expected[1])

    each(check)


@given(x=weights16)
@settings(max_examples=25, deadline=None)
def test_a_descended_scale_is_that_of_the_loop(x: Float32) -> None:
    with np.errstate(all="ignore"):
        scale, codes = search.descend_scale(x.T.copy(), 4)

    def check(block: int) -> None:
        expected = slow_descend(x[block], 4)
        same(scale[block], expected[0])
        same(codes[:, block], expected[1])

    each(check)


@pytest.mark.parametrize("largest", (15, 63))
@given(x=positive16, w=positive16)
@settings(max_examples=25, deadline=None)
def test_levels_are_those_of_the_loop(largest: int, x: Float32, w: Float32) -> None:
    with np.errstate(all="ignore"):
        scale, codes = search.search_levels(x.T.copy(), w.T.copy(), largest)

    def check(block: int) -> None:
        expected = slow_levels(x[block], w[block], largest)
        same(scale[block], expected[0])
        same(codes[:, block], expected[1])

    each(check)


@pytest.mark.parametrize(
    ("largest", "trials"), [(3, Q2_K.trials), (3, Q2_K.weighted_trials), (15, Q4_K.trials), (31, Q5_K.trials)]
)
@given(x=weights16, w=positive16)
@settings(max_examples=15, deadline=None)
def test_a_scale_and_a_minimum_are_those_of_the_loop(
    largest: int, trials: search.Trials, x: Float32, w: Float32
) -> None:
    with np.errstate(all="ignore"):
        scale, minimum, codes = search.search_affine(x.T.copy(), w.T.copy(), largest, trials)

    def check(block: int) -> None:
        expected = slow_affine(x[block], w[block], largest, trials)
        same(scale[block], expected[0])
        same(minimum[block], expected[1])
        same(codes[:, block], expected[2])

    each(check)


@given(x=weights16, w=positive16)
@settings(max_examples=15, deadline=None)
def test_the_scale_of_a_table_is_that_of_the_loop(x: Float32, w: Float32) -> None:
    with np.errstate(all="ignore"):
        scale = search.TableSearch(VALUES).scale(x.T.copy(), w.T.copy(), 7)
    each(lambda block: same(scale[block], slow_table_scale(x[block], w[block], 7)))


def test_table_codes_are_nearest_with_halves_going_up() -> None:
    table = search.TableSearch(VALUES)
    at = np.arange(-600, 600, dtype=np.float32) / 4
    near = np.concatenate([at, np.nextafter(at, F(np.inf)), np.nextafter(at, F(-np.inf))])
    found = table.codes(near[None], np.ones(1, np.float32))[0]
    assert found.tolist() == [slow_table_code(v) for v in near]


@given(hnp.arrays(np.float32, (33, 2), elements=st.floats(-1e6, 1e6, width=32)))
def test_sums_run_in_order_for_any_number_of_blocks(values: Float32) -> None:
    expected = [total(list(values[:, block])) for block in range(2)]
    same(search.ordered_sum(values), expected)
    same(search.ordered_sum(np.ascontiguousarray(values[:, :1])), expected[:1])
