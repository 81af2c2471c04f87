"""Rows of a router's scores, and the experts and weights of each, in Python's order of tuples and NumPy's float64."""

from __future__ import annotations

import math

import numpy as np

from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.route import RouteKernel, Scores
from qcompiler.plan.weights import NUMPY_DTYPES

FORMS: tuple[tuple[Scores, bool], ...] = (("all", False), ("all", True), ("chosen", False))
TOLERANCE = {"f32": 4e-6, "bf16": 2.0**-8, "f16": 2.0**-11}
"""Relative: exponentials and sums in fp32, or half a unit of the type that the weights have."""


def spec(
    name: str, rows: int | str, cols: int, count: int, form: tuple[Scores, bool], *, dtype: DType = "f32",
    made: DType = "f32", apart: int = 1,
) -> KernelSpec:  # fmt: skip
    """`apart`: the step between the entries of every operand."""
    operands = tuple(
        Operand(
            name=each,
            dtype=kind,
            access="r" if each == "x" else "w",
            shape=(rows, width),
            strides=(width * apart, apart),
        )
        for each, kind, width in (("x", dtype, cols), ("weights", made, count), ("indices", "i64", count))
    )
    body = RouteKernel(rows=rows, cols=cols, count=count, scores=form[0], normalise=form[1])
    return KernelSpec(name=name, symbols=(rows,) if isinstance(rows, str) else (), operands=operands, body=body)


def rows(dtype: DType, cols: int, seed: int = 0) -> np.ndarray:
    """Nine rows: scores far enough apart to be told by fp32, equal ones, one that has it all, NaN and infinities."""
    rng = np.random.default_rng(seed)
    made = [rng.permutation(cols) * step for step in (1 / 32, -1 / 32, 1 / 16)]
    made.append(rng.integers(0, 3, cols) * 1.0)
    made.append(np.zeros(cols))
    made.append(np.eye(1, cols, cols // 2)[0] * 80)
    for odd in (np.nan, np.inf, -np.inf):
        made.append(np.where(np.arange(cols) % 5 == 3 % cols, odd, made[0]))
    return np.array(made).astype(NUMPY_DTYPES[dtype])


def routed(x: np.ndarray, count: int, form: tuple[Scores, bool]) -> tuple[np.ndarray, np.ndarray]:
    """The weights, not rounded, and the indices."""
    found = [_one(row, count, form) for row in x.astype(np.float64)]
    return np.array([w for w, _ in found]), np.array([i for _, i in found], np.int64)


def _one(row: np.ndarray, count: int, form: tuple[Scores, bool]) -> tuple[np.ndarray, list[int]]:
    scores = _softmax(row) if form[0] == "all" else row
    keys = [(0.0, i) if math.isnan(score) else (1.0, -score, i) for i, score in enumerate(scores)]
    order = [key[-1] for key in sorted(keys)][:count]
    weights = scores[order] if form[0] == "all" else _softmax(row[order])
    return (weights / weights.sum() if form[1] else weights), order


def _softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max())
        return np.asarray(powers / powers.sum())


def close(weights: np.ndarray, wanted: np.ndarray, made: DType = "f32") -> None:
    np.testing.assert_allclose(weights.astype(np.float64), wanted, rtol=TOLERANCE[made], atol=1e-30)
