"""Batched products against NumPy in float64: any strides, element types, sizes, ISA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.dims import Dim, contiguous_strides
from qcompiler.plan.kernel import Access, DType, KernelSpec, Operand
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
BOUNDS = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}

# Memory order of the axes (batch…, row, column) of a, b and out: the strides that transposes leave behind.
ORDERS = {
    "plain": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    "heads": ((0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3)),
    "b_transposed": ((0, 2, 1, 3), (0, 3, 1, 2), (0, 1, 2, 3)),
    "everything": ((0, 1, 3, 2), (3, 0, 1, 2), (1, 0, 3, 2)),
    "scattered": ((3, 2, 1, 0), (2, 3, 1, 0), (3, 2, 1, 0)),
}


def strides_of(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of axes that lie in memory in `order`."""
    inner = contiguous_strides(tuple(shape[axis] for axis in order))
    result = [0] * len(shape)
    for axis, stride in zip(order, inner, strict=True):
        result[axis] = int(stride)
    return tuple(result)


def make_spec(order: str, dtype: DType, sizes: tuple[int, ...], *, symbolic: bool) -> KernelSpec:
    """Batch (2, 3); the sizes are (m, n, k)."""
    m, n, k = sizes
    dims: tuple[Dim, ...] = (2, "h", "m", "n", "k") if symbolic else (2, 3, *sizes)
    numbers = {2: 2, "h": 3, "m": m, "n": n, "k": k}
    (*batch, rows, cols, depth) = dims
    shapes = ((*batch, rows, depth), (*batch, depth, cols), (*batch, rows, cols))
    accesses: tuple[Access, ...] = ("r", "r", "w")
    operands = tuple(
        Operand(
            name=name, dtype=dtype, access=access, shape=shape,
            strides=strides_of(tuple(numbers.get(extent, extent) for extent in shape), axes),
        )
        for name, access, shape, axes in zip("abo", accesses, shapes, ORDERS[order], strict=True)
    )  # fmt: skip
    body = BatchMatmulKernel(batch=tuple(batch), m=rows, n=cols, k=depth)
    name = f"{order}_{dtype}_{m}_{n}_{k}_{'symbolic' if symbolic else 'static'}"
    return KernelSpec(name=name, symbols=("h", "m", "n", "k") if symbolic else (), operands=operands, body=body)


def placed(values: Array, strides: tuple[Any, ...]) -> Array:
    """A flat array that holds `values` at these strides."""
    flat = np.zeros(values.size, values.dtype)
    np.lib.stride_tricks.as_strided(flat, values.shape, [int(s) * values.itemsize for s in strides])[...] = values
    return flat


def check(kernels: Any, spec: KernelSpec, sizes: tuple[int, ...]) -> None:
    a, b, out = spec.operands
    dtype = DTYPES[a.dtype]
    rng = np.random.default_rng(1)
    m, n, k = sizes
    left, right = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, m, k), (2, 3, k, n)))
    expected = left.astype(np.float64) @ right.astype(np.float64)
    symbols = (3, *expected.shape[2:], left.shape[3]) if spec.symbols else ()
    buffers = (placed(left, a.strides), placed(right, b.strides))
    done = kernels.run_both(spec.name, lambda: [*buffers, np.full(expected.size, 7, dtype)], symbols)[2]
    got = np.lib.stride_tricks.as_strided(done, expected.shape, [int(s) * done.itemsize for s in out.strides])
    error = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error <= BOUNDS[a.dtype], f"{spec.name}: relative error {error:.2e}"


def all_specs() -> list[tuple[KernelSpec, tuple[int, ...]]]:
    dtypes: tuple[DType, ...] = ("f32", "bf16", "f16")
    specs = [
        (make_spec(order, dtype, sizes, symbolic=order in ("heads", "scattered")), sizes)
        for order in ORDERS
        for dtype in dtypes
        for sizes in ((5, 7, 3), (33, 35, 32), (1, 67, 130))
    ]
    specs.append((make_spec("plain", "f32", (17, 19, 1100), symbolic=True), (17, 19, 1100)))
    specs.append((make_spec("b_transposed", "f32", (128, 128, 64), symbolic=False), (128, 128, 64)))
    return specs


def test_batched_products_of_any_strides_equal_float64(build: Callable[..., Any], isa: str) -> None:
    specs = all_specs()
    kernels = build([spec for spec, _ in specs], isa)
    for spec, sizes in specs:
        check(kernels, spec, sizes)


def test_empty_sum_gives_zeros_and_empty_batch_nothing(build: Callable[..., Any], isa: str) -> None:
    kernels = build([spec for spec, _ in all_specs()], isa)
    data, out = np.ones(4096, np.float32), np.full(4096, 7, np.float32)
    name = "heads_f32_5_7_3_symbolic"
    kernels.run(name, [data, data, out], (3, 5, 7, 0))
    assert (out[:210] == 0).all() and (out[210:] == 7).all()
    out[:] = 7
    kernels.run(name, [data, data, out], (0, 5, 7, 3))
    assert (out == 7).all()


def test_packed_and_integer_operands_are_refused() -> None:
    spec = make_spec("plain", "i32", (2, 3, 4), symbolic=False)
    with pytest.raises(KernelSelectionError, match="is i32, not one of f32, bf16, f16"):
        emit(spec, "x86-64-v3")
