"""Attention in bf16 by tiles of AMX, on a processor that has them and on a model of its tiles.

Both are held to what the form of dot products is held to (test_attention_bf16.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import BY_NAME, CASES, Case, inputs, reference, run
from bf16_attention import allowed, check, may_round, rounded

from qcompiler.plan.kernel import KernelSpec

Tiles = Callable[[Sequence[KernelSpec]], Any]

MORE = [
    Case("two_blocks_of_heads", 300, 140, heads=6, kv_heads=2, dim=64, value_dim=48, causal=True, batch=1),
    Case("negative_scores", 20, 40, softcap=0.5, heads=16, kv_heads=1, dim=33, value_dim=16),
]
ALL = [replace(case, name=f"{case.name}_by_tiles", compute="bf16") for case in (*CASES, *MORE) if may_round(case)]
SHORT = (
    "odd_dims", "grouped", "last_window", "ring_cache", "cache_int4", "key_mask", "two_blocks_of_heads", "sinks_last",
    "decode_pieces", "decode_pieces_last", "cache_decode_pieces", "decode_many_heads", "cache_fp8_decode",
    "cache_int4_decode_pieces", "decode_sinks_pieces",
)  # fmt: skip
"""The last seven have one query, and a form of their own."""


def dots(kernels: Any) -> int | None:
    """How many products of tiles the model counted; None for a processor."""
    if "QC_AMX_MODEL 1" not in kernels.source:
        return None
    return ctypes.c_int64.in_dll(kernels.library, "amx_dots").value


def by_tiles(name: str) -> Case:
    return next(case for case in ALL if case.name == f"{name}_by_tiles")


@pytest.mark.parametrize("name", SHORT)
def test_factors_and_weights_are_rounded_and_nothing_else(bf16_tiles: Tiles, name: str) -> None:
    kernels = bf16_tiles([by_tiles(each).spec for each in SHORT])
    before = dots(kernels)
    check(kernels, by_tiles(name))
    if before is not None:
        count = {each: ctypes.c_int64.in_dll(kernels.library, f"amx_{each}").value for each in
                 ("errors", "configured", "released")}  # fmt: skip
        assert count["errors"] == 0 and count["configured"] == count["released"] and (dots(kernels) or 0) > before


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_every_case_rounds_factors_and_weights_and_nothing_else(bf16_tiles: Tiles, case: Case) -> None:
    check(bf16_tiles([each.spec for each in ALL]), case)


def test_every_code_of_fp8_is_the_number_that_it_means(bf16_tiles: Tiles) -> None:
    """Rows that are made from numbers hardly have codes below 2^-6, and no NaN."""
    kernels = bf16_tiles([by_tiles(each).spec for each in SHORT])
    case = by_tiles("cache_fp8_decode")
    arrays = inputs(case)
    for rows, cols in ((arrays[1], case.dim), (arrays[2], case.value_dim)):
        flat = rows.reshape(-1, rows.shape[-1])
        codes = (np.arange(flat.shape[0] * cols) % 256).astype(np.uint8).reshape(-1, cols)
        codes[(codes & 0x7F) == 0x7F] = 0
        flat[:, :cols] = codes.view(np.int8)
        flat[:, cols : cols + 4] = np.array([2.0**-9], np.float32).view(np.int8)
    want = reference(*rounded(case, arrays))
    error = np.abs(run(kernels, case, arrays).astype(np.float64) - want)
    assert (error <= allowed(case, arrays, want) + 1e-6).all()
    arrays[2].reshape(-1, arrays[2].shape[-1])[:, 5] = 0x7F
    found = np.isnan(run(kernels, case, arrays).astype(np.float64))
    assert found[..., 5].all() and found.sum() == found[..., 5].size


def test_a_row_has_the_bits_of_a_call_with_other_rows(bf16_tiles: Tiles) -> None:
    """Rows of a task, and the keys that others see, change no bit of a row."""
    case = by_tiles("last_window")
    kernels = bf16_tiles([by_tiles(each).spec for each in SHORT])
    arrays = inputs(case)
    whole = run(kernels, case, arrays)
    few = [arrays[0][:, 90:107], arrays[1], arrays[2], arrays[3][:, 90:107]]
    part = run(kernels, replace(case, q=17), [np.ascontiguousarray(each) for each in few])
    assert part.tobytes() == whole[:, 90:107].tobytes()


def test_rows_that_see_nothing_and_rows_that_see_no_numbers(bf16_tiles: Tiles) -> None:
    case = by_tiles("two_blocks_of_heads")
    masked = by_tiles("key_mask")
    kernels = bf16_tiles([by_tiles(each).spec for each in SHORT])
    arrays = inputs(case)
    plain = run(kernels, case, arrays)
    arrays[1][0, 100] = np.nan  # a key that queries from 100 on see
    out = run(kernels, case, arrays)
    assert np.isnan(out[0, 100:]).all()
    assert out[0, :100].tobytes() == plain[0, :100].tobytes()
    arrays = inputs(case)
    arrays[0][0, 7], arrays[0][0, 9, 0] = np.nan, np.inf  # queries
    out = run(kernels, case, arrays)
    others = [i for i in range(case.q) if i not in (7, 9)]
    assert np.isnan(out[0, 7]).all() and np.isnan(out[0, 9, 0]).any()
    assert out[0, others].tobytes() == plain[0, others].tobytes()
    arrays = inputs(masked)
    arrays[3][0] = False
    out = run(kernels, masked, arrays)
    assert not out[0].any() and out[1].any()


@pytest.mark.slow
def test_a_context_without_tiles_has_dot_products(bf16_tiles: Tiles) -> None:
    case = replace(BY_NAME["plain"], name="plain_by_dots", compute="bf16")
    kernels = bf16_tiles([case.spec])
    kernels.bf16_units = 0
    before = dots(kernels)
    check(kernels, case)
    assert dots(kernels) == before
