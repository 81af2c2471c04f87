"""int8 and int4 against slow references, one scalar at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcompiler import formats
from qcompiler.errors import FormatShapeError, FormatValueError

F32 = npt.NDArray[np.float32]
ANY_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FP16_SCALABLE = st.one_of(st.floats(-4, 4, width=32), st.floats(-(2.0**18), 2.0**18, width=32), st.just(0.0))


def rint(value: np.float32) -> int:
    return round(float(value))  # Python rounds ties to even


def int8_reference(row: F32) -> tuple[np.float32, list[int]]:
    scale = max(abs(v) for v in row) / np.float32(127)
    if float(scale) * 127 > float(np.finfo(np.float32).max):
        scale = np.nextafter(scale, np.float32(0))
    if scale == 0:
        scale = np.float32(1)
    return scale, [max(-127, min(127, rint(v / scale))) for v in row]


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=ANY_FINITE))
def test_int8_equals_the_slow_reference(weights: F32) -> None:
    fmt = formats.get("int8")
    packed = fmt.encode(weights)
    decoded = fmt.decode(packed)
    for r, row in enumerate(weights):
        scale, codes = int8_reference(row)
        assert packed.section("scales")[r, 0] == scale
        assert packed.section("codes")[r].tolist() == codes
        assert decoded[r].tolist() == [float(np.float32(c) * scale) for c in codes]


def test_int8_rounds_ties_to_even_and_reaches_both_ends() -> None:
    packed = formats.get("int8").encode(np.array([[127, -127, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32))
    assert packed.section("codes")[0].tolist() == [127, -127, 0, 2, 2, 0, -2]


def test_int8_largest_weights_do_not_decode_to_infinity() -> None:
    fmt = formats.get("int8")
    weights = np.array([[np.finfo(np.float32).max, -1.0]], np.float32)
    decoded = fmt.decode(fmt.encode(weights))
    assert decoded[0, 0] > 0.999999 * weights[0, 0]
    assert np.isfinite(decoded).all()


def test_int8_denormal_scale_does_not_wrap_around() -> None:
    """1.9e-43 / 127 rounds to the smallest denormal, so that w / scale is 136: clipped, not wrapped to -120."""
    packed = formats.get("int8").encode(np.array([[1.9e-43, -1.9e-43]], np.float32))
    assert packed.section("codes")[0].tolist() == [127, -127]


def int4_reference(group: F32, symmetric: bool) -> tuple[np.float16, int, list[int]]:
    low, high = float(min(group)), float(max(group))
    if symmetric:
        scale = np.float16((low if -low >= high else high) / -8)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float16((high - low) / 15)
    if scale == 0:
        scale = np.float16(1)
    wide = np.float32(scale)
    zero = 8 if symmetric else max(0, min(15, rint(np.float32(-low) / wide)))
    return scale, zero, [max(0, min(15, rint(v / wide) + zero)) for v in group]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), symmetric=st.booleans(), group=st.sampled_from((32, 64, 128)))
def test_int4_equals_the_slow_reference(data: st.DataObject, symmetric: bool, group: int) -> None:
    rows, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    weights = data.draw(hnp.arrays(np.float32, (rows, groups * group), elements=FP16_SCALABLE))
    fmt = formats.get("int4", group=group, symmetric=symmetric)
    packed = fmt.encode(weights)
    decoded = fmt.decode(packed)
    for r in range(rows):
        nibbles = [n for byte in packed.section("codes")[r] for n in (byte & 15, byte >> 4)]
        for g in range(groups):
            where = slice(g * group, (g + 1) * group)
            scale, zero, codes = int4_reference(weights[r, where], symmetric)
            assert packed.section("scales")[r, g] == scale
            assert nibbles[where] == codes
            if not symmetric:
                assert packed.section("zeros")[r, g] == zero
            expected = [float(np.float32(c - zero) * np.float32(scale)) for c in codes]
            assert decoded[r, where].tolist() == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_error_stays_within_half_a_step_of_the_stored_scale(symmetric: bool) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    fmt = formats.get("int4", group=32, symmetric=symmetric)
    packed = fmt.encode(weights)
    step = np.repeat(np.abs(packed.section("scales").astype(np.float32)), 32, axis=1)
    error = np.abs(fmt.decode(packed) - weights)
    # The end of the range opposite to the extreme is clipped: 7.5 steps for the symmetric form.
    inside = error <= 0.5 * step * (1 + 1e-3)
    assert inside.mean() > (0.97 if symmetric else 0.995)
    assert (error <= step * 1.001).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_zero_is_exact(symmetric: bool) -> None:
    weights = np.random.default_rng(1).uniform(1, 2, (4, 64)).astype(np.float32)
    weights[:, ::7] = 0
    fmt = formats.get("int4", group=32, symmetric=symmetric)
    assert (fmt.decode(fmt.encode(weights))[:, ::7] == 0).all()
    zeros = np.zeros((2, 32), np.float32)
    packed = fmt.encode(zeros)
    assert (fmt.decode(packed) == 0).all()
    assert (packed.section("scales") == 1).all()
    assert (packed.section("codes") == (0x88 if symmetric else 0)).all()


def test_int4_of_two_equal_extremes_the_negative_one_sets_the_scale() -> None:
    for signs in ((-4, 4), (4, -4)):
        weights = np.zeros((1, 32), np.float32)
        weights[0, :2] = signs
        packed = formats.get("int4").encode(weights)
        assert packed.section("scales")[0, 0] == 0.5
        assert sorted([packed.section("codes")[0, 0] & 15, packed.section("codes")[0, 0] >> 4]) == [0, 15]


def test_int4_weights_below_the_fp16_scale_decode_to_zero_not_nan() -> None:
    for symmetric in (True, False):
        fmt = formats.get("int4", symmetric=symmetric)
        assert (fmt.decode(fmt.encode(np.full((1, 32), 1e-8, np.float32))) == 0).all()


@pytest.mark.parametrize(("symmetric", "limit"), [(True, 65519.0 * 8), (False, 65519.0 * 15)])
def test_int4_scale_beyond_fp16_is_an_error_naming_the_group(symmetric: bool, limit: float) -> None:
    fmt = formats.get("int4", group=32, symmetric=symmetric)
    weights = np.zeros((3, 96), np.float32)
    weights[2, 70] = limit
    assert np.isfinite(fmt.encode(weights).section("scales")).all()
    weights[2, 70] = limit * 1.001
    with pytest.raises(FormatValueError, match=r"row 2, columns 64…95.*65504.*nf4 and int8"):
        fmt.encode(weights)


def test_int4_scale_error_in_a_later_tile_names_the_right_row() -> None:
    weights = np.zeros((3000, 64), np.float32)
    weights[2900, 33] = -3e38
    with pytest.raises(FormatValueError, match=r"row 2900, columns 32…63"):
        formats.get("int4", group=32).encode(weights)


@pytest.mark.parametrize(
    ("group", "cols", "hint"),
    [(128, 192, "group = 32 or 64 would fit"), (64, 96, "group = 32 would fit"), (32, 40, "no group of int4 fits")],
)
def test_int4_shape_error_says_which_groups_would_fit(group: int, cols: int, hint: str) -> None:
    with pytest.raises(FormatShapeError, match=f"K = {cols}.*{hint}"):
        formats.get("int4", group=group).encode(np.zeros((2, cols), np.float32))


def test_slow_reference_of_int4_is_not_trivially_symmetric() -> None:
    """Guards the references themselves: known answers worked out by hand."""
    group = np.zeros(32, np.float32)
    group[:3] = (-8, 7.6, 1.5)
    assert int4_reference(group, True)[1:] == (8, [0, 15, 10] + [8] * 29)
    assert int4_reference(-group, True)[0] == np.float16(-1)
    group[:2] = (-5, 10)
    assert int4_reference(group, False)[:2] == (np.float16(1), 5)
    assert math.isclose(float(int4_reference(group * 2, False)[0]), 2.0)
