"""The rows of a cache on the device: the format's own bytes in any order of threads, and no spilled register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_cases import COLUMNS, HEADS, SPECS, TYPES, numbers

from qcompiler.formats import cache_rows
from qcompiler.kernels.cuda import signature
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def heads_first(x: np.ndarray) -> np.ndarray:
    """(1, heads, tokens, columns) of (tokens, heads, columns)."""
    return x.transpose(1, 0, 2)[None]


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_rows_are_those_of_the_format(kernels: Any, cols: int, dtype: DType, kind: cache_rows.Kind) -> None:
    for tokens in (1, 5):
        x = numbers(cols, dtype)[-tokens:]
        wanted = cache_rows.quantise(heads_first(x), kind)
        for order in (0, 7):
            out = np.full(wanted.shape, 99, np.int8)
            (rows,) = kernels.run(f"make_{kind}_{cols}_{dtype}", [heads_first(x), out], [tokens], seed=order)
            assert rows.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_values_are_codes_times_scales_rounded_once(
    kernels: Any, cols: int, dtype: DType, kind: cache_rows.Kind
) -> None:
    rows = cache_rows.quantise(heads_first(numbers(cols, "f32")), kind)
    kept, tokens = NUMPY_DTYPES[dtype], rows.shape[2]
    (values,) = kernels.run(
        f"read_{kind}_{cols}_{dtype}", [rows, heads_first(np.zeros((tokens, HEADS, cols), kept))], [tokens]
    )
    with np.errstate(over="ignore"):
        wanted = cache_rows.dequantise(rows, cols, kind).astype(kept)
    np.testing.assert_array_equal(values.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
