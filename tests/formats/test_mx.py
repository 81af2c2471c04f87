"""mxfp4 and mxfp8 against torchao's `to_mx` (bit for bit), compressed-tensors' scales, and OCP's rule by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from qcompiler import formats
from qcompiler.errors import FormatShapeError
from qcompiler.formats import Format
from qcompiler.formats.minifloat import E2M1, E4M3, E5M2, EXPONENT_RULES, MiniFloat

F32 = npt.NDArray[np.float32]
MAX = float(np.finfo(np.float32).max)
ELEMENTS: dict[str, tuple[MiniFloat, torch.dtype]] = {
    "e2m1": (E2M1, torch.float4_e2m1fn_x2),
    "e4m3": (E4M3, torch.float8_e4m3fn),
    "e5m2": (E5M2, torch.float8_e5m2),
}


def get(element: str, rule: str = "floor") -> Format:
    if element == "e2m1":
        return formats.get("mxfp4", exponent=rule)
    return formats.get("mxfp8", element=element, exponent=rule)


def torchao(element: str, rule: str, weights: F32) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], F32]:
    """(codes as stored, scales, decoded values) of torchao."""
    dtype = ELEMENTS[element][1]
    scales, codes = to_mx(torch.from_numpy(weights.copy()), dtype, 32, ScaleCalculationMode(rule))
    decoded = to_dtype(codes, scales, dtype, 32, torch.float32)
    return codes.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy(), decoded.numpy()


def assert_equals_torchao(element: str, rule: str, weights: F32) -> None:
    fmt = get(element, rule)
    packed = fmt.encode(weights)
    codes, scales, decoded = torchao(element, rule, weights)
    np.testing.assert_array_equal(packed.section("scales").view(np.uint8), scales)
    np.testing.assert_array_equal(packed.section("codes").view(np.uint8), codes)
    np.testing.assert_array_equal(fmt.decode(packed).view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-20, 1e-30, 1e10, 1e30])
def test_codes_scales_and_values_are_torchaos(element: str, rule: str, scale: float) -> None:
    for seed, shape in enumerate([(1, 32), (33, 96), (128, 256)]):
        weights = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
        assert_equals_torchao(element, rule, weights)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("value", [1.0, -1.0, 0.75, 6.0, 448.0, 1e-20, -3e20, 1.9375, 1.96875])
def test_constant_blocks_are_torchaos(element: str, rule: str, value: float) -> None:
    assert_equals_torchao(element, rule, np.full((3, 64), value, np.float32))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_maxima_at_and_beside_every_power_of_two_are_torchaos(element: str, rule: str) -> None:
    powers = np.float32(2.0) ** np.arange(-90, 110, dtype=np.float32)
    peaks = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    weights = np.random.default_rng(0).uniform(-1, 1, (len(peaks), 32)).astype(np.float32) * peaks[:, None]
    weights[:, 5] = peaks
    assert_equals_torchao(element, rule, weights)


@pytest.mark.parametrize("element", ELEMENTS)
def test_zeros_keep_their_sign_and_have_the_smallest_scale(element: str) -> None:
    weights = np.zeros((2, 64), np.float32)
    weights[:, ::2] = -0.0
    for rule in EXPONENT_RULES:
        packed = get(element, rule).encode(weights)
        assert not packed.section("scales").view(np.uint8).any()
        np.testing.assert_array_equal(get(element, rule).decode(packed).view(np.uint32), weights.view(np.uint32))
    assert_equals_torchao(element, "floor", weights)


@pytest.mark.parametrize("element", ELEMENTS)
def test_where_the_scale_is_the_smallest_we_divide_by_it_and_torchao_by_its_double(element: str) -> None:
    exponent = ELEMENTS[element][0].exponent
    weights = np.random.default_rng(0).uniform(-1, 1, (8, 32)).astype(np.float32) * np.float32(2.0 ** (exponent - 127))
    weights[:, 0] = np.float32(1.5 * 2.0 ** (exponent - 127))
    fmt = get(element)
    packed = fmt.encode(weights)
    codes, scales, decoded = torchao(element, "floor", weights)
    np.testing.assert_array_equal(packed.section("scales").view(np.uint8), scales)
    assert not scales.any()
    ours = np.abs(fmt.decode(packed).astype(np.float64) - weights).sum()
    assert ours < 0.2 * np.abs(decoded.astype(np.float64) - weights).sum()
    assert (packed.section("codes").view(np.uint8) != codes).any()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
@pytest.mark.parametrize("value", [MAX, -MAX, 2.0**127, 1e-45, -3e-45, 2.0**-126, 2.0**-127, 1.5 * 2.0**-128])
def test_the_ends_of_fp32_stay_finite(element: str, rule: str, value: float) -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :2] = value, -value / 2
    decoded = get(element, rule).decode(get(element, rule).encode(weights)).astype(np.float64)
    assert np.isfinite(decoded).all()
    # A maximum just below twice a power of two saturates by a quarter (6 / 8); below the scale 2^-127 steps are coarse.
    assert np.abs(decoded - weights).max() <= max(0.26 * abs(value), 2.0**-127)


def test_the_even_rule_is_compressed_tensors_but_for_maxima_of_e4m3_from_1_75() -> None:
    """There compressed-tensors 0.20 rounds by E2M1's mantissa for every element; torchao, and we, by the element's."""
    peaks = np.random.default_rng(0).uniform(1e-3, 1e3, 500).astype(np.float32)
    weights = np.zeros((len(peaks), 32), np.float32)
    weights[:, 7] = peaks
    four, eight = (generate_mx_scales(torch.from_numpy(peaks), bits).numpy().astype(np.uint8) for bits in (4, 8))
    np.testing.assert_array_equal(get("e2m1", "even").encode(weights).section("scales").view(np.uint8).ravel(), four)
    mantissa = np.frexp(peaks)[0] * 2
    differs = (mantissa >= 1.75) & (mantissa < 1.9375)
    ours = get("e4m3", "even").encode(weights).section("scales").view(np.uint8).ravel()
    np.testing.assert_array_equal(ours, eight - differs)
    assert 10 < differs.sum() < 100


@pytest.mark.parametrize("element", ELEMENTS)
def test_rceil_takes_the_smallest_scale_that_holds_a_maximum_even_below_fp32s_normal_numbers(element: str) -> None:
    largest = np.float32(ELEMENTS[element][0].largest)
    for factor, code in ((0.25, 0), (0.5, 0), (0.75, 0), (1, 0), (1.25, 1), (1.75, 1), (2, 1), (2.5, 2), (4, 2)):
        weights = np.zeros((1, 32), np.float32)
        weights[0, 3] = largest * np.float32(factor * 2.0**-127)
        assert get(element, "rceil").encode(weights).section("scales").view(np.uint8)[0, 0] == code


@given(
    weights=hnp.arrays(np.float32, (2, 32), elements=st.floats(-MAX, MAX, width=32, allow_subnormal=True)),
    element=st.sampled_from(list(ELEMENTS)),
    rule=st.sampled_from(EXPONENT_RULES),
)
def test_any_finite_block_is_what_the_rules_say_in_exact_arithmetic(weights: F32, element: str, rule: str) -> None:
    kind, fmt = ELEMENTS[element][0], get(element, rule)
    packed = fmt.encode(weights)
    exponents = packed.section("scales").view(np.uint8).astype(int).ravel() - 127
    for block, exponent in zip(weights, exponents, strict=True):
        peak = float(np.abs(block).max())
        low, high = -127, 127 - kind.exponent
        if peak == 0:
            expected = low
        elif rule == "rceil":
            quotient = float(np.float32(peak) / np.float32(kind.largest))
            mantissa, power = math.frexp(quotient)
            expected = (power - 1 if mantissa == 0.5 else power) if quotient else low  # it may be too small for fp32
        elif rule == "even":
            # Half a step of the element's mantissa is added to the bits, so that denormals are not normalised first.
            bits = np.float32(peak).view(np.int32) + (1 << (22 - kind.mantissa))
            expected = int(bits >> 23) - 127 - kind.exponent
        else:
            mantissa, power = math.frexp(peak)
            expected = power - 1 + (rule == "ceil" and mantissa != 0.5) - kind.exponent
        assert exponent == min(max(expected, low), high)
    decoded = fmt.decode(packed).astype(np.float64)
    assert np.isfinite(decoded).all()
    step = np.exp2(exponents.astype(float))[:, None]
    scaled = np.clip(weights / step, -kind.largest, kind.largest)
    values = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8).view(kind.dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    nearest = np.abs(scaled[:, :, None] - values).min(axis=2)
    found = np.abs(scaled - packed_values(packed.section("codes").view(np.uint8), kind))
    np.testing.assert_array_equal(found, nearest)


def packed_values(codes: npt.NDArray[np.uint8], kind: MiniFloat) -> npt.NDArray[np.float64]:
    """Values of stored codes, read nibble by nibble."""
    if kind is E2M1:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return codes.view(kind.dtype).astype(np.float64)


def test_the_nan_scale_of_a_file_decodes_to_nan() -> None:
    for element in ELEMENTS:
        fmt = get(element)
        packed = fmt.encode(np.ones((1, 64), np.float32))
        packed.section("scales").view(np.uint8)[0, 1] = 255
        decoded = fmt.decode(packed)
        assert np.isnan(decoded[0, 32:]).all()
        assert (decoded[0, :32] == 1).all()


def test_rows_are_of_whole_blocks_and_the_bits_are_counted() -> None:
    with pytest.raises(FormatShapeError, match="multiple of 32, and K = 48"):
        formats.get("mxfp4").encode(np.zeros((2, 48), np.float32))
    assert formats.get("mxfp4").bits_per_weight(64, 64) == 4.25
    assert formats.get("mxfp8").bits_per_weight(64, 64) == 8.25


@pytest.mark.parametrize("element", ELEMENTS)
def test_canonical_bytes_round_trip(element: str) -> None:
    fmt = get(element)
    packed = fmt.encode(np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32))
    again = formats.from_bytes(fmt, 5, 96, packed.to_bytes())
    np.testing.assert_array_equal(fmt.decode(again), fmt.decode(packed))
