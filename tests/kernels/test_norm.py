"""Layer and RMS norm against float64, over widths that leave tails, strided rows and narrow types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Build = Callable[..., Any]
ROWS, EPS = 37, 1e-5
TOLERANCE = {"f32": 3e-6, "bf16": 5e-3, "f16": 7e-4}
CASES = [
    (kind, cols, dtype, weight, bias)
    for (kind, weight, bias), (cols, dtype) in itertools.product(
        [("layer", True, True), ("layer", False, False), ("rms", True, False)],
        [(1, "f32"), (15, "f32"), (384, "f32"), (403, "f32"), (96, "bf16"), (77, "f16")],
    )
]


def spec(kind: str, cols: int, dtype: str, weight: bool, bias: bool) -> KernelSpec:
    def vector(name: str) -> Operand:
        return Operand(name=name, dtype=dtype, access="r", shape=(cols,), strides=(1,))

    operands = [Operand(name="x", dtype=dtype, access="r", shape=("r", cols), strides=(cols + 3, 1))]
    operands += [vector("w")] if weight else []
    operands += [vector("b")] if bias else []
    operands += [Operand(name="y", dtype=dtype, access="w", shape=("r", cols), strides=(cols, 1))]
    body = NormKernel(kind=kind, rows="r", cols=cols, eps=EPS, has_weight=weight, has_bias=bias)
    return KernelSpec(
        name=f"{kind}_{cols}_{dtype}_{weight:d}{bias:d}", symbols=("r",), operands=tuple(operands), body=body
    )


@pytest.fixture(scope="module")
def kernels(build: Build, isa: str) -> Any:
    return build([spec(*case) for case in CASES], isa)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_norm_matches_float64(kernels: Any, case: tuple[str, int, str, bool, bool]) -> None:
    kind, cols, dtype, weight, bias = case
    rng = np.random.default_rng(1)
    kept = NUMPY_DTYPES[dtype]
    x = (rng.normal(size=(ROWS, cols + 3)) * 3 + 1.5).astype(kept)
    w, b = rng.normal(size=cols).astype(kept), rng.normal(size=cols).astype(kept)
    y = kernels.run_both(
        spec(*case).name,
        lambda: [x, *([w] if weight else []), *([b] if bias else []), np.zeros((ROWS, cols), kept)],
        [ROWS],
    )[-1]
    v = x[:, :cols].astype(np.float64)
    if kind == "layer":
        v = v - v.mean(1, keepdims=True)
    want = v / np.sqrt((v * v).mean(1, keepdims=True) + EPS)
    if weight:
        want = want * w.astype(np.float64)
    if bias:
        want = want + b.astype(np.float64)
    scale = np.abs(want).max() + 1
    assert np.abs(y.astype(np.float64) - want).max() <= TOLERANCE[dtype] * scale


def test_large_mean_does_not_cancel_the_variance(kernels: Any) -> None:
    """A one-pass E[x^2] - E[x]^2 would lose every digit here."""
    x = (np.random.default_rng(2).normal(size=(4, 387)) + 3000).astype(np.float32)
    ones, zeros, out = np.ones(384, np.float32), np.zeros(384, np.float32), np.zeros((4, 384), np.float32)
    kernels.run("layer_384_f32_11", [x, ones, zeros, out], [4])
    v = x[:, :384].astype(np.float64)
    want = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + EPS)
    assert np.abs(out - want).max() < 2e-3
