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


def heads(kind: str, cols: int, dtype: str, tokens: int | str, many: int | str) -> KernelSpec:
    """`many` rows in a token of a wider matrix, and their results transposed: (head, token) lie side by side."""
    wide, count = 5 * cols + 7, Operand(name="w", dtype=dtype, access="r", shape=(cols,), strides=(1,))
    shape = (tokens, many, cols)
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=shape, strides=(wide, cols, 1)),
        count,
        Operand(name="y", dtype=dtype, access="w", shape=shape, strides=(cols, 9 * cols, 1)),
    )
    body = NormKernel(kind=kind, rows=tokens, inner=many, cols=cols, eps=EPS, has_weight=True, has_bias=False)
    symbols = tuple(each for each in (tokens, many) if isinstance(each, str))
    return KernelSpec(name=f"heads_{kind}_{cols}_{dtype}_{len(symbols)}", symbols=symbols, operands=operands, body=body)


@pytest.mark.parametrize(("tokens", "many"), [("t", 3), ("t", 1), (1, 4), ("t", "h")])
@pytest.mark.parametrize(("kind", "cols", "dtype"), [("rms", 64, "f32"), ("layer", 77, "f32"), ("rms", 40, "bf16")])
def test_rows_with_two_strides_have_the_bits_of_even_rows(
    build: Build, isa: str, kind: str, cols: int, dtype: str, tokens: int | str, many: int | str
) -> None:
    made, kept = heads(kind, cols, dtype, tokens, many), NUMPY_DTYPES[dtype]
    ran = build([made, spec(kind, cols, dtype, True, False)], isa)
    rng = np.random.default_rng(4)
    t, h = tokens if isinstance(tokens, int) else 9, many if isinstance(many, int) else 5
    x = rng.normal(size=(t, 5 * cols + 7)).astype(kept)
    w = rng.normal(size=cols).astype(kept)
    sizes = [size for size, dim in ((t, tokens), (h, many)) if isinstance(dim, str)]
    # a sentinel, which only the rows of results replace
    y = ran.run_both(made.name, lambda: [x, w, np.full((9, 9, cols), 7, kept)], sizes)[-1]
    even = np.zeros((t * h, cols + 3), kept)
    even[:, :cols] = x[:, : h * cols].reshape(t * h, cols)
    want = ran.run_both(f"{kind}_{cols}_{dtype}_10", lambda: [even, w, np.zeros((t * h, cols), kept)], [t * h])[-1]
    expected = np.full((9, 9, cols), 7, kept)
    expected[:h, :t] = want.reshape(t, h, cols).transpose(1, 0, 2)
    assert y.tobytes() == expected.tobytes()
