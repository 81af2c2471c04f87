"""top_p on the CPU equals its definition, to the index, at every size and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import PORTABLE_ISAS
from top_p_cases import drawn, rows, shares, spec

from qcompiler.kernels.cpu.emit import scratch_bytes
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.weights import NUMPY_DTYPES

SIZES = (1, 2, 13, 64, 257, 1024, 1031)
SPECS = [
    *(spec(f"static_{cols}", "f32", 9, cols) for cols in SIZES), spec("apart", "f32", 9, 13, apart=3),
    *(spec(f"dynamic_{dtype}", dtype, "r", "c") for dtype in ("f32", "bf16", "f16")),
]  # fmt: skip


@pytest.fixture(scope="module", params=PORTABLE_ISAS)
def kernels(build: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return build(SPECS, request.param)


@pytest.mark.parametrize("cols", SIZES)
def test_static_rows_give_the_defined_index(kernels: Any, cols: int) -> None:
    for seed in range(8):
        x, (top, draw) = rows("f32", cols, seed), shares(9, seed)
        *_, out = kernels.run_both(f"static_{cols}", lambda x=x, t=top, d=draw: [x, t, d, np.full(9, -1, np.int64)])
        assert np.array_equal(out, drawn(x, top, draw))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("count", "cols"), [(9, 1), (9, 7), (1, 256), (9, 4099)])
def test_rows_and_columns_may_be_symbols(kernels: Any, dtype: Any, count: int, cols: int) -> None:
    x, (top, draw) = rows(dtype, cols)[:count], shares(count)
    assert x.dtype == NUMPY_DTYPES[dtype]
    *_, out = kernels.run_both(f"dynamic_{dtype}", lambda: [x, top, draw, np.full(count, -1, np.int64)], [cols, count])
    assert np.array_equal(out, drawn(x, top, draw))


def test_entries_may_lie_apart(kernels: Any) -> None:
    x, (top, draw) = rows("f32", 13), shares(9)
    wide = [np.zeros((9, 39), np.float32), *(np.zeros(27, np.float32) for _ in range(2))]
    wide[0][:, ::3], wide[1][::3], wide[2][::3] = x, top, draw
    *_, out = kernels.run_both("apart", lambda: [*wide, np.full(27, -1, np.int64)])
    assert np.array_equal(out[::3], drawn(x, top, draw))
    assert (out.reshape(9, 3)[:, 1:] == -1).all()


def test_scratch_holds_a_sum_for_each_digit() -> None:
    each: KernelSpec = SPECS[0]
    assert scratch_bytes(each, "generic") == 2048
