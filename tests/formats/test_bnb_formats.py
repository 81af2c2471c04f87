"""fp4, nested statistics and LLM.int8 against bitsandbytes' CPU code, bit for bit; nf4 alone is in test_nf4.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import bitsandbytes.functional as bnb
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from bitsandbytes.functional import QuantState
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcompiler import formats
from qcompiler.errors import FormatValueError, UnknownFormatError
from qcompiler.formats import Format, PackedTensor, fp4, llm_int8, nested
from qcompiler.formats.nf4 import BLOCKS, NF4

F32 = npt.NDArray[np.float32]
TYPES = ("nf4", "fp4")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 70)), elements=FINITE)
SCALES = (1.0, 0.02, 1e-30, 1e-38, 1e-40, 3e-45, 3e37)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These matrices are small: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def assert_same_bits(found: F32, theirs: torch.Tensor) -> None:
    np.testing.assert_array_equal(bits(found), bits(theirs.numpy()))


def assert_same_values(found: F32, theirs: torch.Tensor) -> None:
    """The same bits but for the sign of zero: of fp4's code 8, bitsandbytes' path for AVX-512 makes 0 and its others
    -0."""
    zeros = found == 0
    np.testing.assert_array_equal(zeros, theirs.numpy() == 0)
    np.testing.assert_array_equal(bits(found)[~zeros], bits(theirs.numpy())[~zeros])


def assert_codes_and_absmax_equal(name: str, block: int, weights: npt.NDArray[Any], tensor: torch.Tensor) -> None:
    packed = formats.get(name, block=block).encode(weights)
    codes, state = bnb.quantize_4bit(tensor, blocksize=block, quant_type=name)
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy().ravel())
    assert_same_bits(packed.section("absmax"), state.absmax)


def assert_nested_equal(name: str, block: int, weights: F32) -> PackedTensor:
    """Codes as bitsandbytes', and the statistics as its `quantize_blockwise` of its absmax less our offset."""
    packed = formats.get(name, block=block, double_quant=True).encode(weights)
    codes, plain = bnb.quantize_4bit(torch.from_numpy(weights), blocksize=block, quant_type=name)
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy().ravel())
    offset = float(packed.section("offset")[0])
    absmax, state = bnb.quantize_blockwise(plain.absmax - offset, blocksize=nested.BLOCKS)
    np.testing.assert_array_equal(packed.section("absmax"), absmax.numpy())
    assert_same_bits(packed.section("absmax_scales"), state.absmax)
    return packed


# --- tables ---


def test_fp4_table_is_bitsandbytes_table() -> None:
    assert_same_bits(np.array(fp4.TABLE, np.float32), bnb.get_4bit_type("fp4", device="cpu"))


def test_dynamic_map_is_bitsandbytes_map_and_its_published_definition() -> None:
    assert_same_bits(nested.DYNAMIC, bnb.create_dynamic_map())
    exact = [0.0, 1.0]
    for exponent in range(7):
        decade = 10.0 ** (exponent - 6)
        for k in range(1 << exponent):
            magnitude = decade * (0.1 + 0.9 * (k + 0.5) / (1 << exponent))
            exact += [magnitude, -magnitude]
    np.testing.assert_allclose(nested.DYNAMIC, sorted(exact), rtol=3e-7)


def test_blocks_are_those_bitsandbytes_takes() -> None:
    assert BLOCKS == (32, 64, 128, 256, 512, 1024, 2048, 4096)
    weights = torch.ones(2, 4096)
    for block in BLOCKS:
        bnb.quantize_4bit(weights, blocksize=block)
    for other in (16, 96, 8192):
        with pytest.raises(ValueError, match="invalid blocksize"):
            bnb.quantize_4bit(weights, blocksize=other)
        with pytest.raises(UnknownFormatError, match=f"block={other} is not one of"):
            formats.get("fp4", block=other)


# --- codes and plain statistics ---


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_codes_and_absmax_equal_bitsandbytes_for_every_block_shape_and_magnitude(name: str, block: int) -> None:
    rng = np.random.default_rng(block)
    for shape in ((1, 1), (3, 5), (2, 32), (7, 129), (33, 97), (3, 4096 + 64)):
        base = rng.standard_normal(shape)
        for scale in SCALES:
            weights = (base * scale).astype(np.float32)
            assert_codes_and_absmax_equal(name, block, weights, torch.from_numpy(weights))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754944e-38])
def test_constant_weights_equal_bitsandbytes(value: float) -> None:
    for shape in ((1, 1), (1, 64), (5, 27), (64, 65)):
        weights = np.full(shape, value, np.float32)
        for block in (32, 4096):
            assert_codes_and_absmax_equal("fp4", block, weights, torch.from_numpy(weights))
            assert_nested_equal("fp4", block, weights)
            assert_nested_equal("nf4", block, weights)


def test_fp4_weights_at_and_beside_every_threshold_equal_bitsandbytes() -> None:
    middle = fp4.FP4.thresholds
    beside = np.concatenate([np.nextafter(middle, np.float32(-2)), middle, np.nextafter(middle, np.float32(2))])
    for absmax in (1.0, 0.75, 3.3e-5):
        block = np.full(64, absmax, np.float32)
        block[: beside.size] = beside * np.float32(absmax)
        for weights in (np.tile(block, (3, 1)), block[None, :51]):  # whole blocks, and a short one that divides
            assert_codes_and_absmax_equal("fp4", 64, weights.copy(), torch.from_numpy(weights.copy()))


def test_fp4_small_weights_of_either_sign_take_the_two_codes_of_zero() -> None:
    weights = np.array([[1, 1e-9, -1e-9, 0, -0.0, 1e-3, -1e-3, -1]], np.float32)
    codes = formats.get("fp4").entries(formats.get("fp4").encode(weights), "codes")
    assert codes.tolist() == [3, 8, 0, 0, 0, 8, 0, 11]
    assert formats.get("fp4").decode(formats.get("fp4").encode(weights)).tolist() == [[1, 0, 0, 0, 0, 0, 0, -1]]


def test_fp4_sixteen_bit_weights_and_many_tiles_equal_bitsandbytes() -> None:
    weights = np.random.default_rng(1).standard_normal((611, 337)).astype(np.float32)
    assert_codes_and_absmax_equal("fp4", 128, weights, torch.from_numpy(weights))
    half = weights[:37].astype(np.float16)
    assert_codes_and_absmax_equal("fp4", 64, half, torch.from_numpy(half))
    brain = torch.from_numpy(weights[:37]).to(torch.bfloat16)
    assert_codes_and_absmax_equal("fp4", 32, brain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16), brain)


@settings(max_examples=100, deadline=None)
@given(weights=MATRICES, block=st.sampled_from(BLOCKS))
def test_fp4_of_any_finite_weights_equals_bitsandbytes(weights: F32, block: int) -> None:
    assert_codes_and_absmax_equal("fp4", block, weights, torch.from_numpy(weights.copy()))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("double_quant", [False, True])
def test_nan_and_infinity_in_a_short_last_block_are_named(name: str, double_quant: bool) -> None:
    fmt = formats.get(name, block=32, double_quant=double_quant)
    for bad in (np.nan, np.inf, -np.inf):
        weights = np.ones((3, 43), np.float32)
        weights[2, 42] = bad
        with pytest.raises(FormatValueError, match=f"row 2, column 42 is {bad}"):
            fmt.encode(weights)


# --- nested statistics ---


def levels_and_their_neighbours() -> Iterator[F32]:
    """Blocks of 256 with absmax 1 that visit every rounding level of the library, and both sides of its boundaries."""
    boundary = ((np.arange(65536) - 0.5) / 32767.5 - 1).astype(np.float32)
    center = (np.arange(65536) / 32767.5 - 1).astype(np.float32)
    for values in (center, boundary, np.nextafter(boundary, np.float32(-2)), np.nextafter(boundary, np.float32(2))):
        inside = np.clip(np.append(values, np.zeros(-values.size % 255, np.float32)), -1, 1).reshape(-1, 255)
        yield np.concatenate([inside, np.ones((len(inside), 1), np.float32)], axis=1).reshape(-1)


def nested_of(absmax: F32, offset: float) -> tuple[npt.NDArray[np.uint8], F32]:
    codes = np.zeros(absmax.size, np.uint8)
    scales = np.zeros(-(-absmax.size // nested.BLOCKS), np.float32)
    nested.encode(absmax, np.float32(offset), codes, scales)
    return codes, scales


def assert_nested_codes_equal(absmax: F32, offset: float) -> None:
    codes, scales = nested_of(absmax, offset)
    theirs, state = bnb.quantize_blockwise(torch.from_numpy(absmax) - offset, blocksize=nested.BLOCKS)
    np.testing.assert_array_equal(codes, theirs.numpy())
    assert_same_bits(scales, state.absmax)


def test_nested_codes_equal_bitsandbytes_at_every_level_and_beside_it() -> None:
    for blocks in levels_and_their_neighbours():
        assert_nested_codes_equal(blocks, 0.0)
        assert_nested_codes_equal(blocks * np.float32(0.37), 0.0)


def test_nested_codes_use_nearly_the_whole_map() -> None:
    """Guards the test above: all codes occur but those that lie between two of the library's levels."""
    codes = np.concatenate([nested_of(b, 0.0)[0] for b in levels_and_their_neighbours()])
    assert len(np.unique(codes)) == 249


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nested_codes_of_any_statistics_equal_bitsandbytes(data: st.DataObject) -> None:
    absmax = data.draw(hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(0, 2.0**127, width=32)))
    absmax = absmax * data.draw(st.sampled_from([np.float32(s) for s in (1, 1e-38, 1e-20, 1e-3)]))
    offsets = (0, absmax.min(), absmax.max(), nested.mean_offset(absmax))
    assert_nested_codes_equal(absmax, float(data.draw(st.sampled_from(offsets))))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_nested_codes_and_statistics_equal_bitsandbytes_given_the_offset(name: str, block: int) -> None:
    rng = np.random.default_rng(block)
    for shape in ((1, 1), (3, 5), (1, 384), (33, 97), (257, 2 * block), (5, 4099)):
        base = rng.standard_normal(shape) * rng.uniform(0.5, 2, (shape[0], 1))
        for scale in SCALES:
            assert_nested_equal(name, block, (base * scale).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(weights=MATRICES, block=st.sampled_from((32, 64)), name=st.sampled_from(TYPES))
def test_nested_form_of_any_finite_weights_equals_bitsandbytes(weights: F32, block: int, name: str) -> None:
    assert_nested_equal(name, block, weights)


@pytest.mark.parametrize("name", TYPES)
def test_our_offset_lies_within_a_millionth_of_bitsandbytes_whatever_its_threads(name: str) -> None:
    threads = torch.get_num_threads()
    try:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            weights = (rng.standard_normal((1031, 384)) * rng.uniform(0.1, 3, (1031, 1))).astype(np.float32)
            ours = float(formats.get(name, double_quant=True).encode(weights).section("offset")[0])
            absmax = formats.get(name).encode(weights).section("absmax")
            assert ours == np.float32(math.fsum(absmax.tolist()) / absmax.size)
            for count in (1, 2):
                torch.set_num_threads(count)
                _, state = bnb.quantize_4bit(torch.from_numpy(weights), compress_statistics=True, quant_type=name)
                assert abs(ours - float(state.offset)) <= 1e-6 * ours
    finally:
        torch.set_num_threads(threads)


def test_whole_nested_state_equals_bitsandbytes_where_the_offsets_agree() -> None:
    """No offset is handed over here: weights whose absmax sum exactly in fp32, in any order."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 512)).astype(np.float32)
    weights[:, ::64] = 4 + rng.integers(0, 8, (64, 8)) / 8
    packed = formats.get("nf4", double_quant=True).encode(weights)
    codes, state = bnb.quantize_4bit(torch.from_numpy(weights), compress_statistics=True, quant_type="nf4")
    assert packed.section("offset")[0] == float(state.offset)
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy().ravel())
    np.testing.assert_array_equal(packed.section("absmax"), state.absmax.numpy())
    assert_same_bits(packed.section("absmax_scales"), state.state2.absmax)


def test_offset_of_huge_weights_is_finite_and_of_many_parts_is_the_mean() -> None:
    assert nested.mean_offset(np.full(70000, 3.4e38, np.float32)) == np.float32(3.4e38)
    absmax = np.random.default_rng(0).uniform(0, 1, 150_001).astype(np.float32)
    assert nested.mean_offset(absmax) == np.float32(math.fsum(absmax.tolist()) / absmax.size)


def test_nested_statistics_of_many_parts_equal_bitsandbytes() -> None:
    """More second-level blocks than are encoded at a time, and a short last one."""
    absmax = np.random.default_rng(0).uniform(0.5, 1, 256 * 256 * 2 + 77).astype(np.float32)
    assert_nested_codes_equal(absmax, 0.75)


def state_of(packed: PackedTensor, name: str, block: int) -> tuple[torch.Tensor, QuantState]:
    """Our canonical bytes as bitsandbytes' tensors."""
    scales, offset = packed.section("absmax_scales"), packed.section("offset")
    inner = QuantState(
        absmax=torch.from_numpy(scales.copy()), blocksize=256, code=bnb.create_dynamic_map(), dtype=torch.float32
    )
    state = QuantState(
        absmax=torch.from_numpy(packed.section("absmax").copy()),
        shape=torch.Size((packed.rows, packed.cols)),
        code=bnb.get_4bit_type(name, device="cpu"),
        blocksize=block,
        quant_type=name,
        dtype=torch.float32,
        offset=torch.tensor(offset[0]),
        state2=inner,
    )
    return torch.from_numpy(packed.section("codes").copy()).unsqueeze(1), state


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("block", (32, 64, 128, 256, 512, 1024))
def test_decode_equals_bitsandbytes_plain_and_nested(name: str, block: int) -> None:
    """On whole blocks per row only: with others bitsandbytes 0.50's CPU dequantiser reads the wrong absmax."""
    for seed, scale in enumerate((1.0, 1e-3, 1e30, 1e-39)):
        weights = (np.random.default_rng(seed).standard_normal((37, 2 * block)) * scale).astype(np.float32)
        plain = formats.get(name, block=block)
        codes, state = bnb.quantize_4bit(torch.from_numpy(weights), blocksize=block, quant_type=name)
        assert_same_values(plain.decode(plain.encode(weights)), bnb.dequantize_4bit(codes, state))
        fmt = formats.get(name, block=block, double_quant=True)
        packed = fmt.encode(weights)
        assert_same_values(fmt.decode(packed), bnb.dequantize_4bit(*state_of(packed, name, block)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 43), (9, 331), (130, 257)])
def test_decode_of_odd_shapes_is_the_table_times_bitsandbytes_absmax(name: str, shape: tuple[int, int]) -> None:
    fmt = formats.get(name, block=32, double_quant=True)
    packed = fmt.encode(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    _, state = state_of(packed, name, 32)
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    table = state.code.numpy()[fmt.entries(packed, "codes")]
    expected = table[: shape[0] * shape[1]] * np.repeat(absmax.numpy(), 32)[: shape[0] * shape[1]]
    np.testing.assert_array_equal(bits(fmt.decode(packed)).reshape(-1), bits(expected))


def test_sections_and_bits_per_weight_of_the_nested_form() -> None:
    fmt = formats.get("nf4", block=64, double_quant=True)
    sections = fmt.sections(300, 384)  # 1800 blocks, 8 of the second level
    assert [(s.name, s.dtype.name, s.shape) for s in sections] == [
        ("codes", "uint8", (57600,)),
        ("absmax", "uint8", (1800,)),
        ("absmax_scales", "float32", (8,)),
        ("offset", "float32", (1,)),
    ]
    assert fmt.nbytes(300, 384) == 57600 + 1800 + 8 * 4 + 4
    assert fmt.bits_per_weight(4096, 4096) == 4 + 8 / 64 + 32 / 64 / 256 + 32 / 4096**2
    assert formats.get("fp4", block=32).bits_per_weight(4096, 4096) == 5


def test_nested_bytes_hold_whatever_the_tile_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(0).standard_normal((611, 337)).astype(np.float32)
    fmt = formats.get("nf4", block=32, double_quant=True)
    expected = fmt.encode(weights).to_bytes()
    monkeypatch.setattr("qcompiler.formats.base.TILE", 1 << 12)
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 1 << 12)
    assert fmt.encode(weights, threads=3).to_bytes() == expected


# --- LLM.int8: weights ---


INT8 = formats.get("llm_int8")


def assert_rows_equal_bitsandbytes(weights: F32) -> None:
    packed = INT8.encode(weights)
    codes, absmax, _ = bnb.int8_vectorwise_quant(torch.from_numpy(weights.copy()))
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy())
    assert_same_bits(packed.section("absmax").reshape(-1), absmax)
    decoded = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, absmax)
    np.testing.assert_array_equal(INT8.decode(packed), decoded.numpy())


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-20, 1e-36, 1e30, 5e35])
def test_llm_int8_codes_absmax_and_values_equal_bitsandbytes(scale: float) -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (1, 7), (33, 97), (300, 384), (3, 70_001)):
        weights = (np.clip(rng.standard_normal(shape), -5, 5) * scale).astype(np.float32)
        weights[0, 0] = scale
        assert_rows_equal_bitsandbytes(weights)
    for value in (scale, -scale):
        assert_rows_equal_bitsandbytes(np.full((2, 9), value, np.float32))


@settings(max_examples=150, deadline=None)
@given(
    weights=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 70)),
        elements=st.floats(-(2.0**120), 2.0**120, width=32),
    )
)
def test_llm_int8_of_any_weights_equals_bitsandbytes(weights: F32) -> None:
    weights[:, 0] = np.where(np.abs(weights).max(axis=1) < 1e-36, np.float32(1), weights[:, 0])  # smaller: below
    assert_rows_equal_bitsandbytes(weights)


def test_llm_int8_of_fp16_weights_equals_bitsandbytes() -> None:
    half = np.random.default_rng(0).standard_normal((65, 130)).astype(np.float16)
    half[3] = 0
    half[4] = np.float16(6e-8)
    packed = INT8.encode(half)
    codes, absmax, _ = bnb.int8_vectorwise_quant(torch.from_numpy(half.copy()))
    live = [r for r in range(65) if r != 3]  # 0 / 0 there, converted to an integer
    np.testing.assert_array_equal(packed.section("codes")[live], codes.numpy()[live])
    assert_same_bits(packed.section("absmax").reshape(-1), absmax)
    assert not packed.section("codes")[3].any()


def test_llm_int8_ties_go_to_even() -> None:
    packed = INT8.encode(np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]], np.float32))
    assert packed.section("codes")[0].tolist() == [127, 0, 2, 2, 0, -2, -127]


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-42, 1.1754944e-38, 3e-37, 3.79e-37])
def test_llm_int8_rows_without_a_finite_reciprocal_are_still_rounded_to_the_nearest_step(largest: float) -> None:
    weights = (np.linspace(-1, 1, 41)[None] * largest).astype(np.float32)
    packed = INT8.encode(weights)
    absmax = np.float32(largest)
    assert packed.section("absmax")[0, 0] == absmax
    if largest:
        assert packed.section("codes")[0, [0, -1]].tolist() == [-127, 127]
        exact = weights.astype(np.float64) / float(absmax) * 127
        assert (np.abs(packed.section("codes") - exact) <= 0.5 + 1e-5).all()
    else:
        assert not packed.section("codes").any()


def test_llm_int8_row_whose_values_would_overflow_is_an_error_naming_it() -> None:
    weights = np.ones((5, 9), np.float32)
    weights[3, 4] = -2.6e36
    assert np.isfinite(INT8.decode(INT8.encode(weights))).all()
    weights[3, 4] = -2.7e36
    with pytest.raises(FormatValueError, match=r"row 3: its largest weight is 2\.7e\+36.*int8 and nf4"):
        INT8.encode(weights)


# --- LLM.int8: the product ---


def activations(rows: int, cols: int, outliers: int, seed: int = 0) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    for column in rng.choice(cols, outliers, replace=False):
        x[rng.integers(0, rows), column] = rng.choice([-1, 1]) * rng.uniform(6, 60)
    return x


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("outliers", [0, 1, 5, 48])
@pytest.mark.parametrize("threshold", [6.0, 0.5, 1e-3])
def test_activations_codes_absmax_and_outlier_columns_equal_bitsandbytes(
    rows: int, outliers: int, threshold: float
) -> None:
    x = activations(rows, 48, outliers)
    x[-1, 3] = np.float32(threshold)  # at the threshold counts as an outlier
    ours = llm_int8.quantise_rows(x, threshold)
    codes, absmax, columns = bnb.int8_vectorwise_quant(torch.from_numpy(x.copy()), threshold=threshold)
    np.testing.assert_array_equal(np.flatnonzero(ours.outliers), columns.numpy())
    assert_same_bits(ours.absmax.reshape(-1), absmax)
    live = absmax.numpy() > 0  # a row of outliers alone is 0 / 0 in bitsandbytes
    np.testing.assert_array_equal(ours.codes[live], codes.numpy()[live])
    assert not ours.codes[~live].any()


def test_output_scale_is_cudas_and_with_the_cpus_constant_the_bits_are_the_cpus() -> None:
    assert llm_int8.OUTPUT_SCALE == np.float32(6.200012e-05) == np.float32(1 / 127**2)
    cpu = np.float32(6.200124e-05)
    assert cpu != llm_int8.OUTPUT_SCALE
    rng = np.random.default_rng(0)
    sums = rng.integers(-(2**27), 2**27, (33, 65), dtype=np.int32)
    rows, cols = (rng.uniform(1e-3, 9, n).astype(np.float32) for n in (33, 65))
    theirs = bnb.int8_mm_dequant(torch.from_numpy(sums), torch.from_numpy(rows), torch.from_numpy(cols))
    assert theirs.dtype == torch.float16
    exact = torch.ops.bitsandbytes.int8_mm_dequant(
        torch.from_numpy(sums), torch.from_numpy(rows), torch.from_numpy(cols), dtype=torch.float32
    )
    assert_same_bits(llm_int8.scale_output(sums, rows[:, None], cols, cpu), exact)
    ours = llm_int8.scale_output(sums, rows[:, None], cols)
    np.testing.assert_allclose(ours, exact.numpy(), rtol=1.9e-5)


@pytest.mark.parametrize(("rows", "outliers"), [(1, 0), (1, 3), (2, 1), (7, 20), (33, 0), (33, 97)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_whole_product_equals_bitsandbytes_but_for_the_constant(rows: int, outliers: int, with_bias: bool) -> None:
    x = activations(rows, 97, outliers)
    weights = np.random.default_rng(1).standard_normal((65, 97)).astype(np.float32)
    bias = np.random.default_rng(2).standard_normal(65).astype(np.float32) if with_bias else None
    packed = INT8.encode(weights)
    ours = llm_int8.linear(x, packed, threshold=6.0, bias=bias)
    a = torch.from_numpy(x.copy())
    ca, sca, columns = bnb.int8_vectorwise_quant(a, threshold=6.0)
    cb = torch.from_numpy(packed.section("codes").copy())
    scb = torch.from_numpy(packed.section("absmax").reshape(-1).copy())
    theirs, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
        a, ca, cb, sca, scb, columns, None if bias is None else torch.from_numpy(bias)
    )
    rest = llm_int8.quantise_rows(x, 6.0)
    sums = rest.codes.astype(np.int32) @ packed.section("codes").astype(np.int32).T
    by_constant = np.abs(llm_int8.scale_output(sums, rest.absmax, packed.section("absmax"))) * 1.9e-5
    alone = np.where(rest.outliers, np.abs(x), 0) @ np.abs(INT8.decode(packed)).T
    assert (np.abs(ours - theirs.numpy()) <= by_constant + 1e-5 * alone + 1e-6).all()


def test_outliers_keep_the_product_close_where_plain_int8_loses_it() -> None:
    x = activations(16, 256, 4, seed=3)
    x[:, 7] *= 400
    weights = np.random.default_rng(4).standard_normal((32, 256)).astype(np.float32)
    packed = INT8.encode(weights)
    exact = x.astype(np.float64) @ INT8.decode(packed).T
    mixed, plain = (llm_int8.linear(x, packed, threshold=t) for t in (6.0, 1e30))
    assert np.abs(mixed - exact).mean() < 0.2 * np.abs(plain - exact).mean()


def test_rows_of_zeros_and_of_outliers_alone_give_the_outliers_product() -> None:
    weights = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    packed = INT8.encode(weights)
    x = np.zeros((3, 8), np.float32)
    x[1] = 100
    x[2, 0] = 1
    y = llm_int8.linear(x, packed)
    assert (y[0] == 0).all()
    np.testing.assert_allclose(y[1:], x[1:] @ INT8.decode(packed).T, rtol=1e-5)


# --- the family ---


def test_only_the_statistics_differ_between_plain_and_nested() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    plain, packed = (formats.get("nf4", double_quant=flag) for flag in (False, True))
    np.testing.assert_array_equal(plain.encode(weights).section("codes"), packed.encode(weights).section("codes"))
    absmax = plain.encode(weights).section("absmax")
    values = packed.decode(packed.encode(weights))
    relative = np.abs(values - plain.decode(plain.encode(weights))) / np.repeat(absmax, 64).reshape(64, 256)
    assert 0 < relative.max() < 0.02


@pytest.mark.parametrize("fmt", [NF4(double_quant=True), fp4.FP4(), llm_int8.LLMInt8()], ids=str)
def test_kernels_find_a_single_table_of_codes(fmt: Format) -> None:
    split = fmt.declaration.split
    assert len(split.per_entry) == 1
    assert fmt.declaration.code_values.shape == (1 << fmt.declaration.codes.bits,)
