"""sample on the CPU equals its definition, to the token, at every size and with any number of threads."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sample_cases import case, spec

from qcompiler.kernels.cpu.emit import scratch_bytes
from qcompiler.plan.sample_rule import sample

SIZES = (1, 2, 13, 257, 1031)
BATCH = 24
ISAS = ("generic", "x86-64-v3") if platform.machine() == "x86_64" else ("generic",)
SPECS = [
    *(spec(f"static_{cols}", "f32", BATCH, cols) for cols in SIZES), spec("apart", "f32", BATCH, 13, apart=3),
    *(spec(f"dynamic_{dtype}", dtype, "b", "c") for dtype in ("f32", "bf16", "f16")),
]  # fmt: skip


@pytest.fixture(scope="module", params=ISAS)
def kernels(build: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return build(SPECS, request.param)


def nothing(batch: int) -> np.ndarray:
    return np.full(batch, -9, np.int64)


@pytest.mark.parametrize("cols", SIZES)
def test_static_rows_give_the_defined_token(kernels: Any, cols: int) -> None:
    for seed in range(12):
        given = case("f32", BATCH, cols, seed)
        *_, out = kernels.run_both(f"static_{cols}", lambda given=given: [*given, nothing(BATCH)])
        np.testing.assert_array_equal(out, sample(*given))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("batch", "cols"), [(1, 50257), (3, 32000), (40, 7)])
def test_rows_and_columns_may_be_symbols(kernels: Any, dtype: Any, batch: int, cols: int) -> None:
    given = case(dtype, batch, cols, 2)
    *_, out = kernels.run_both(f"dynamic_{dtype}", lambda: [*given, nothing(batch)], [batch, cols])
    np.testing.assert_array_equal(out, sample(*given))


def test_entries_may_lie_apart(kernels: Any) -> None:
    given = case("f32", BATCH, 13, 5)
    wide = [np.zeros((len(each), 3 * each.shape[1]), each.dtype) for each in given]
    for to, each in zip(wide, given, strict=True):
        to[:, ::3] = each
    *_, out = kernels.run_both("apart", lambda: [*wide, nothing(3 * BATCH)])
    np.testing.assert_array_equal(out[::3], sample(*given))
    assert (out.reshape(BATCH, 3)[:, 1:] == -9).all()


def test_scratch_holds_a_sum_for_each_digit() -> None:
    assert scratch_bytes(SPECS[0], "generic") == 2048
