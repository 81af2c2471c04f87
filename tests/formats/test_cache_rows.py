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
    assert cache_rows.row_bytes(cols) == size
    x = np.linspace(-2, 1, cols, dtype=np.float32)
    row = cache_rows.quantise(x, "int8")
    at = cache_rows.scale_at(cols)
    assert row.shape == (size,) and at % 4 == 0 and cols <= at < cols + 4
    assert row[:cols].min() == -127 and row[at : at + 4].view("<f4")[0] == np.float32(2) / np.float32(127)
    assert not row[cols:at].any() and not row[at + 4 :].any()


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("cols", COLUMNS)
def test_a_value_is_half_a_code_away_at_most(cols: int, kind: cache_rows.Kind) -> None:
    x = numbers(cols, "f32")
    rows = cache_rows.quantise(x, kind)
    values, steps = cache_rows.dequantise(rows, cols, kind), cache_rows.steps_of(rows, cols, kind)
    finite = np.isfinite(x).all(-1)
    error = np.abs(values[finite].astype(np.float64) - x[finite])
    assert (error <= steps[finite].astype(np.float64) * 0.50001).all()
    assert np.isnan(values[~finite]).all() and not rows[~finite][..., :cols].any()


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
    rows = np.zeros(cache_rows.row_bytes(256), np.int8)
    rows[:256], rows[256:260] = codes, np.array(1, "<f4")[None].view(np.int8)
    numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(cache_rows.dequantise(rows, 256, "fp8"), numbers)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a cache has rows of int8, fp8, not of 'int3'"):
        QUANTIZE(torch.zeros(2, 8), "int3")
