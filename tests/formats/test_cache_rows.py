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
    row = cache_rows.quantise(x)
    at = cache_rows.scale_at(cols)
    assert row.shape == (size,) and at % 4 == 0 and cols <= at < cols + 4
    assert row[:cols].min() == -127 and row[at : at + 4].view("<f4")[0] == np.float32(2) / np.float32(127)
    assert not row[cols:at].any() and not row[at + 4 :].any()


@pytest.mark.parametrize("cols", COLUMNS)
def test_a_value_is_half_a_code_away_at_most(cols: int) -> None:
    x = numbers(cols, "f32")
    rows = cache_rows.quantise(x)
    values, scales = cache_rows.dequantise(rows, cols), cache_rows.scales_of(rows, cols)
    finite = np.isfinite(x).all(-1)
    error = np.abs(values[finite].astype(np.float64) - x[finite])
    assert (error <= scales[finite].astype(np.float64) * 0.50001).all()
    assert np.isnan(values[~finite]).all() and not rows[~finite][..., :cols].any()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cols", COLUMNS)
def test_torch_makes_the_same_bytes_and_reads_the_same_values(cols: int, dtype: str) -> None:
    wide = numbers(cols, "f32")
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    x = torch.from_numpy(wide).to(kind)
    rows = QUANTIZE(x, "int8")
    assert rows.numpy().tobytes() == cache_rows.quantise(x.float().numpy()).tobytes()
    values = torch.from_numpy(cache_rows.dequantise(rows.numpy(), cols)).to(kind)
    torch.testing.assert_close(DEQUANTIZE(rows, "int8", cols, kind), values, rtol=0, atol=0, equal_nan=True)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a cache has rows of int8, not of 'int3'"):
        QUANTIZE(torch.zeros(2, 8), "int3")
