"""Sort, top-k, argmax, scatter and running folds against NumPy: ties, NaN, equal indices, strides, threads."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.argmax import ArgmaxKernel
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.kinds.scatter import ScatterKernel
from qcompiler.plan.weights import NUMPY_DTYPES

O, L, C, I = 3, 37, 23, 19  # outer, length, count, inner  # noqa: E741


def tensor(name: str, dtype: DType, access: str, *shape: int, strides: tuple[int, ...] | None = None) -> Operand:
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)  # type: ignore[arg-type]


def order(name: str, dtype: DType, count: int, *, descending: bool, inner: int = I) -> KernelSpec:
    strides = (L * inner, 1, L) if inner > 1 else None  # x with its axis innermost: read through strides
    operands = (
        tensor("x", dtype, "r", O, L, inner, strides=strides),
        tensor("values", dtype, "w", O, count, inner),
        tensor("indices", "i64", "w", O, count, inner),
    )
    body = OrderKernel(outer=O, length=L, count=count, inner=inner, descending=descending)
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


def argmax(name: str, dtype: DType) -> KernelSpec:
    operands = (tensor("x", dtype, "r", O, L, I), tensor("out", "i64", "w", O, I))
    return KernelSpec(name=name, symbols=(), operands=operands, body=ArgmaxKernel(outer=O, length=L, inner=I))


def scatter(name: str, dtype: DType, fold: str, index: DType = "i64", repeat: bool = False) -> KernelSpec:
    """`repeat`: one index for all of outer and inner, read through strides of 0."""
    strides = (0, 1, 0) if repeat else None
    operands = (
        tensor("index", index, "r", O, C, I, strides=strides),
        tensor("src", dtype, "r", O, C, I),
        tensor("out", dtype, "rw", O, L, I),
    )
    body = ScatterKernel(outer=O, length=L, count=C, inner=I, fold=fold)  # type: ignore[arg-type]
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


def scan(name: str, dtype: DType, fold: str) -> KernelSpec:
    operands = (tensor("x", dtype, "r", O, L, I), tensor("out", dtype, "w", O, L, I))
    body = ScanKernel(outer=O, length=L, inner=I, fold=fold)  # type: ignore[arg-type]
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


ORDERS = [
    order("sort_f32", "f32", L, descending=False), order("sort_down_f32", "f32", L, descending=True),
    order("sort_row_f32", "f32", L, descending=False, inner=1), order("sort_bf16", "bf16", L, descending=True),
    order("sort_i64", "i64", L, descending=False), order("sort_i1", "i1", L, descending=True),
    order("topk_f32", "f32", 5, descending=True), order("topk_i32", "i32", 1, descending=True),
    order("least_f32", "f32", 4, descending=False),
]  # fmt: skip
ARGMAX = [argmax("argmax_f32", "f32"), argmax("argmax_bf16", "bf16"), argmax("argmax_i64", "i64")]
SCATTERS = [
    *(scatter(f"scatter_{fold}_f32", "f32", fold) for fold in ("none", "add", "mul", "max", "min")),
    scatter("scatter_add_bf16", "bf16", "add", "i32"), scatter("scatter_mul_i8", "i8", "mul"),
    scatter("scatter_add_i1", "i1", "add"), scatter("scatter_none_i64", "i64", "none", repeat=True),
]  # fmt: skip
SCANS = [
    *(scan(f"scan_{fold}_f32", "f32", fold) for fold in ("mul", "max", "min", "logaddexp")),
    scan("scan_mul_i64", "i64", "mul"), scan("scan_max_bf16", "bf16", "max"), scan("scan_min_i32", "i32", "min"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any]) -> Any:
    """One instruction set: these kernels have no vector form."""
    isa = "x86-64" if platform.machine() == "x86_64" else "generic"
    return build([*ORDERS, *ARGMAX, *SCATTERS, *SCANS], isa)


def data(dtype: str, *shape: int, seed: int = 9) -> np.ndarray:
    """Few different values, so that many are equal; floats with NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    if dtype == "i1":
        return rng.random(shape) > 0.5
    values = rng.integers(-4, 5, shape).astype(NUMPY_DTYPES[dtype])
    if dtype in ("f32", "bf16", "f16"):
        values[rng.random(shape) < 0.05] = np.nan
        values[rng.random(shape) < 0.05] = np.inf
    return values


def wanted_order(x: np.ndarray, *, descending: bool) -> np.ndarray:
    """By Python's stable sort on (is NaN, value): independent of NumPy's and of ours."""
    out = np.empty(x.shape, np.int64)
    for o, n in np.ndindex(x.shape[0], x.shape[2]):
        row = x[o, :, n].astype(np.float64)
        keys = [(1, 0.0) if np.isnan(v) else (0, v) for v in row]
        indices = sorted(range(len(keys)), key=lambda i, keys=keys: keys[i])  # type: ignore[misc]
        if descending:
            indices = sorted(range(len(keys)), key=lambda i, keys=keys: (-keys[i][0], -keys[i][1]))  # type: ignore[misc]
        out[o, :, n] = indices
    return out


@pytest.mark.parametrize("spec", ORDERS, ids=lambda spec: spec.name)
def test_orders_are_stable_with_nan_the_largest(spec: KernelSpec, kernels: Any) -> None:
    body = spec.body
    assert isinstance(body, OrderKernel)
    inner = int(body.inner)
    x = data(spec.operands[0].dtype, O, L, inner)
    stored = np.ascontiguousarray(x.transpose(0, 2, 1)) if inner > 1 else x
    shape = (O, int(body.count), inner)
    _, values, indices = kernels.run_both(
        spec.name, lambda: [stored, np.zeros(shape, x.dtype), np.zeros(shape, np.int64)]
    )
    wanted = wanted_order(x, descending=body.descending)[:, : int(body.count)]
    assert np.array_equal(indices, wanted)
    assert np.array_equal(values.view(np.uint8), np.take_along_axis(x, wanted, 1).view(np.uint8))


@pytest.mark.parametrize("spec", ARGMAX, ids=lambda spec: spec.name)
def test_argmax_is_the_first_maximum_and_the_first_nan(spec: KernelSpec, kernels: Any) -> None:
    x = data(spec.operands[0].dtype, O, L, I)
    out = kernels.run_both(spec.name, lambda: [x, np.zeros((O, I), np.int64)])[-1]
    assert np.array_equal(out, np.argmax(x.astype(np.float64), axis=1))


_STEP: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda a, b: b, "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


@pytest.mark.parametrize("spec", SCATTERS, ids=lambda spec: spec.name)
def test_equal_indices_of_a_scatter_meet_in_order(spec: KernelSpec, kernels: Any) -> None:
    body = spec.body
    assert isinstance(body, ScatterKernel)
    dtype = spec.operands[2].dtype
    x, src = data(dtype, O, L, I), data(dtype, O, C, I, seed=4)
    shape = (C,) if spec.operands[0].strides == (0, 1, 0) else (O, C, I)
    index = np.random.default_rng(2).integers(-L, L, shape).astype(NUMPY_DTYPES[spec.operands[0].dtype])
    full = np.broadcast_to(index[None, :, None] if index.ndim == 1 else index, (O, C, I))
    wanted = np.array(x)
    with np.errstate(all="ignore"):
        for o, i, n in np.ndindex(O, C, I):
            at = (o, int(full[o, i, n]), n)
            wanted[at] = _STEP[body.fold](wanted[at], src[o, i, n])
    out = kernels.run_both(spec.name, lambda: [index, src, np.array(x)])[-1]
    assert np.array_equal(out.view(np.uint8), wanted.view(np.uint8)) or np.array_equal(
        out.astype(np.float64), wanted.astype(np.float64), equal_nan=True
    )


def test_scatter_reports_an_index_out_of_range_before_it_writes(kernels: Any) -> None:
    x, src = data("f32", O, L, I), data("f32", O, C, I, seed=4)
    index = np.zeros((O, C, I), np.int64)
    index[1, 2, 3] = L
    out = np.array(x)
    context = kernels.run("scatter_add_f32", [index, src, out])
    assert (context.error_code, context.error_value, context.error_limit) == (1, L, L)
    assert np.array_equal(out, x, equal_nan=True)


@pytest.mark.parametrize("spec", SCANS, ids=lambda spec: spec.name)
def test_running_folds_equal_numpy(spec: KernelSpec, kernels: Any) -> None:
    body = spec.body
    assert isinstance(body, ScanKernel)
    dtype = spec.operands[0].dtype
    x = data(dtype, O, L, I)
    out = kernels.run_both(spec.name, lambda: [x, np.zeros_like(x)])[-1]
    folds = {"mul": np.multiply, "max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp}
    wide = x.astype(np.float64) if x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16 else x
    with np.errstate(all="ignore"):
        wanted = folds[body.fold].accumulate(wide, axis=1)
    if wide is x:
        assert np.array_equal(out, wanted)
    else:
        np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=4e-6)
