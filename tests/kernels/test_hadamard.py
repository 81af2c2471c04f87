"""hadamard on the CPU equals its definition, to the bit, in every size of a run and with any number of threads."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hadamard_cases import numbers, spec, transformed

from qcompiler.kernels.cpu.emit import scratch_bytes
from qcompiler.plan.kernel import DType

SIZES = [
    (256, 256), (1536, 512),  # the usual ones
    (6, 2), (24, 8), (48, 16), (32, 32), (192, 64), (128, 128),  # below, at and above a vector, and one pass
    (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192),  # two and three passes
]  # fmt: skip
ISAS = ("x86-64-v4", "x86-64-v3", "x86-64", "generic") if platform.machine() == "x86_64" else ("generic",)
EACH_ISA = [pytest.param(isa, marks=[pytest.mark.slow] * (isa != "x86-64-v3")) for isa in ISAS]
"""Vectors of 16, 8 and 4 lanes: how steps within 16 numbers are taken depends on them."""


@pytest.fixture
def checked(build: Callable[..., Any], harness: Any) -> Callable[..., Any]:
    def make(specs: list[Any], isa: str) -> Any:
        if not harness.runnable(isa):
            pytest.skip(f"this CPU cannot run {isa}")
        return build(specs, isa)

    return make


def compare(kernels: Any, sizes: list[tuple[int, int]]) -> None:
    for cols, block in sizes:
        x = numbers("f32", 5, cols)
        *_, out = kernels.run_both(f"h{cols}_{block}", lambda x=x: [x, np.full_like(x, np.nan)])
        assert np.array_equal(out, transformed(x, block)), (cols, block)


@pytest.mark.parametrize("isa", EACH_ISA)
def test_rows_of_usual_sizes_are_transformed_to_the_bit(checked: Callable[..., Any], isa: str) -> None:
    compare(checked([spec(f"h{c}_{b}", "f32", 5, c, b) for c, b in SIZES[:2]], isa), SIZES[:2])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_every_size_are_transformed_to_the_bit(checked: Callable[..., Any], isa: str) -> None:
    compare(checked([spec(f"h{c}_{b}", "f32", 5, c, b) for c, b in SIZES], isa), SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_may_lie_apart_and_be_a_symbol(checked: Callable[..., Any], isa: str, dtype: DType) -> None:
    kernels = checked([spec("apart", dtype, "r", 96, 32, apart=7)], isa)
    for count in (1, 9):
        wide = np.zeros((count, 103), numbers(dtype, 1, 96).dtype)
        wide[:, :96] = numbers(dtype, count, 96)
        *_, out = kernels.run_both("apart", lambda w=wide: [w, np.full_like(w, 7)], [count])
        assert np.array_equal(out[:, :96], transformed(wide[:, :96], 32)) and (out[:, 96:] == 7).all()


def test_scratch_holds_one_run() -> None:
    assert scratch_bytes(spec("any", "bf16", 3, 1536, 512), "generic") == 2048
