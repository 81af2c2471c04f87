"""fp8 against torchao's float8 primitives and torch's casts (bit for bit), squares against a loop over squares."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchao.quantization.quant_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
)

from qcompiler import formats
from qcompiler.errors import FormatValueError
from qcompiler.formats.minifloat import E2M1, E2M1_VALUES, E4M3, E5M2, MiniFloat

F32 = npt.NDArray[np.float32]
TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NAMES = tuple(TYPES)
MAX = float(np.finfo(np.float32).max)


def torchao(name: str, weights: F32, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of torchao for blocks of this shape, which divides the matrix."""
    tensor = torch.from_numpy(weights.copy())
    scale = _choose_scale_float8(tensor, list(block), TYPES[name])
    return _quantize_affine_float8(tensor, scale, TYPES[name]), scale


def assert_equals_torchao(name: str, per: str, weights: F32) -> None:
    """Codes, scales and decoded values, for weights without blocks of zeros."""
    block = {"row": (1, weights.shape[1]), "tensor": weights.shape, "block": (128, 128)}[per]
    codes, scales = torchao(name, weights, block)
    fmt = formats.get(name, per=per)
    packed = fmt.encode(weights)
    stored = packed.section("scales").view(np.uint32).ravel()
    np.testing.assert_array_equal(stored, scales.numpy().view(np.uint32).ravel())
    np.testing.assert_array_equal(packed.section("codes").view(np.uint8), codes.view(torch.uint8).numpy())
    decoded = _dequantize_affine_float8(codes, scales).numpy()
    np.testing.assert_array_equal(fmt.decode(packed).view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per", ["row", "tensor", "block"])
@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-30, 1e-37, 1e-39, 1e37, 3e37])
def test_codes_scales_and_values_are_torchaos(name: str, per: str, scale: float) -> None:
    for seed, shape in enumerate([(128, 128), (256, 384), (384, 128)]):
        weights = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
        assert_equals_torchao(name, per, weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 129), (33, 97), (200, 300)])
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_any_shape_per_row_and_per_tensor_is_torchaos(name: str, shape: tuple[int, int], per: str) -> None:
    assert_equals_torchao(name, per, np.random.default_rng(0).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1.0, -1.0, 448.0, 1e-38, -1e-40, MAX / 512, 3e38])
def test_constant_weights_are_torchaos(name: str, value: float) -> None:
    for per in ("row", "tensor", "block"):
        assert_equals_torchao(name, per, np.full((128, 256), value, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (129, 127), (128, 257), (300, 200), (511, 129), (5, 1000)])
@pytest.mark.parametrize("threads", [1, 3])
def test_squares_at_the_edges_are_shorter(
    name: str, shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every square by itself is what torchao makes of a tensor; the last ones are cut, as in DeepSeek's checkpoints."""
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 1 << 12)
    weights = np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)
    fmt = formats.get(name, per="block")
    packed = fmt.encode(weights, threads=threads)
    scales, codes = packed.section("scales"), packed.section("codes").view(np.uint8)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    decoded = fmt.decode(packed)
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            here = (slice(i, i + 128), slice(j, j + 128))
            expected, scale = torchao(name, weights[here], weights[here].shape)
            assert scales[i // 128, j // 128] == scale.item()
            np.testing.assert_array_equal(codes[here], expected.view(torch.uint8).numpy())
            np.testing.assert_array_equal(decoded[here], expected.float().numpy() * scale.item())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per", ["row", "tensor", "block"])
def test_zeros_keep_their_sign_and_have_scale_one(name: str, per: str) -> None:
    weights = np.zeros((130, 140), np.float32)
    weights[:, 1::2] = -0.0
    fmt = formats.get(name, per=per)
    packed = fmt.encode(weights)
    assert (packed.section("scales") == 1).all()
    np.testing.assert_array_equal(packed.section("codes").view(np.uint8), np.where(np.signbit(weights), 0x80, 0))
    np.testing.assert_array_equal(fmt.decode(packed).view(np.uint32), weights.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per", ["row", "tensor", "block"])
@pytest.mark.parametrize("value", [MAX, -MAX, 1e-45, -1e-45, 2.0**-126])
def test_the_ends_of_fp32_stay_finite(name: str, per: str, value: float) -> None:
    weights = np.array([[value, -value / 2, 0.0]] * 2, np.float32)
    fmt = formats.get(name, per=per)
    decoded = fmt.decode(fmt.encode(weights)).astype(np.float64)
    assert np.isfinite(decoded).all()
    np.testing.assert_allclose(decoded, weights, rtol=0.13, atol=1e-45)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_in_the_last_square(name: str, bad: float) -> None:
    weights = np.ones((200, 150), np.float32)
    weights[130, 149] = bad
    for per in ("row", "tensor", "block"):
        with pytest.raises(FormatValueError, match="row 130, column 149"):
            formats.get(name, per=per).encode(weights)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_decodes_as_torch_reads_it(name: str) -> None:
    """All 256 bit patterns, NaN and infinity among them: files may hold them."""
    fmt = formats.get(name, per="tensor")
    data = np.zeros(fmt.nbytes(1, 256), np.uint8)
    data[:256] = np.arange(256)
    data[256:] = np.frombuffer(np.float32(0.75).tobytes(), np.uint8)
    expected = torch.arange(256).to(torch.uint8).view(TYPES[name]).float().numpy() * np.float32(0.75)
    np.testing.assert_array_equal(fmt.decode(formats.from_bytes(fmt, 1, 256, data))[0], expected)
    assert np.isnan(expected).sum() == (2 if name == "fp8_e4m3" else 6)


def test_e5m2_squares_take_no_more_bits_than_they_say() -> None:
    assert formats.get("fp8_e5m2", per="block").bits_per_weight(4096, 4096) == 8 + 32 / 128**2
    assert formats.get("fp8_e4m3").bits_per_weight(4096, 4096) == 8 + 32 / 4096
    assert formats.get("fp8_e4m3", per="tensor").bits_per_weight(64, 64) == 8 + 32 / 4096
    assert formats.get("fp8_e4m3", per="block").nbytes(129, 129) == 129 * 129 + 3 + 4 * 4


@given(
    weights=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 9)),
        elements=st.floats(-MAX, MAX, width=32, allow_subnormal=True),
    ),
    name=st.sampled_from(NAMES),
    per=st.sampled_from(["row", "tensor", "block"]),
)
def test_any_finite_matrix_is_its_squares_nearest_codes(weights: F32, name: str, per: str) -> None:
    """Against exact arithmetic: each code is the nearest float8 to w / scale, ties to even, in fp32."""
    fmt = formats.get(name, per=per)
    packed = fmt.encode(weights)
    scales = packed.section("scales")
    wide = scales if per == "row" else scales.reshape(1, 1)
    with np.errstate(over="ignore"):
        quotient = torch.from_numpy(weights / wide)
    largest = torch.finfo(TYPES[name]).max
    expected = quotient.clamp(-largest, largest).to(TYPES[name]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(packed.section("codes").view(np.uint8), expected)
    assert np.isfinite(fmt.decode(packed)).all()
    assert formats.from_bytes(fmt, *weights.shape, packed.to_bytes()).to_bytes() == packed.to_bytes()


# --- casts ---


@pytest.mark.parametrize(("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_saturating_casts_are_torchs_at_every_boundary(element: MiniFloat, dtype: torch.dtype) -> None:
    """All values, all midpoints between neighbours and what stands beside them; then everything too large."""
    values = np.arange(256, dtype=np.uint8).view(element.dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    at: F32 = np.concatenate([values, middles, np.float32([460, 464, 470, 61440, 1e9, -1e9, MAX, -MAX, -0.0])])
    at = np.concatenate([at, np.nextafter(at, np.float32(-MAX)), np.nextafter(at, np.float32(MAX))])
    expected = torch.from_numpy(at).clamp(-element.largest, element.largest).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(element.saturate(at.copy()).view(np.uint8), expected)


def test_a_large_number_saturates_where_a_bare_cast_gives_nan_or_infinity() -> None:
    large: Any = np.array([1e9], np.float32)
    assert np.isnan(large.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert np.isinf(large.astype(ml_dtypes.float8_e5m2).astype(np.float32)).all()
    assert E4M3.saturate(large.copy()).astype(np.float32) == 448
    assert E5M2.saturate(large.copy()).astype(np.float32) == 57344


def test_the_table_of_e2m1_is_its_bit_patterns() -> None:
    table = np.arange(16, dtype=np.uint8).view(E2M1.dtype).astype(np.float32)
    assert np.array(E2M1_VALUES, np.float32).tobytes() == table.tobytes()
