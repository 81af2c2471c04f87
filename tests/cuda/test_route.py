"""route on the device equals its definition, in any order of threads, and spills nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from route_cases import FORMS, close, routed, rows, spec

from qcompiler.kernels.cuda import signature
from qcompiler.plan.kernel import DType
from qcompiler.plan.kinds.route import Scores
from qcompiler.plan.weights import NUMPY_DTYPES

SIZES = ((1, 1), (8, 2), (31, 31), (33, 32), (60, 4), (257, 8), (512, 6))
TYPES: tuple[tuple[DType, DType], ...] = (("bf16", "f32"), ("f32", "bf16"), ("f16", "f16"))
SPECS = [
    *(spec(f"{form[0]}_{form[1]}_{cols}", 9, cols, count, form) for cols, count in SIZES for form in FORMS),
    *(spec(f"{form[0]}_{form[1]}_{dtype}_{made}", "r", 13, 3, form, dtype=dtype, made=made, apart=2)
      for dtype, made in TYPES for form in FORMS),
]  # fmt: skip
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def outputs(rows: int, count: int, made: DType = "f32") -> list[np.ndarray]:
    return [np.full((rows, count), -1, NUMPY_DTYPES[made]), np.full((rows, count), -1, np.int64)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("cols", "count"), SIZES)
def test_rows_have_the_defined_experts_in_any_order(
    kernels: Any, form: tuple[Scores, bool], cols: int, count: int
) -> None:
    x = rows("f32", cols, cols)
    wanted, places = routed(x, count, form)
    made = []
    for order in (0, 7):
        weights, indices = kernels.run(f"{form[0]}_{form[1]}_{cols}", [x, *outputs(9, count)], (), seed=order)
        assert np.array_equal(indices, places)
        close(weights, wanted)
        made.append(weights.tobytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "made"), TYPES)
def test_narrow_types_entries_apart_and_any_number_of_rows(
    kernels: Any, form: tuple[Scores, bool], dtype: DType, made: DType
) -> None:
    for count in (1, 7):
        x = np.zeros((count, 26), NUMPY_DTYPES[dtype])
        x[:, ::2] = rows(dtype, 13)[-count:]
        name = f"{form[0]}_{form[1]}_{dtype}_{made}"
        weights, indices = kernels.run(name, [x, *outputs(count, 6, made)], [count], partial=True)
        wanted, places = routed(x[:, ::2], 3, form)
        assert np.array_equal(indices[:, ::2], places)
        close(weights[:, ::2], wanted, made)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
