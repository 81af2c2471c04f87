"""top_p on the device equals its definition, to the index, in any order of threads, and spills nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from top_p_cases import drawn, rows, shares, spec

from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import geometry

SIZES = (1, 2, 13, 64, 257, 1024, 4099)
SPECS = [
    *(spec(f"static_{cols}", "f32", 9, cols) for cols in SIZES), spec("apart", "f32", 9, 13, apart=3),
    *(spec(f"dynamic_{dtype}", dtype, "r", "c") for dtype in ("f32", "bf16", "f16")),
    spec("vocabulary", "bf16", 2, 131072),
]  # fmt: skip
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


@pytest.mark.parametrize("cols", SIZES)
def test_static_rows_give_the_defined_index_in_any_order(kernels: Any, cols: int) -> None:
    for seed in range(3):
        x, (top, draw) = rows("f32", cols, seed), shares(9, seed)
        wanted = drawn(x, top, draw)
        for order in (0, 7):
            (out,) = kernels.run(f"static_{cols}", [x, top, draw, np.full(9, -1, np.int64)], (), seed=order)
            assert np.array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("count", "cols"), [(9, 1), (1, 256), (9, 1031)])
def test_rows_and_columns_may_be_symbols(kernels: Any, dtype: Any, count: int, cols: int) -> None:
    x, (top, draw) = rows(dtype, cols)[:count], shares(count)
    (out,) = kernels.run(f"dynamic_{dtype}", [x, top, draw, np.full(count, -1, np.int64)], [cols, count])
    assert np.array_equal(out, drawn(x, top, draw))


def test_entries_may_lie_apart(kernels: Any) -> None:
    x, (top, draw) = rows("f32", 13), shares(9)
    wide = [np.zeros((9, 39), np.float32), *(np.zeros(27, np.float32) for _ in range(2))]
    wide[0][:, ::3], wide[1][::3], wide[2][::3] = x, top, draw
    (out,) = kernels.run("apart", [*wide, np.full(27, -1, np.int64)], (), partial=True)
    assert np.array_equal(out[::3], drawn(x, top, draw))


def test_a_row_of_a_vocabulary_has_a_whole_block(kernels: Any) -> None:
    by_name = {each.name: each for each in SPECS}
    assert geometry(by_name["vocabulary"], "sm_80").block == (1024, 1, 1)
    x, (top, draw) = rows("bf16", 131072)[2:4], shares(2)
    (out,) = kernels.run("vocabulary", [x, top, draw, np.full(2, -1, np.int64)], ())
    assert np.array_equal(out, drawn(x, top, draw))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
