"""Rows of a cache: their bytes, their error, and the same rows from torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_cases import COLUMNS, numbers

from qcompiler.errors import ArgumentError
from qcompiler.formats import cache_rows
from qcompiler.frontends.torch.qc_ops import torch_cache  # noqa: F401  (registers the operators)

QUANTIZE, DEQUANTIZE = torch.ops.qc.quantize_cache, torch.ops.qc.dequantize_cache


@pytest.mark.parametrize(("cols", "size"), [(1, 16), (12, 16), (13, 32), (64, 80), (80, 96), (128, 144), (256, 272)])
def test_a_row_is_its_codes_its_scale_and_zeros_up_to_sixteen_bytes(cols: int, size: int) -> None:
    assert cache_rows.row_bytes(cols, "int8") == size
    x = np.linspace(-2, 1, cols, dtype=np.float32)
    row = cache_rows.quantise(x, "int8")
    at = cache_rows.scale_at(cols, "int8")
    assert row.shape == (size,) and at % 4 == 0 and cols <= at < cols + 4
    assert row[:cols].min() == -127 and row[at : at + 4].view("<f4")[0] == np.float32(2) / np.float32(127)
    assert not row[cols:at].any() and not row[at + 4 :].any()


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("cols", COLUMNS)
def test_a_value_is_half_a_code_away_at_most(cols: int, kind: cache_rows.Kind) -> None:
    x = numbers(cols, "f32")
    rows = cache_rows.quantise(x, kind)
    values, steps = cache_rows.dequantise(rows, cols, kind), cache_rows.steps_of(rows, cols, kind)
    odd, width = ~np.isfinite(x), cache_rows.GROUP if kind == "int4" else cols
    for first in range(0, cols, width):  # columns that share a scale
        part = slice(first, first + width)
        finite = ~odd[..., part].any(-1)
        error = np.abs(values[finite][..., part].astype(np.float64) - x[finite][..., part])
        assert (error <= np.broadcast_to(steps, x.shape)[finite][..., part].astype(np.float64) * 0.50001).all()
        assert np.isnan(values[~finite][..., part]).all()
        codes = part if kind != "int4" else slice(first // 2, -(-min(first + width, cols) // 2))
        assert not rows[~finite][..., codes].any()


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", COLUMNS)
def test_torch_makes_the_same_bytes_and_reads_the_same_values(
    cols: int, dtype: torch.dtype, kind: cache_rows.Kind
) -> None:
    x = torch.from_numpy(numbers(cols, "f32")).to(dtype)
    rows = QUANTIZE(x, kind)
    assert rows.numpy().tobytes() == cache_rows.quantise(x.float().numpy(), kind).tobytes()
    values = torch.from_numpy(cache_rows.dequantise(rows.numpy(), cols, kind)).to(dtype)
    torch.testing.assert_close(DEQUANTIZE(rows, kind, cols, dtype), values, rtol=0, atol=0, equal_nan=True)


def test_every_byte_is_the_float_that_torch_reads() -> None:
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    rows = np.zeros(cache_rows.row_bytes(256, "fp8"), np.int8)
    rows[:256], rows[256:260] = codes, np.array(1, "<f4")[None].view(np.int8)
    numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(cache_rows.dequantise(rows, 256, "fp8"), numbers)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a cache has rows of int8, fp8, int4, not of 'int3'"):
        QUANTIZE(torch.zeros(2, 8), "int3")


@pytest.mark.parametrize(
    ("cols", "size"), [(1, 32), (20, 32), (32, 32), (33, 48), (64, 48), (80, 64), (128, 80), (256, 160)]
)
def test_a_row_of_four_bits_is_its_codes_and_two_numbers_for_each_group(cols: int, size: int) -> None:
    assert cache_rows.row_bytes(cols, "int4") == size
    x = (np.arange(cols) % 32 % 16 * 0.25 - 1).astype(np.float32)  # -1 to 2.75: a step of 0.25
    row = cache_rows.quantise(x, "int4")
    groups, at = -(-cols // 32), cache_rows.scale_at(cols, "int4")
    assert row.shape == (size,) and at == 16 * groups and not row[at + 4 * groups :].any()
    if cols >= 16:
        assert row[:8].view(np.uint8).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        assert row[at : at + 4].view("<u2").tolist() == [0x3E80, 0xBF80]  # 0.25 and -1 in bf16
        np.testing.assert_array_equal(cache_rows.dequantise(row, cols, "int4")[:16], x[:16])


def test_numbers_of_four_bits_at_their_limits() -> None:
    """Equal numbers are exact if they are bf16; huge ones count as 1e38; a NaN stays within its group."""
    x = np.zeros((5, 64), np.float32)
    x[1], x[2], x[3, :32], x[4, 7], x[4, 40] = -3.5, 3e38, np.linspace(-3e38, 3e38, 32), np.nan, 1.875
    x[0, ::2] = -0.0
    values = cache_rows.dequantise(cache_rows.quantise(x, "int4"), 64, "int4")
    assert not np.signbit(values[0]).any() and not values[0].any()
    np.testing.assert_array_equal(values[1], x[1])
    np.testing.assert_allclose(values[2], 1e38, rtol=1e-2)
    assert np.isfinite(values[3]).all() and np.abs(values[3]).max() < 1.1e38
    assert np.isnan(values[4, :32]).all() and values[4, 40] == 1.875 and not values[4, 41:].any()
