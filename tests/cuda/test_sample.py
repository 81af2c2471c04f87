"""sample on the device equals its definition, to the token, in any order of threads, and spills nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sample_cases import case, spec

from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import geometry
from qcompiler.plan.sample_rule import sample

SIZES = (1, 2, 13, 257, 4099)
BATCH = 12
SPECS = [
    *(spec(f"static_{cols}", "f32", BATCH, cols) for cols in SIZES), spec("apart", "f32", BATCH, 13, apart=3),
    *(spec(f"dynamic_{dtype}", dtype, "b", "c") for dtype in ("f32", "bf16", "f16")),
    spec("vocabulary", "bf16", 3, 50257),
]  # fmt: skip
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def nothing(batch: int) -> np.ndarray:
    return np.full(batch, -9, np.int64)


@pytest.mark.parametrize("cols", SIZES)
def test_static_rows_give_the_defined_token_in_any_order(kernels: Any, cols: int) -> None:
    for seed in range(4):
        given = case("f32", BATCH, cols, seed)
        for order in (0, 7) if seed == 0 else (0,):
            (out,) = kernels.run(f"static_{cols}", [*given, nothing(BATCH)], (), seed=order)
            np.testing.assert_array_equal(out, sample(*given))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("batch", "cols"), [(20, 1), (1, 256), (9, 1031)])
def test_rows_and_columns_may_be_symbols(kernels: Any, dtype: Any, batch: int, cols: int) -> None:
    given = case(dtype, batch, cols, 3)
    (out,) = kernels.run(f"dynamic_{dtype}", [*given, nothing(batch)], [batch, cols])
    np.testing.assert_array_equal(out, sample(*given))


def test_entries_may_lie_apart(kernels: Any) -> None:
    given = case("f32", BATCH, 13, 5)
    wide = [np.zeros((len(each), 3 * each.shape[1]), each.dtype) for each in given]
    for to, each in zip(wide, given, strict=True):
        to[:, ::3] = each
    (out,) = kernels.run("apart", [*wide, nothing(3 * BATCH)], (), partial=True)
    np.testing.assert_array_equal(out[::3], sample(*given))


def test_a_row_of_a_vocabulary_has_a_whole_block(kernels: Any) -> None:
    by_name = {each.name: each for each in SPECS}
    assert geometry(by_name["vocabulary"], "sm_80").block == (1024, 1, 1)
    given = case("bf16", 3, 50257, 8)
    (out,) = kernels.run("vocabulary", [*given, nothing(3)], ())
    np.testing.assert_array_equal(out, sample(*given))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
