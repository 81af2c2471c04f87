"""Runs of columns and their Hadamard transforms: by halves in fp32, to the bit, and by the matrix in fp64."""

from __future__ import annotations

import numpy as np

from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.hadamard import HadamardKernel
from qcompiler.plan.weights import NUMPY_DTYPES


def spec(name: str, dtype: DType, rows: int | str, cols: int, block: int, *, apart: int = 0) -> KernelSpec:
    """`apart`: numbers between two rows."""
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=(rows, cols), strides=(cols + apart, 1)),
        Operand(name="out", dtype=dtype, access="w", shape=(rows, cols), strides=(cols + apart, 1)),
    )
    symbols = (rows,) if isinstance(rows, str) else ()
    body = HadamardKernel(rows=rows, cols=cols, block=block)
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body)


def numbers(dtype: DType, rows: int, cols: int) -> np.ndarray:
    """Rows of Gaussian numbers with an outlier each."""
    rng = np.random.default_rng(cols)
    x = rng.standard_normal((rows, cols))
    x[np.arange(rows), rng.integers(0, cols, rows)] *= 40
    return x.astype(NUMPY_DTYPES[dtype])


def transformed(x: np.ndarray, block: int) -> np.ndarray:
    """What `qc.hadamard` gives, to the bit: the sum and the difference of the halves' transforms."""
    runs = x.astype(np.float32).reshape(-1, block)
    scaled = _halves(runs) * np.float32(1 / np.sqrt(np.float64(block)))
    return np.asarray(scaled.reshape(x.shape).astype(x.dtype))


def _halves(runs: np.ndarray) -> np.ndarray:
    size = runs.shape[1]
    if size == 1:
        return runs
    first, second = _halves(runs[:, : size // 2]), _halves(runs[:, size // 2 :])
    return np.concatenate([first + second, first - second], 1)


def by_matrix(x: np.ndarray, block: int) -> np.ndarray:
    """The product with the matrix in fp64."""
    at = np.arange(block)
    odd = np.array([[bin(i & j).count("1") % 2 for j in at] for i in at])
    return np.asarray((x.astype(np.float64).reshape(-1, block) @ (1 - 2.0 * odd) / np.sqrt(block)).reshape(x.shape))
