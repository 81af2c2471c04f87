"""The parts of an attention joined on the CPU against float64: several parts, none with a key, NaN, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel
from qcompiler.plan.weights import NUMPY_DTYPES

pytestmark = pytest.mark.slow
"""No pass makes this op for a CPU."""

B, H, Q, P, D = 2, 3, 2, 7, 70
TOLERANCE = {"f32": 2e-6, "bf16": 2.0**-8, "f16": 2.0**-11}
"""Of the largest result: 2^-24 for each of three operations a part and of those of exp, or the rounding."""


def spec(dtype: Any) -> KernelSpec:
    """The result lies as (batch, query, head, column)."""
    shape = ("b", H, Q, P, D + 2)
    x = Operand(
        name="x",
        dtype="f32",
        access="r",
        shape=shape,
        strides=(H * Q * P * (D + 2), Q * P * (D + 2), P * (D + 2), D + 2, 1),
    )
    out = Operand(name="out", dtype=dtype, access="w", shape=("b", H, Q, D), strides=(Q * H * D, D, H * D, 1))
    body = JoinAttentionKernel(batch="b", heads=H, q_len=Q, parts=P, value_dim=D)
    return KernelSpec(name=f"join_{dtype}", symbols=("b",), operands=(x, out), body=body)


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build([spec(dtype) for dtype in TOLERANCE], isa)


def parts() -> np.ndarray:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(B, H, Q, P, D + 2))
    x[..., D] *= 20
    x[..., D + 1] = 1 + np.abs(x[..., D + 1])
    empty = rng.random((B, H, Q, P)) < 0.3
    empty[0, 0, 0], empty[1, 2, 1] = True, [True] * (P - 1) + [False]
    x[empty] = 0
    x[empty, D] = -np.inf
    return x.astype(np.float32)


def reference(x: np.ndarray) -> np.ndarray:
    v = x.astype(np.float64)
    top = v[..., D].max(-1, keepdims=True)
    fade = np.exp(v[..., D] - np.where(np.isinf(top), 0, top))[..., None]
    total = (v[..., D + 1 :] * fade).sum(3)
    result: np.ndarray = (v[..., :D] * fade).sum(3) / np.where(total == 0, 1, total)
    return result


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_joined_parts_match_float64_and_a_query_without_a_key_gives_zeros(kernels: Any, dtype: str) -> None:
    x = parts()
    empty = np.zeros((B, Q, H, D), NUMPY_DTYPES[dtype])
    found = kernels.run_both(f"join_{dtype}", lambda: [x, empty.copy().transpose(0, 2, 1, 3)], [B])[-1]
    want = reference(x)
    assert np.abs(found.astype(np.float64) - want).max() <= TOLERANCE[dtype] * np.abs(want).max()
    assert not found[0, 0, 0].any() and found[1, 2, 1].any()


def test_a_nan_of_one_part_reaches_its_query_and_no_other(kernels: Any) -> None:
    x = parts()
    x[1, 1, 0, 3] = [np.nan] * D + [-np.inf, np.nan]
    found = kernels.run_both("join_f32", lambda: [x, np.zeros((B, Q, H, D), np.float32).transpose(0, 2, 1, 3)], [B])[-1]
    assert np.isnan(found[1, 1, 0]).all() and np.isnan(found).sum() == D
