"""NF4 against bitsandbytes' CPU quantiser (bit for bit) and against a slow reference written from the paper."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import bitsandbytes.functional as bnb
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcompiler import formats
from qcompiler.formats.nf4 import MIDPOINTS, TABLE

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
F32 = npt.NDArray[np.float32]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These matrices are small: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_equal_to_bitsandbytes(weights: npt.NDArray[np.generic], tensor: torch.Tensor, block: int) -> None:
    packed = formats.get("nf4", block=block).encode(weights)
    codes, state = bnb.quantize_4bit(tensor, blocksize=block, quant_type="nf4")
    np.testing.assert_array_equal(packed.section("codes"), codes.numpy().ravel())
    np.testing.assert_array_equal(packed.section("absmax").view(np.uint32), state.absmax.numpy().view(np.uint32))


def test_table_is_bitsandbytes_table() -> None:
    assert np.array(TABLE, np.float32).tobytes() == bnb.get_4bit_type("nf4", device="cpu").numpy().tobytes()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 32), (64, 64), (7, 129), (33, 97), (3, 4096 + 64), (129, 384)])
@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-30, 1e-38, 1e-40, 3e-45, 1e37, 3e37])
def test_codes_and_absmax_equal_bitsandbytes_on_normal_weights(
    block: int, shape: tuple[int, int], scale: float
) -> None:
    weights = (np.random.default_rng(block).standard_normal(shape) * scale).astype(np.float32)
    assert_equal_to_bitsandbytes(weights, torch.from_numpy(weights), block)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754944e-38])
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (5, 27), (64, 65)])
def test_constant_weights_equal_bitsandbytes(value: float, shape: tuple[int, int]) -> None:
    weights = np.full(shape, value, np.float32)
    for block in (64, 4096):
        assert_equal_to_bitsandbytes(weights, torch.from_numpy(weights), block)


def test_weights_at_and_beside_every_midpoint_equal_bitsandbytes() -> None:
    """The rounding rule at ties: a normalised weight equal to a midpoint takes the lower code."""
    below, above = np.nextafter(MIDPOINTS, np.float32(-2)), np.nextafter(MIDPOINTS, np.float32(2))
    beside = np.concatenate([below, MIDPOINTS, above])
    for absmax in (1.0, 0.75, 3.3e-5):
        block = np.full(64, absmax, np.float32)
        block[: beside.size] = beside * np.float32(absmax)
        weights = np.tile(block, (3, 1))
        assert_equal_to_bitsandbytes(weights, torch.from_numpy(weights), 64)
    codes = formats.get("nf4").encode(np.concatenate([MIDPOINTS, np.ones(49, np.float32)])[None]).section("codes")
    assert [c for byte in codes[:7] for c in (byte >> 4, byte & 15)] == list(range(14))


def test_short_last_block_divides_where_full_blocks_multiply() -> None:
    """Quotients at a midpoint differ in the last bit between w / absmax and w * (1 / absmax), and with it the code."""
    rng = np.random.default_rng(0)
    differing = 0
    for absmax in rng.uniform(0.5, 2, 40).astype(np.float32):
        tail = np.append(MIDPOINTS * absmax, absmax)[None]
        assert_equal_to_bitsandbytes(tail, torch.from_numpy(tail), 64)
        multiplied = tail[0, :-1] * (np.float32(1) / absmax) > MIDPOINTS
        differing += int((multiplied != (tail[0, :-1] / absmax > MIDPOINTS)).sum())
    assert differing > 20  # the test does reach weights where the two rules disagree


def test_sixteen_bit_weights_equal_bitsandbytes() -> None:
    weights = np.random.default_rng(0).standard_normal((37, 101)).astype(np.float32)
    half = weights.astype(np.float16)
    assert_equal_to_bitsandbytes(half, torch.from_numpy(half), 64)
    brain = torch.from_numpy(weights).to(torch.bfloat16)
    assert_equal_to_bitsandbytes(brain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16), brain, 64)


def test_more_than_one_tile_equals_bitsandbytes() -> None:
    weights = np.random.default_rng(1).standard_normal((611, 337)).astype(np.float32)
    assert_equal_to_bitsandbytes(weights, torch.from_numpy(weights), 128)


@settings(max_examples=60, deadline=None)
@given(
    weights=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 70)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    block=st.sampled_from(BLOCKS),
)
def test_any_finite_weights_equal_bitsandbytes(weights: F32, block: int) -> None:
    assert_equal_to_bitsandbytes(weights, torch.from_numpy(weights.copy()), block)


def slow_reference(weights: F32, block: int) -> tuple[list[int], list[np.float32], F32]:
    """Codes, absmaxes and decoded values, one scalar at a time."""
    table = [np.float32(v) for v in TABLE]
    midpoints = [(a + b) / np.float32(2) for a, b in itertools.pairwise(table)]
    flat = list(weights.ravel())
    codes, absmaxes, values = [], [], []
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        largest = max(abs(v) for v in part)
        floor = max(largest, np.float32(1e-38))
        if len(part) == block:
            inverse = np.float32(1) / floor
            scaled, absmax = [v * inverse for v in part], largest
        else:
            scaled, absmax = [v / floor for v in part], floor
        block_codes = [bisect.bisect_left(midpoints, v) for v in scaled]
        codes += block_codes
        absmaxes.append(absmax)
        values += [table[c] * absmax for c in block_codes]
    return codes, absmaxes, np.array(values, np.float32).reshape(weights.shape)


@settings(max_examples=60, deadline=None)
@given(
    weights=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 90)),
        elements=st.floats(-4, 4, width=32),
    ),
    block=st.sampled_from((64, 128)),
)
def test_encode_and_decode_equal_the_slow_reference(weights: F32, block: int) -> None:
    fmt = formats.get("nf4", block=block)
    packed = fmt.encode(weights)
    codes, absmaxes, values = slow_reference(weights, block)
    nibbles = [n for byte in packed.section("codes") for n in (byte >> 4, byte & 15)]
    assert nibbles[: weights.size] == codes
    assert nibbles[weights.size :] == [7] * (weights.size % 2)
    assert list(packed.section("absmax")) == absmaxes
    assert fmt.decode(packed).tobytes() == values.tobytes()


@pytest.mark.parametrize("block", (32, 64, 128, 256, 512, 1024))
def test_decode_equals_bitsandbytes(block: int) -> None:
    """On whole blocks per row only: with others bitsandbytes 0.50's CPU dequantiser reads the wrong absmax."""
    weights = np.random.default_rng(2).standard_normal((6, 2 * block)).astype(np.float32)
    fmt = formats.get("nf4", block=block)
    codes, state = bnb.quantize_4bit(torch.from_numpy(weights), blocksize=block, quant_type="nf4")
    theirs = bnb.dequantize_4bit(codes, state).numpy()
    np.testing.assert_array_equal(fmt.decode(fmt.encode(weights)), theirs)


def test_decode_of_many_tiles_with_a_short_last_block() -> None:
    weights = np.random.default_rng(3).standard_normal((1031, 333)).astype(np.float32)
    fmt = formats.get("nf4", block=256)
    decoded = fmt.decode(fmt.encode(weights))
    for row in (0, 500, 1030):  # blocks that hold these rows, decoded alone
        for start in range(row * 333 // 256 * 256, (row + 1) * 333, 256):
            part = weights.ravel()[start : start + 256][None]
            np.testing.assert_array_equal(decoded.ravel()[start : start + 256], fmt.decode(fmt.encode(part)).ravel())
