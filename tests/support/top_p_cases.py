"""Rows of probabilities to draw from, and what is drawn, in Python's integers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.top_p import TopPKernel
from qcompiler.plan.weights import NUMPY_DTYPES

TOPS = (0.0, 1e-6, 0.3, 0.5, 0.9, 1.0, 1.5, float("nan"), -1.0)
DRAWS = (0.0, 0.25, 0.7, float(np.nextafter(np.float32(1), np.float32(0))), 1.0, float("nan"))


def spec(name: str, dtype: DType, rows: int | str, cols: int | str, *, apart: int = 1) -> KernelSpec:
    """`apart`: the step between a row's entries, and between the rows' shares and results."""
    down = apart * cols if isinstance(cols, int) else cols if apart == 1 else f"{apart}*{cols}"
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=(rows, cols), strides=(down, apart)),
        *(Operand(name=each, dtype="f32", access="r", shape=(rows,), strides=(apart,)) for each in ("top", "draw")),
        Operand(name="out", dtype="i64", access="w", shape=(rows,), strides=(apart,)),
    )
    symbols = tuple(sorted({size for size in (rows, cols) if isinstance(size, str)}))
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=TopPKernel(rows=rows, cols=cols))


def rows(dtype: DType, cols: int, seed: int = 0) -> np.ndarray:
    """Peaked and flat rows, equal entries, zeros, one certain entry, and entries that are no probabilities."""
    rng = np.random.default_rng(seed)
    made = [_softmax(rng.normal(size=cols) * scale) for scale in (0.1, 1.0, 4.0, 12.0)]
    made.append(np.full(cols, 1 / cols))
    made.append(rng.integers(0, 3, cols) / cols)
    made.append(np.eye(1, cols, cols // 2)[0])
    made.append(np.zeros(cols))
    odd = rng.random(cols)
    odd[rng.random(cols) < 0.3] = np.nan
    odd[rng.random(cols) < 0.3] = -1
    odd[rng.random(cols) < 0.1] = np.inf
    made.append(odd)
    return np.array(made).astype(NUMPY_DTYPES[dtype])


def shares(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(top, draw) for so many rows."""
    rng = np.random.default_rng(seed)
    return rng.choice(TOPS, count).astype(np.float32), rng.choice(DRAWS, count).astype(np.float32)


def drawn(x: np.ndarray, top: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """What `qc.top_p` gives for rows of x."""
    wide = x.astype(np.float64)
    return np.array([_one(list(row), float(t), float(d)) for row, t, d in zip(wide, top, draw, strict=True)], np.int64)


def _one(row: list[float], top: float, draw: float) -> int:
    weights = [math.floor(Fraction(min(p, 1.0)) * 2**39) if p > 0 else 0 for p in row]
    total = sum(weights)
    if total == 0:
        return 0
    wanted = max(math.floor(Fraction(total * _share(top), 2**30)), 1)
    reached, last = 0, 0
    for weight in sorted(weights, reverse=True):
        reached, last = reached + weight, weight
        if reached >= wanted:
            break
    kept = [weight if weight >= last else 0 for weight in weights]
    beyond = math.floor(Fraction(sum(kept) * min(_share(draw), 2**30 - 1), 2**30))
    running = 0
    for index, weight in enumerate(kept):
        running += weight
        if running > beyond:
            return index
    raise AssertionError("a draw is below the sum")


def _share(value: float) -> int:
    return math.floor(Fraction(min(value, 1.0)) * 2**30) if value > 0 else 0


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()
