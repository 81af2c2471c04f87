"""Rows of x that a kernel converts once for all panels of w: the bits of rows that nothing has to convert."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bf16_linears import in_blocks

from qcompiler.kernels import layouts
from qcompiler.kernels.cpu import linear
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
PANELS = "cpu_p16_v2"
N = 16 * linear.GROUP * 2 + 5
"""Columns: three groups of panels, the last of which is not full."""


def operands_after(x: Operand, w: DType, k: int, rows: str) -> tuple[Operand, ...]:
    return (
        x,
        Operand(name="w", dtype=w, access="r", shape=(N, k), layout=PANELS),
        Operand(name="out", dtype="f32", access="w", shape=(rows, N), strides=(N, 1)),
    )


def linear_of(name: str, x: DType, w: DType, k: int, gap: int) -> KernelSpec:
    rows = Operand(name="x", dtype=x, access="r", shape=("m", k), strides=(k + gap, 1))
    body = LinearKernel(m="m", n=N, k=k, m_class="large", has_bias=False)
    return KernelSpec(name=name, symbols=("m",), operands=operands_after(rows, w, k, "m"), body=body)


def multiplied(isa: str, w: DType) -> DType:
    """The type in which a kernel reads rows in place: what its products take."""
    return w if isa == "x86-64-v4" else "f32"


def weight(w: DType, stored: DType, k: int) -> Array:
    """Values of type `w`."""
    values = np.random.default_rng(0).standard_normal((N, k)).astype(NUMPY_DTYPES[w]).astype(NUMPY_DTYPES[stored])
    packed: Array = layouts.get(PANELS).pack(None, stored, N, k, values.view(np.uint8).reshape(-1)).copy()
    return packed


def compare(kernels: Any, isa: str, w: DType, kept: tuple[Array, tuple[int, ...]], rows: Array) -> None:
    """Runs `kept` on x and symbols, and `plain` on the same rows, whose values are those of `w`."""
    (m, k), read = rows.shape, multiplied(isa, w)

    def run(name: str, x: Array, stored: DType, symbols: tuple[int, ...]) -> tuple[Array, int]:
        given = [x, weight(w, stored, k)]
        out = kernels.run_both(name, lambda: [*given, np.full((m, N), np.nan, np.float32)], symbols)[2]
        return out, ctypes.c_int64.in_dll(kernels.library, "test_tasks").value

    found, tasks = run("kept", kept[0], w, kept[1])
    wanted, grouped = run("plain", rows.astype(NUMPY_DTYPES[read]), read, (m,))
    if read == "bf16" and kept[0].ndim == 2 and in_blocks():  # windows of an image are kept
        assert tasks == grouped, f"{m} rows: each task makes its own"
    else:
        assert tasks < grouped, f"{m} rows: the panels of a task are one group of several"
    assert found.tobytes() == wanted.tobytes(), f"{m} rows"


@pytest.mark.parametrize(
    ("x", "w", "k", "gap"),
    [
        ("f32", "bf16", 257, 3),  # an odd number of elements: the last word holds one
        pytest.param("f32", "bf16", 1024, 0, marks=pytest.mark.slow),  # rows that would share sets of the cache
        pytest.param("f16", "bf16", 96, 0, marks=pytest.mark.slow),
        pytest.param("f16", "f32", 70, 3, marks=pytest.mark.slow),  # exact: converted to fp32
        pytest.param("bf16", "f32", 512, 0, marks=pytest.mark.slow),
    ],
)
def test_kept_rows_give_the_bits_of_converted_ones(
    build: Callable[..., Any], isa: str, x: DType, w: DType, k: int, gap: int
) -> None:
    read = multiplied(isa, w)
    kernels = build([linear_of("kept", x, w, k, gap), linear_of("plain", read, read, k, 0)], isa)
    tall = linear.tile_of(isa).rows * linear.BLOCKS
    for m in (tall, 2 * tall + 1):
        given = np.full((m, k + gap), np.nan, NUMPY_DTYPES[x])  # what lies between rows is no number
        given[:, :k] = np.random.default_rng(m).standard_normal((m, k)).astype(given.dtype)
        compare(kernels, isa, w, (given, (m,)), np.ascontiguousarray(given[:, :k]).astype(NUMPY_DTYPES[w]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_kept_windows_give_the_bits_of_rows(build: Callable[..., Any], isa: str, dtype: DType) -> None:
    c, side, (height, width) = 11, 3, (3, 5)
    k = side * side * c
    window = Window(
        image=("b", "h", "w", c), size=("h", "w"), kernel=(side, side), strides=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    x = Operand(name="x", dtype=dtype, access="r", shape=("b", "h", "w", c), strides=(f"{c}*h*w", f"{c}*w", c, 1))
    body = LinearKernel(m="b*h*w", n=N, k=k, m_class="large", has_bias=False, window=window)
    operands = operands_after(x, dtype, k, "b*h*w")
    spec = KernelSpec(name="kept", symbols=("b", "h", "w"), operands=operands, body=body)
    read = multiplied(isa, dtype)
    kernels = build([spec, linear_of("plain", read, read, k, 0)], isa)
    images = np.random.default_rng(1).standard_normal((64, height, width, c)).astype(NUMPY_DTYPES[dtype])
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = [padded[:, dy : dy + height, dx : dx + width] for dy in range(side) for dx in range(side)]
    rows = np.ascontiguousarray(np.concatenate(taps, axis=-1).reshape(-1, k))
    compare(kernels, isa, dtype, (images, (64, height, width)), rows)
