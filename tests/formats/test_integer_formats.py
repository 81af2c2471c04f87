"""The family of integers: every width, group, zero point and type of scales, against a slow reference and libraries.

torchao gives scales, zero points and the decoder; compressed-tensors, which divides as we do, gives symmetric codes.
What saved programs hold, int8 and int4 without later parameters, is in test_int_formats.py as well.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from qcompiler import formats
from qcompiler.errors import FormatShapeError, FormatValueError, UnknownFormatError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.integers import LARGEST_SCALE, IntegerFormat

F32 = npt.NDArray[np.float32]
WIDTHS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}
GROUPS = (32, 64, 128, "row")
SCALE_TYPES: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
TORCH_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HALF_STEPS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
"""How far, relatively, a scale may move when it is rounded to its type."""

EVERY = list(itertools.product(WIDTHS, GROUPS, (True, False), SCALE_TYPES))

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODEST = st.one_of(st.floats(-4, 4, width=32), st.floats(-(2.0**16), 2.0**16, width=32), st.just(0.0))


def signed(fmt: Format) -> bool:
    return fmt.name == "int8" and bool(fmt.setting("symmetric"))


def slow_reference(group: F32, fmt: Format) -> tuple[float, int, list[int], list[float]]:
    """Scale, zero point, codes and values of the elements that share a scale, one scalar at a time."""
    bits, kind = WIDTHS[fmt.name], SCALE_TYPES[str(fmt.setting("scale"))]
    low, high, top = float(min(group)), float(max(group)), 2**bits - 1
    if signed(fmt):
        exact = max(-low, high) / 127
        exact = min(exact, float(LARGEST_SCALE)) if kind is np.float32 else exact
    elif fmt.setting("symmetric"):
        exact = (low if -low >= high else high) / -(2 ** (bits - 1))
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        exact = (high - low) / top
    stored = np.float32(np.array(exact, np.float64).astype(kind))
    if stored == 0:
        stored = np.float32(1)
    if signed(fmt):
        zero, first, last = 0, -127, 127
    else:
        zero = 2 ** (bits - 1) if fmt.setting("symmetric") else round(float(np.float32(-low) / stored))
        first, last = 0, top
        zero = max(first, min(last, zero))
    codes, values = [], []
    for w in group:
        code = max(first, min(last, zero + round(float(w / stored))))
        while not np.isfinite(np.float32(code - zero) * stored):
            code += 1 if code < zero else -1
        codes.append(code)
        values.append(float(np.float32(code - zero) * stored))
    return float(stored), zero, codes, values


def assert_equals_the_slow_reference(fmt: Format, weights: F32) -> None:
    rows, cols = weights.shape
    packed = fmt.encode(weights)
    decoded = fmt.decode(packed)
    group = fmt.setting("group")
    size = group if isinstance(group, int) else cols
    codes = fmt.entries(packed, "codes")
    scales = packed.section("scales").astype(np.float64)
    with np.errstate(over="ignore"):
        for r, g in itertools.product(range(rows), range(cols // size)):
            where = slice(g * size, (g + 1) * size)
            scale, zero, expected, values = slow_reference(weights[r, where], fmt)
            assert scales[r, g] == scale
            assert codes[r, where].tolist() == expected
            assert decoded[r, where].tolist() == values
            if not fmt.setting("symmetric"):
                assert packed.section("zeros")[r, g] == zero


@pytest.mark.parametrize(("name", "group", "symmetric", "scale"), EVERY)
def test_random_weights_of_every_magnitude_equal_the_slow_reference(
    name: str, group: Any, symmetric: bool, scale: str
) -> None:
    fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
    rng = np.random.default_rng(0)
    magnitudes = (1.0, 1e-6, 3e4) if scale == "fp16" else (1.0, 1e-38, 1e-44, 3e38)
    for magnitude in magnitudes:
        weights = (np.clip(rng.standard_normal((2, 256)) / 4, -1, 1) * magnitude).astype(np.float32)
        weights[1, 128:] = np.abs(weights[1, 128:])  # one sign alone
        assert_equals_the_slow_reference(fmt, weights)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_weights_equal_the_slow_reference(data: st.DataObject) -> None:
    name, group, symmetric, scale = data.draw(st.sampled_from(EVERY))
    fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
    step = group if isinstance(group, int) else 1 if name == "int8" else 32
    shape = (data.draw(st.integers(1, 3)), step * data.draw(st.integers(1, 3)))
    elements = MODEST if scale == "fp16" else FINITE
    assert_equals_the_slow_reference(fmt, data.draw(hnp.arrays(np.float32, shape, elements=elements)))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 1e-45, -1.1754944e-38, 6e-8, 3.4028235e38, -3.4028235e38])
def test_constant_weights_equal_the_slow_reference(value: float) -> None:
    for name, group, symmetric, scale in EVERY:
        if scale == "fp16" and abs(value) > 1e5:
            continue  # an error, tested below
        fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
        assert_equals_the_slow_reference(fmt, np.full((2, 128), value, np.float32))


def test_largest_weights_of_both_signs_do_not_decode_to_infinity() -> None:
    largest = np.finfo(np.float32).max
    for name, group, symmetric, scale in EVERY:
        if scale == "fp16":
            continue
        fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
        for fraction in np.linspace(0, 1, 41):
            weights = np.zeros((2, 128), np.float32)
            weights[0, :2] = largest, -largest * fraction
            weights[1, :2] = -largest, largest * fraction
            decoded = fmt.decode(fmt.encode(weights)).astype(np.float64)
            assert np.isfinite(decoded).all()
            step = 2 * float(largest) / (2 ** WIDTHS[name] - 1)
            assert (np.abs(decoded - weights) <= 1.1 * step).all(), (fmt, fraction)


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_scale_beyond_fp16_is_an_error_that_names_the_group_and_the_way_out(name: str, symmetric: bool) -> None:
    weights = np.zeros((3, 96), np.float32)
    weights[2, 70] = -3e8
    with pytest.raises(FormatValueError, match=rf"row 2, columns 64…95.*65504.*{name} with scale=fp32"):
        formats.get(name, group=32, symmetric=symmetric, scale="fp16").encode(weights)
    with pytest.raises(FormatValueError, match=r"row 2, columns 0…95"):
        formats.get(name, group="row", symmetric=symmetric, scale="fp16").encode(weights)
    wide = formats.get(name, group=32, symmetric=symmetric, scale="fp32")
    assert np.isfinite(wide.encode(weights).section("scales")).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_named_for_every_member(bad: float) -> None:
    weights = np.ones((3, 128), np.float32)
    weights[2, 33] = bad
    for name, group, symmetric, scale in EVERY:
        with pytest.raises(FormatValueError, match=f"row 2, column 33 is {bad}"):
            formats.get(name, group=group, symmetric=symmetric, scale=scale).encode(weights)


# --- bytes ---


def encode(seed: int, shape: tuple[int, int], name: str, **params: Any) -> tuple[PackedTensor, npt.NDArray[np.int64]]:
    fmt = formats.get(name, **params)
    packed = fmt.encode(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    return packed, fmt.entries(packed, "codes").astype(np.int64)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["int2", "int3", "int4"])
def test_codes_are_one_stream_of_bits_lowest_first(name: str, group: Any) -> None:
    bits = WIDTHS[name]
    packed, codes = encode(0, (3, 256), name, group=group)
    for row, stored in zip(codes, packed.section("codes"), strict=True):
        number = sum(int(code) << (bits * i) for i, code in enumerate(row))
        assert stored.tobytes() == number.to_bytes(256 * bits // 8, "little")


def test_bytes_of_int8_and_int4_are_those_of_saved_programs() -> None:
    rng = np.random.default_rng(1234)
    weights = (rng.standard_normal((65, 384)) * rng.uniform(0.01, 3, (65, 1))).astype(np.float32)

    def digest(name: str, **params: Any) -> str:
        return hashlib.sha256(formats.get(name, **params).encode(weights).to_bytes()).hexdigest()[:16]

    assert {
        "int8": digest("int8"),
        "int4": digest("int4"),
        "int4 64": digest("int4", group=64),
        "int4 128 asymmetric": digest("int4", group=128, symmetric=False),
    } == BYTES_OF_SAVED_PROGRAMS


BYTES_OF_SAVED_PROGRAMS = {
    "int8": "17319d1be5fa3437",
    "int4": "ff01c0b95cfdd09b",
    "int4 64": "c4af6ded7df3bf6d",
    "int4 128 asymmetric": "413668e5203ff315",
}


def test_sections_of_odd_widths_and_of_one_scale_per_row() -> None:
    def sections(name: str, rows: int, cols: int, **params: Any) -> list[tuple[str, str, tuple[int, ...], int]]:
        found = formats.get(name, **params).sections(rows, cols)
        return [(s.name, s.dtype.name, s.shape, s.offset) for s in found]

    assert sections("int3", 5, 64, group=64, symmetric=False) == [
        ("codes", "uint8", (5, 24), 0), ("scales", "float16", (5, 1), 120), ("zeros", "uint8", (5, 1), 130),
    ]  # fmt: skip
    assert sections("int2", 5, 96, group="row", scale="bf16") == [
        ("codes", "uint8", (5, 24), 0), ("scales", "bfloat16", (5, 1), 120),
    ]  # fmt: skip
    assert sections("int8", 5, 7, symmetric=False) == [
        ("codes", "uint8", (5, 7), 0), ("scales", "float32", (5, 1), 36), ("zeros", "uint8", (5, 1), 56),
    ]  # fmt: skip
    assert sections("int8", 5, 96, group=32, scale="fp16") == [
        ("codes", "int8", (5, 96), 0), ("scales", "float16", (5, 3), 480),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "group", "symmetric", "scale"), EVERY)
def test_bits_per_weight_and_bytes_round_trip(name: str, group: Any, symmetric: bool, scale: str) -> None:
    fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
    size = group if isinstance(group, int) else 4096
    per_group = (32 if scale == "fp32" else 16) + (0 if symmetric else 8)
    assert fmt.bits_per_weight(4096, 4096) == WIDTHS[name] + per_group / size
    packed, _ = encode(0, (9, 256), name, group=group, symmetric=symmetric, scale=scale)
    again = formats.from_bytes(fmt, 9, 256, packed.to_bytes())
    np.testing.assert_array_equal(fmt.decode(again), fmt.decode(packed))


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_longer_than_a_tile_and_threads_give_the_same_bytes(
    name: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.random.default_rng(0).standard_normal((7, 512)).astype(np.float32)
    for group in (32, "row"):
        fmt = formats.get(name, group=group, symmetric=symmetric, scale="fp32")
        expected = fmt.encode(weights).to_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("qcompiler.formats.base.TILE", 128)
            patch.setattr("qcompiler.formats.base.THREAD_SHARE", 256)
            assert fmt.encode(weights, threads=3).to_bytes() == expected


def test_shapes_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(FormatShapeError, match=r"int3.*K = 96 is not; group = 32 would fit"):
        formats.get("int3", group=64).encode(np.zeros((2, 96), np.float32))
    with pytest.raises(FormatShapeError, match=r"int2.*multiple of 32, and K = 40 is not; nf4 and int8 take any K"):
        formats.get("int2", group="row").encode(np.zeros((2, 40), np.float32))
    with pytest.raises(FormatShapeError, match=r"int8.*K = 40 is not; no group of int8 fits"):
        formats.get("int8", group=32).encode(np.zeros((2, 40), np.float32))
    with pytest.raises(UnknownFormatError, match=r"group=16 is not one of 32, 64, 128, 'row'"):
        formats.get("int4", group=16)
    with pytest.raises(UnknownFormatError, match=r"scale='f32' is not one of 'fp16', 'bf16', 'fp32'"):
        formats.get("int8", scale="f32")


# --- torchao ---


def torchao_scales(
    fmt: IntegerFormat, weights: F32, size: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    mapping = MappingType.SYMMETRIC if fmt.setting("symmetric") else MappingType.ASYMMETRIC
    target = torch.int8 if fmt.signed else torch.uint8
    first, last = (-127, 127) if fmt.signed else (0, fmt.largest)
    return choose_qparams_affine(
        torch.from_numpy(weights).to(dtype), mapping, (1, size), target, first, last,
        scale_dtype=TORCH_TYPES[str(fmt.setting("scale"))], zero_point_dtype=torch.int32,
    )  # fmt: skip


ASYMMETRIC_OR_SIGNED = [(n, g, s, t) for n, g, s, t in EVERY if not s or n == "int8"]


@pytest.mark.parametrize(("name", "group", "symmetric", "scale"), ASYMMETRIC_OR_SIGNED)
def test_scales_are_torchaos_and_its_zero_points_and_codes_differ_at_ties_alone(
    name: str, group: Any, symmetric: bool, scale: str
) -> None:
    fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
    assert isinstance(fmt, IntegerFormat)
    weights = np.random.default_rng(0).standard_normal((65, 384)).astype(np.float32)
    size = fmt.group_size(384)
    packed = fmt.encode(weights)
    scales, zeros = torchao_scales(fmt, weights, size)
    ours = torch.from_numpy(packed.section("scales").astype(np.float32))
    torch.testing.assert_close(ours, scales.float().reshape(ours.shape), rtol=0, atol=0)
    if symmetric:
        zero = torch.zeros(ours.shape, dtype=torch.int32)
    else:
        zero = torch.from_numpy(packed.section("zeros").astype(np.int32))
        differ = (zero != zeros.reshape(zero.shape)).numpy()
        low = np.minimum(weights.reshape(65, -1, size).min(axis=2), 0)
        place = -low / ours.numpy()
        assert (np.abs(place - np.floor(place) - 0.5)[differ] <= 1.01 * fmt.largest * HALF_STEPS[scale]).all()
    first, last = (-127, 127) if fmt.signed else (0, fmt.largest)
    target = torch.int8 if fmt.signed else torch.uint8
    theirs = quantize_affine(torch.from_numpy(weights), (1, size), ours, zero, target, first, last).numpy()
    codes = fmt.entries(packed, "codes")
    differ = codes != theirs
    quotient = np.abs(weights.astype(np.float64) / np.repeat(ours.numpy(), size, axis=1))
    assert (np.abs(quotient - np.floor(quotient) - 0.5)[differ] < 1e-4).all()  # 1 / scale instead of a division
    assert (np.abs(codes.astype(int) - theirs.astype(int)) <= 1).all()
    assert differ.mean() < 1e-3
    again = dequantize_affine(
        torch.from_numpy(codes), (1, size), ours, zero, target, first, last, output_dtype=torch.float32
    )
    np.testing.assert_array_equal(fmt.decode(packed), again.numpy())


# --- compressed-tensors ---


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("group", GROUPS)
def test_symmetric_codes_and_values_are_those_of_compressed_tensors_given_the_scale(name: str, group: Any) -> None:
    """It divides by the scale, too. Its asymmetric codes round after adding the zero point, and differ at ties."""
    fmt = formats.get(name, group=group, scale="fp32")
    assert isinstance(fmt, IntegerFormat)
    rng = np.random.default_rng(0)
    strategy = {"strategy": "group", "group_size": group} if isinstance(group, int) else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=WIDTHS[name], symmetric=True, **strategy)
    for weights in (
        rng.standard_normal((33, 384)).astype(np.float32),
        (rng.integers(-16, 17, (33, 384)) / 2).astype(np.float32),  # many ties
        (rng.standard_normal((33, 384)) * 1e30).astype(np.float32),
    ):
        packed = fmt.encode(weights)
        scales = torch.from_numpy(packed.section("scales").copy())
        theirs = quantize(torch.from_numpy(weights), scales, torch.zeros_like(scales, dtype=torch.int8), args)
        codes = fmt.entries(packed, "codes").astype(np.int64) - (0 if fmt.signed else fmt.half)
        np.testing.assert_array_equal(codes, theirs.numpy().astype(np.int64))
        values = dequantize(theirs.to(torch.int8), scales, torch.zeros_like(scales, dtype=torch.int8), args=args)
        np.testing.assert_array_equal(fmt.decode(packed), values.numpy())


def test_asymmetric_ties_go_to_the_even_quotient_not_to_the_even_code() -> None:
    """ONNX QuantizeLinear rounds before it adds the zero point: with an odd zero point that is another code."""
    weights = np.zeros((1, 32), np.float32)
    weights[0, :6] = (-3, 12, 0.5, 1.5, 2.5, -0.5)  # scale 1, zero point 3
    packed = formats.get("int4", symmetric=False, scale="fp32").encode(weights)
    assert (packed.section("scales")[0, 0], packed.section("zeros")[0, 0]) == (1, 3)
    codes = formats.get("int4", symmetric=False, scale="fp32").entries(packed, "codes")[0, :6]
    assert codes.tolist() == [0, 15, 3, 5, 5, 3]


# --- error ---


@pytest.mark.parametrize("name", WIDTHS)
def test_a_narrower_group_a_zero_point_and_more_bits_lower_the_error(name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)

    def error(**params: Any) -> float:
        fmt = formats.get(name, **params)
        return float(np.square(fmt.decode(fmt.encode(weights)) - weights).mean())

    by_group = [error(group=g) for g in GROUPS]
    assert by_group == sorted(by_group)
    one_sided = np.abs(weights)
    symmetric, asymmetric = (
        float(np.square(f.decode(f.encode(one_sided)) - one_sided).mean())
        for f in (formats.get(name, group=32, symmetric=s) for s in (True, False))
    )
    assert asymmetric < 0.5 * symmetric


def test_error_stays_within_half_a_step_inside_of_the_range() -> None:
    weights = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    for name, group, symmetric, scale in EVERY:
        fmt = formats.get(name, group=group, symmetric=symmetric, scale=scale)
        packed = fmt.encode(weights)
        size = group if isinstance(group, int) else 256
        step = np.repeat(np.abs(packed.section("scales").astype(np.float64)), size, axis=1)
        error = np.abs(fmt.decode(packed) - weights)
        codes = fmt.entries(packed, "codes").astype(int)
        ends = (-127, 127) if signed(fmt) else (0, 2 ** WIDTHS[name] - 1)
        inside = (codes > ends[0]) & (codes < ends[1])
        assert (error[inside] <= 0.5 * step[inside] * (1 + 1e-5)).all()
        # Clipped: the end opposite to the extreme; zero points and scales that were rounded.
        assert (error <= (1 + 2 ** WIDTHS[name] * HALF_STEPS[scale]) * step).all(), fmt
