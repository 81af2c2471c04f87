"""Logits, tallies, biases and settings for draws of `sample`, and its specs."""

from __future__ import annotations

from typing import Any

import numpy as np

from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.sample import (
    DRAW,
    FLAGS,
    FREQUENCY,
    GIVEN,
    MIN_P,
    PRESENCE,
    REPETITION,
    ROW,
    SCALE,
    SHARE_BITS,
    TOP_K,
    TOP_P,
    WORDS,
    SampleKernel,
)
from qcompiler.plan.sample_rule import bits_of
from qcompiler.plan.weights import NUMPY_DTYPES

SCALES = (0.0, 1.4427, 2.1, 0.3, 50.0, 1e-9, 3e38, float("nan"), -1.0)
SHARES = (1.0, 0.9, 0.5, 0.05, 0.999, 1e-9, 0.0, 7.0, -1.0)
ROWS = 7


def spec(name: str, dtype: DType, batch: int | str, cols: int | str, *, apart: int = 1) -> KernelSpec:
    """`apart`: the step between the entries of a row."""
    down: Any = apart * cols if isinstance(cols, int) else cols if apart == 1 else f"{apart}*{cols}"

    def matrix(name: str, dtype: DType, rows: int | str) -> Operand:
        return Operand(name=name, dtype=dtype, access="r", shape=(rows, cols), strides=(down, apart))

    operands = (
        matrix("x", dtype, ROWS),
        Operand(name="how", dtype="i64", access="r", shape=(batch, WORDS), strides=(WORDS * apart, apart)),
        matrix("tallies", "f32", batch), matrix("bias", "f32", batch),
        Operand(name="out", dtype="i64", access="w", shape=(batch,), strides=(apart,)),
    )  # fmt: skip
    symbols = tuple(sorted({size for size in (batch, cols) if isinstance(size, str)}))
    return KernelSpec(
        name=name, symbols=symbols, operands=operands, body=SampleKernel(batch=batch, rows=ROWS, cols=cols)
    )


def logits(dtype: DType, cols: int, seed: int = 0) -> np.ndarray:
    """Peaked, flat and equal rows, rows with -infinity, one with nothing else, and one with NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, cols)) * np.array([3, 0.01, 30, 3, 3, 3, 3])[:, None]
    x[1] = np.round(x[1], 2)  # many equal ones, and both zeros
    x[3][rng.random(cols) < 0.5] = -np.inf
    x[4] = -np.inf if seed % 2 else 2.5
    x[5, rng.integers(cols)] = (np.nan, np.inf)[seed % 2]
    x[6] = np.linspace(3, -3, cols)
    return x.astype(NUMPY_DTYPES[dtype])


def settings(batch: int, cols: int, seed: int = 0) -> np.ndarray:
    """A row of words for each sequence, of every kind of value, also of those that no caller should give."""
    rng = np.random.default_rng(seed)
    how = np.zeros((batch, WORDS), np.int64)
    how[:, ROW] = rng.integers(-1, ROWS + 1, batch)
    how[:, DRAW] = rng.integers(-(2**63), 2**63, batch)
    how[:, TOP_K] = rng.choice([0, 0, 1, 2, 5, cols - 1, cols, cols + 1, -3, 2**40], batch)
    for word in (TOP_P, MIN_P):
        how[:, word] = (rng.choice(SHARES, batch) * 2**SHARE_BITS).astype(np.int64)
    how[:, TOP_P][rng.random(batch) < 0.3] = 2**SHARE_BITS
    how[:, MIN_P][rng.random(batch) < 0.5] = 0
    how[:, SCALE] = [
        _bits(value) for value in rng.choice(SCALES, batch, p=[0.1, 0.4, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    ]
    how[:, REPETITION] = [bits_of(value) for value in rng.choice([1.0, 1.3, 0.7], batch)]
    how[:, PRESENCE] = [bits_of(value) for value in rng.choice([0.0, 0.5, -0.5], batch)]
    how[:, FREQUENCY] = [bits_of(value) for value in rng.choice([0.0, 0.1, -0.3], batch)]
    how[:, FLAGS] = rng.integers(0, 4, batch)
    return how


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def beside(batch: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tallies and biases."""
    rng = np.random.default_rng(seed + 1000)
    tallies = np.where(rng.random((batch, cols)) < 0.3, rng.integers(0, 4, (batch, cols)), 0).astype(np.float32)
    tallies[rng.random((batch, cols)) < 0.1] += GIVEN
    bias = np.where(rng.random((batch, cols)) < 0.2, rng.standard_normal((batch, cols)) * 3, 0).astype(np.float32)
    bias[rng.random((batch, cols)) < 0.2] = -np.inf
    return tallies, bias


def case(dtype: DType, batch: int, cols: int, seed: int) -> list[np.ndarray]:
    """x, how, tallies, bias."""
    return [logits(dtype, cols, seed), settings(batch, cols, seed), *beside(batch, cols, seed)]
