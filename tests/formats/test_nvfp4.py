"""nvfp4 against torchao's `nvfp4_quantize`, and with a stored divisor against compressed-tensors: bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

from qcompiler import formats
from qcompiler.errors import FormatShapeError, FormatValueError
from qcompiler.formats.nvfp4 import SMALLEST_GLOBAL

F32 = npt.NDArray[np.float32]
MAX = float(np.finfo(np.float32).max)
CT_ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, scale_dtype=torch.float8_e4m3fn
)


def assert_equals_torchao(weights: F32) -> None:
    tensor = torch.from_numpy(weights.copy())
    of_all = per_tensor_amax_to_scale(tensor.abs().max())
    scales, codes = nvfp4_quantize(tensor, 16, of_all)
    fmt = formats.get("nvfp4")
    packed = fmt.encode(weights)
    assert packed.section("global_scale").tobytes() == of_all.numpy().tobytes()
    np.testing.assert_array_equal(packed.section("scales").view(np.uint8), scales.view(torch.uint8).numpy())
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy())
    decoded = NVFP4Tensor(codes, scales, 16, torch.float32, of_all).dequantize(torch.float32).numpy()
    np.testing.assert_array_equal(fmt.decode(packed).view(np.uint32), decoded.view(np.uint32))


def assert_equals_compressed_tensors(weights: F32) -> None:
    tensor = torch.from_numpy(weights.copy())
    divisor = generate_gparam(tensor.min(), tensor.max())
    blocks = tensor.reshape(len(weights), -1, 16)
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), CT_ARGS, global_scale=divisor)
    codes = quantize_and_pack_fp4(tensor, scales, global_scale=divisor, group_size=16)
    fmt = formats.get("nvfp4", divisor=True)
    packed = fmt.encode(weights)
    assert packed.section("global_scale").tobytes() == divisor.numpy().tobytes()
    stored = scales.to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(packed.section("scales").view(np.uint8), stored.view(torch.uint8).numpy())
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy())
    values = unpack_fp4_from_uint8(codes, *weights.shape, dtype=torch.float32)
    decoded = values.reshape(blocks.shape) * (stored.float() / divisor)[:, :, None]
    np.testing.assert_array_equal(fmt.decode(packed), decoded.reshape(weights.shape).numpy())


BOTH = pytest.mark.parametrize("check", [assert_equals_torchao, assert_equals_compressed_tensors])


@BOTH
@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-20, 1e-28, 1e10, 1e30, 5e37])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (33, 96), (128, 256)])
def test_codes_scales_and_values_are_the_references(check, scale: float, shape: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    check((np.random.default_rng(shape[0]).standard_normal(shape) * scale).astype(np.float32))


@BOTH
@pytest.mark.parametrize("value", [1.0, -1.0, 6.0, 2688.0, 1e-20, -3e20])
def test_constant_weights_are_the_references(check, value: float) -> None:  # type: ignore[no-untyped-def]
    check(np.full((3, 64), value, np.float32))


@BOTH
def test_blocks_far_below_the_largest_are_the_references(check) -> None:  # type: ignore[no-untyped-def]
    """Block scales from the largest down to those that vanish in E4M3, zero blocks of either sign among them."""
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    weights *= np.float32(2.0) ** -np.arange(64, dtype=np.float32)[:, None]
    weights[9] = 0.0
    weights[10, ::2] = -0.0
    weights[10, 1::2] = 0.0
    check(weights)


@BOTH
def test_ties_are_the_references(check) -> None:  # type: ignore[no-untyped-def]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    beside = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))])
    row = np.concatenate([[np.float32(6)], beside, -beside, np.zeros(5, np.float32)]).astype(np.float32)
    weights = np.tile(np.concatenate([np.insert(part, 0, 6.0) for part in row[:45].reshape(3, 15)]), (2, 1))
    # With a maximum of 6 * 448 the scales are 1 and 448 exactly in both conventions.
    weights = np.concatenate([weights, np.full((2, 16), 2688, np.float32)], axis=1)
    check(weights.astype(np.float32))


@pytest.mark.parametrize("divisor", [False, True])
def test_a_tensor_of_zeros_keeps_its_signs_where_the_reference_does(divisor: bool) -> None:
    weights = np.zeros((2, 32), np.float32)
    weights[:, ::3] = -0.0
    fmt = formats.get("nvfp4", divisor=divisor)
    packed = fmt.encode(weights)
    assert packed.section("global_scale")[0] == (1 if divisor else SMALLEST_GLOBAL)
    assert (packed.section("scales").astype(np.float32) == (0.125 if divisor else 2.0**-6)).all()
    expected = np.zeros_like(weights) if divisor else weights
    np.testing.assert_array_equal(fmt.decode(packed).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("value", [MAX, -MAX, float(np.nextafter(np.float32(MAX), np.float32(0))), 1e-36, 1e-42, 1e-45])
def test_the_ends_of_fp32_stay_finite(divisor: bool, value: float) -> None:
    weights = np.tile(np.array([value, -value / 2] * 8, np.float32), (2, 3))
    fmt = formats.get("nvfp4", divisor=divisor)
    decoded = fmt.decode(fmt.encode(weights)).astype(np.float64)
    assert np.isfinite(decoded).all()
    if abs(value) > 1:
        np.testing.assert_allclose(decoded, weights, rtol=1e-6)
    assert np.abs(decoded - weights).max() <= max(2e-7 * abs(value), 1e-35)


def test_the_two_conventions_are_told_apart_by_their_declarations() -> None:
    weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    multiplier, divisor = (
        formats.get("nvfp4", divisor=d).encode(weights).section("global_scale")[0] for d in (False, True)
    )
    assert multiplier * divisor == pytest.approx(1, rel=1e-6)
    assert formats.get("nvfp4").bits_per_weight(64, 64) == 4.5 + 32 / 4096


@pytest.mark.parametrize("divisor", [False, True])
def test_what_cannot_be_stored_is_refused(divisor: bool) -> None:
    fmt = formats.get("nvfp4", divisor=divisor)
    with pytest.raises(FormatShapeError, match="multiple of 16, and K = 24"):
        fmt.encode(np.zeros((2, 24), np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        weights = np.ones((7, 32), np.float32)
        weights[5, 17] = bad
        with pytest.raises(FormatValueError, match="row 5, column 17"):
            fmt.encode(weights)


@given(
    weights=hnp.arrays(np.float32, (3, 32), elements=st.floats(-MAX, MAX, width=32, allow_subnormal=True)),
    divisor=st.booleans(),
)
def test_any_finite_matrix_is_finite_and_near(weights: F32, divisor: bool) -> None:
    """Within half a step of the block's scale and of E2M1's widest gap, up to what the smallest scales can hold."""
    fmt = formats.get("nvfp4", divisor=divisor)
    packed = fmt.encode(weights)
    decoded = fmt.decode(packed).astype(np.float64)
    assert np.isfinite(decoded).all()
    peak = np.abs(weights.astype(np.float64)).reshape(3, 2, 16).max(axis=2)
    error = np.abs(decoded - weights).reshape(3, 2, 16).max(axis=2)
    of_all = peak.max()
    # Gaps of E2M1 are at most 2 of 6; E4M3 adds 1/16, its smallest scale 6 * 2^-9 / 2688 of the largest weight.
    assert (error <= 0.25 * peak + of_all * 2.0**-6 / 448 + 1e-33).all()
    assert formats.from_bytes(fmt, 3, 32, packed.to_bytes()).to_bytes() == packed.to_bytes()


@given(
    weights=hnp.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=True)),
    largest=st.floats(2.0**-60, 2.0**61, width=32),
)
def test_any_matrix_of_ordinary_size_is_the_references(weights: F32, largest: float) -> None:
    weights = weights.copy()
    weights[0, 0] = largest
    assert_equals_torchao(weights)
    assert_equals_compressed_tensors(weights)
