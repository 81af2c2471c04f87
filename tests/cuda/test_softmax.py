"""Softmax on the device against float64: tails, strides, in place, infinities, rows of a warp and of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.kernels.cuda import signature
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.weights import NUMPY_DTYPES

ROWS = 5
TOLERANCE = {"f32": 5e-7, "bf16": 4e-3, "f16": 5e-4}
SIZES: list[tuple[DType, int]] = [
    ("f32", 1), ("f32", 32), ("f32", 257), ("f32", 5000), ("bf16", 33), ("f16", 300),
]  # fmt: skip
STATIC = [(1, (1, 1)), (19, (1, 5)), (130, (130, 1)), (700, (700, 1)), (17000, (17000, 1))]


def spec(dtype: DType) -> KernelSpec:
    """Rows and columns are symbols."""
    x = Operand(name="x", dtype=dtype, access="r", shape=("r", "c"), strides=("c", 1))
    y = Operand(name="out", dtype=dtype, access="w", shape=("r", "c"), strides=("c", 1))
    return KernelSpec(
        name=f"softmax_{dtype}", symbols=("c", "r"), operands=(x, y), body=SoftmaxKernel(rows="r", cols="c")
    )


def static(cols: int, strides: tuple[int, int]) -> KernelSpec:
    x = Operand(name="x", dtype="f32", access="r", shape=(ROWS, cols), strides=strides)
    y = Operand(name="out", dtype="f32", access="w", shape=(ROWS, cols), strides=(cols, 1))
    return KernelSpec(name=f"static_{cols}", symbols=(), operands=(x, y), body=SoftmaxKernel(rows=ROWS, cols=cols))


SPECS = [*(spec(dtype) for dtype in ("f32", "bf16", "f16")), *(static(*each) for each in STATIC)]
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def reference(x: np.ndarray) -> np.ndarray:
    v = x.astype(np.float64)
    e = np.exp(v - v.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def error(out: np.ndarray, x: np.ndarray) -> float:
    want = reference(x)
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize(("dtype", "cols"), SIZES)
def test_softmax_matches_float64_and_does_not_depend_on_the_order_of_threads(
    kernels: Any, dtype: DType, cols: int
) -> None:
    x = (np.random.default_rng(3).normal(size=(ROWS, cols)) * 8).astype(NUMPY_DTYPES[dtype])
    (out,) = kernels.run(f"softmax_{dtype}", [x, np.empty_like(x)], [cols, ROWS])
    (again,) = kernels.run(f"softmax_{dtype}", [x, np.empty_like(x)], [cols, ROWS], seed=7)
    assert error(out, x) <= TOLERANCE[dtype]
    assert out.tobytes() == again.tobytes()


@pytest.mark.parametrize(("cols", "strides"), STATIC)
def test_softmax_of_static_rows(kernels: Any, cols: int, strides: tuple[int, int]) -> None:
    x = (np.random.default_rng(5).normal(size=(ROWS, cols)) * 3).astype(np.float32)
    if strides[0] == 1:
        x = np.asfortranarray(x)
    (out,) = kernels.run(f"static_{cols}", [x, np.empty((ROWS, cols), np.float32)])
    assert error(out, x) <= TOLERANCE["f32"]


@pytest.mark.parametrize("name", ["softmax_f32", "static_130"])
def test_softmax_in_place(kernels: Any, name: str) -> None:
    x = np.random.default_rng(4).normal(size=(ROWS, 130)).astype(np.float32)
    (out,) = kernels.run(name, [x, x], [130, ROWS] if name == "softmax_f32" else ())
    assert error(out, x) <= TOLERANCE["f32"]


@pytest.mark.parametrize("name", ["softmax_f32", "static_19"])
def test_softmax_of_infinities(kernels: Any, name: str) -> None:
    """As torch: a row of -inf, a NaN or a +inf make their whole row NaN; a single -inf is a zero."""
    x = np.zeros((ROWS, 19), np.float32)
    x[0, 3] = x[1] = -np.inf
    x[2, 18], x[3, 0] = np.nan, np.inf
    given = np.asfortranarray(x) if name == "static_19" else x
    (out,) = kernels.run(name, [given, np.empty_like(x)], [19, ROWS] if name == "softmax_f32" else ())
    assert out[0, 3] == 0 and abs(out[0].sum() - 1) < 1e-6
    assert np.isnan(out[1:4]).all()
    assert abs(out[4].sum() - 1) < 1e-6


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
