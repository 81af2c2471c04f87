"""Softmax against float64: tails, strides, in place, infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.weights import NUMPY_DTYPES

ROWS = 23
CASES = [("f32", 1), ("f32", 3), ("f32", 32), ("f32", 257), ("bf16", 33), ("f16", 64)]
TOLERANCE = {"f32": 3e-7, "bf16": 4e-3, "f16": 5e-4}


def spec(dtype: str) -> KernelSpec:
    x = Operand(name="x", dtype=dtype, access="r", shape=("r", "c"), strides=("c", 1))
    y = Operand(name="y", dtype=dtype, access="w", shape=("r", "c"), strides=("c", 1))
    return KernelSpec(
        name=f"softmax_{dtype}", symbols=("c", "r"), operands=(x, y), body=SoftmaxKernel(rows="r", cols="c")
    )


def strided() -> KernelSpec:
    x = Operand(name="x", dtype="f32", access="r", shape=(5, 19), strides=(1, 5))
    y = Operand(name="y", dtype="f32", access="w", shape=(5, 19), strides=(19, 1))
    return KernelSpec(name="strided", symbols=(), operands=(x, y), body=SoftmaxKernel(rows=5, cols=19))


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([*(spec(dtype) for dtype in ("f32", "bf16", "f16")), strided()], isa)


def reference(x: np.ndarray) -> np.ndarray:
    v = x.astype(np.float64)
    e = np.exp(v - v.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_softmax_matches_float64(kernels: Any, dtype: str, cols: int) -> None:
    x = (np.random.default_rng(3).normal(size=(ROWS, cols)) * 8).astype(NUMPY_DTYPES[dtype])
    y = kernels.run_both(f"softmax_{dtype}", lambda: [x, np.zeros_like(x)], [cols, ROWS])[-1]
    assert np.abs(y.astype(np.float64) - reference(x)).max() <= TOLERANCE[dtype]


def test_softmax_in_place(kernels: Any) -> None:
    x = np.random.default_rng(4).normal(size=(ROWS, 45)).astype(np.float32)
    y = x.copy()
    kernels.run("softmax_f32", [y, y], [45, ROWS])
    assert np.abs(y - reference(x)).max() <= 3e-7


def test_softmax_of_infinities(kernels: Any) -> None:
    x = np.array([[-np.inf, 0, 0], [-np.inf] * 3, [np.nan, 1, 2]], np.float32)
    y = np.zeros_like(x)
    kernels.run("softmax_f32", [x, y], [3, 3])
    assert y[0].tolist() == [0.0, 0.5, 0.5]
    assert np.isnan(y[1]).all()
    assert np.isnan(y[2]).all()


def test_softmax_over_strided_columns(kernels: Any) -> None:
    x = np.random.default_rng(5).normal(size=(19, 5)).astype(np.float32)
    y = np.zeros((5, 19), np.float32)
    kernels.run("strided", [x, y])
    assert np.abs(y - reference(x.T)).max() <= 3e-7
