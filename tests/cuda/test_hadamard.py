"""hadamard on the device equals its definition, to the bit, in any order of threads, and spills nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hadamard_cases import numbers, spec, transformed

from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import geometry
from qcompiler.plan.kernel import DType

USUAL = [(256, 256), (1536, 512)]
OTHERS = [(6, 2), (24, 8), (96, 32), (192, 64), (1024, 1024), (4096, 4096), (8192, 8192)]
SPECS = [spec(f"h{cols}_{block}", "f32", 5, cols, block) for cols, block in (*USUAL, *OTHERS)]
ARCHS = [pytest.param(arch, marks=[] if arch == "sm_120" else [pytest.mark.slow]) for arch in signature.ARCHS]


@pytest.mark.parametrize("sizes", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_rows_are_transformed_to_the_bit_in_any_order(
    sim_module: Callable[..., Any], sizes: list[tuple[int, int]]
) -> None:
    kernels = sim_module([spec(f"h{cols}_{block}", "f32", 5, cols, block) for cols, block in sizes])
    for cols, block in sizes:
        x = numbers("f32", 5, cols)
        for order in (0, 7):
            (out,) = kernels.run(f"h{cols}_{block}", [x, np.full_like(x, np.nan)], (), seed=order)
            assert np.array_equal(out, transformed(x, block)), (cols, block)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_rows_may_lie_apart_and_be_a_symbol(sim_module: Callable[..., Any], dtype: DType) -> None:
    kernels = sim_module([spec("apart", dtype, "r", 96, 16, apart=7)])
    for count in (1, 9):
        wide = np.zeros((count, 103), numbers(dtype, 1, 96).dtype)
        wide[:, :96] = numbers(dtype, count, 96)
        (out,) = kernels.run("apart", [wide, np.full_like(wide, 7)], [count], partial=True)
        assert np.array_equal(out[:, :96], transformed(wide[:, :96], 16))


def test_a_run_of_256_is_one_warps_and_the_largest_is_one_blocks() -> None:
    by_name = {each.name: each for each in SPECS}
    assert geometry(by_name["h256_256"], "sm_80").block == (128, 1, 1)
    assert geometry(by_name["h8192_8192"], "sm_80").block == (1024, 1, 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
