"""Batched products on the device against float64: any strides, element types, sizes that leave tails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import Access, DType, KernelSpec, Operand
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = np.ndarray
BOUNDS = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}
DTYPES: tuple[DType, ...] = ("f32", "bf16", "f16")

# Memory order of the axes (batch…, row, column) of a, b and out: the strides that transposes leave behind.
ORDERS = {
    "plain": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
    "heads": ((0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3)),
    "b_transposed": ((0, 2, 1, 3), (0, 3, 1, 2), (0, 1, 2, 3)),
    "scattered": ((3, 2, 1, 0), (2, 3, 1, 0), (3, 2, 1, 0)),
}
SIZES = [(5, 7, 3), (70, 35, 32), (1, 67, 130)]


def ordered(shape: tuple[int, ...], order: tuple[int, ...], dtype: DType) -> Array:
    """A zeroed array whose axes lie in memory in `order`."""
    flat = np.zeros([shape[axis] for axis in order], NUMPY_DTYPES[dtype])
    return flat.transpose(np.argsort(order))


def spec(order: str, dtype: DType, sizes: tuple[int, int, int], *, symbolic: bool) -> KernelSpec:
    """Batch (2, 3); the sizes are (m, n, k)."""
    m, n, k = sizes
    shapes = ((2, 3, m, k), (2, 3, k, n), (2, 3, m, n))
    accesses: tuple[Access, ...] = ("r", "r", "w")
    dims: tuple[Any, ...] = ("m", "n", "k") if symbolic else sizes
    batch: tuple[Any, ...] = (2, "h") if symbolic else (2, 3)
    named = ((*batch, dims[0], dims[2]), (*batch, dims[2], dims[1]), (*batch, dims[0], dims[1]))
    operands = []
    for name, access, shape, own, axes in zip(("a", "b", "out"), accesses, shapes, named, ORDERS[order], strict=True):
        example = ordered(shape, axes, dtype)
        strides = tuple(s // example.itemsize for s in example.strides)
        operands.append(Operand(name=name, dtype=dtype, access=access, shape=own, strides=strides))
    body = BatchMatmulKernel(batch=batch, m=dims[0], n=dims[1], k=dims[2])
    name = f"{order}_{dtype}_{m}_{n}_{k}{'_symbolic' if symbolic else ''}"
    symbols = ("h", "k", "m", "n") if symbolic else ()
    return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body)


CASES = [
    (order, dtype, sizes, spec(order, dtype, sizes, symbolic=order in ("heads", "scattered")))
    for order in ORDERS
    for dtype in DTYPES
    for sizes in SIZES
    if dtype == "f32" or sizes[0] == 70
]
SPECS = [case[-1] for case in CASES]
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


@pytest.mark.parametrize(("order", "dtype", "sizes", "spec"), CASES, ids=[each.name for each in SPECS])
def test_batched_products_of_any_strides_equal_float64(
    kernels: Any, order: str, dtype: DType, sizes: tuple[int, int, int], spec: KernelSpec
) -> None:
    rng = np.random.default_rng(1)
    m, n, k = sizes
    shapes = ((2, 3, m, k), (2, 3, k, n), (2, 3, m, n))
    a, b, out = (ordered(shape, axes, dtype) for shape, axes in zip(shapes, ORDERS[order], strict=True))
    a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    symbols = {"h": 3, "m": m, "n": n, "k": k} if spec.symbols else ()
    (got,) = kernels.run(spec.name, [a, b, out], symbols)
    (again,) = kernels.run(spec.name, [a, b, out], symbols, seed=5)
    want = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
    assert error <= BOUNDS[dtype], error
    assert got.tobytes() == again.tobytes()


def test_empty_sum_gives_zeros(kernels: Any) -> None:
    """The operands' strides are those of other sizes; with no terms only the result is touched."""
    a, b = np.ones(4096, np.float32), np.ones(4096, np.float32)
    out = ordered((2, 3, 5, 7), ORDERS["heads"][2], "f32")
    (got,) = kernels.run("heads_f32_5_7_3_symbolic", [a, b, out], {"h": 3, "m": 5, "n": 7, "k": 0})
    assert not got.any()


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills_on_every_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc([each for each in SPECS if "_70_" in each.name][:5], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"


def test_integer_operands_are_refused() -> None:
    with pytest.raises(KernelSelectionError, match="is i32, not one of f32, bf16, f16"):
        emit_kernel(spec("plain", "i32", (2, 3, 4), symbolic=False), "sm_80")
