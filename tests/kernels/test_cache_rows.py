"""The rows of a cache on the CPU: the format's own bytes, and what they mean, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_cases import COLUMNS, HEADS, SPECS, TYPES, numbers
from kernel_cases import PORTABLE_ISAS

from qcompiler.formats import cache_rows
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES


@pytest.fixture(scope="module", params=[*PORTABLE_ISAS, "best"])
def kernels(build: Callable[..., Any], isa: str, request: pytest.FixtureRequest) -> Any:
    return build(SPECS, isa if request.param == "best" else request.param)


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_rows_are_those_of_the_format(kernels: Any, cols: int, dtype: DType, kind: cache_rows.Kind) -> None:
    for tokens in (1, 5):
        x = numbers(cols, dtype)[-tokens:]
        wanted = cache_rows.quantise(x, kind).transpose(1, 0, 2)
        made = np.full(wanted.shape, 99, np.int8)
        _, rows = kernels.run_both(f"make_{kind}_{cols}_{dtype}", lambda x=x, made=made: [x, made.copy()], [tokens])
        assert rows.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", cache_rows.KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_values_are_codes_times_scales_rounded_once(
    kernels: Any, cols: int, dtype: DType, kind: cache_rows.Kind
) -> None:
    rows = cache_rows.quantise(numbers(cols, "f32").transpose(1, 0, 2), kind)
    kept = NUMPY_DTYPES[dtype]
    tokens = rows.shape[1]
    _, values = kernels.run_both(
        f"read_{kind}_{cols}_{dtype}", lambda: [rows, np.zeros((tokens, HEADS, cols), kept)], [tokens]
    )
    with np.errstate(over="ignore"):
        wanted = cache_rows.dequantise(rows, cols, kind).transpose(1, 0, 2).astype(kept)
    np.testing.assert_array_equal(values.astype(np.float32), wanted.astype(np.float32))
