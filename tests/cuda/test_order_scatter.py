"""Sort, top-k, argmax, scatter and running folds on the device: ties, NaN, equal indices, indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.dims import Dim, contiguous_strides, dim
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.argmax import ArgmaxKernel
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.kinds.scatter import ScatterKernel
from qcompiler.plan.weights import NUMPY_DTYPES

O, L, C, I = 2, 13, 7, 5  # outer, length, count, inner  # noqa: E741


def tensor(name: str, dtype: DType, access: str, *shape: Dim) -> Operand:
    strides = tuple(contiguous_strides(shape))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)  # type: ignore[arg-type]


def spec(name: str, body: Any, *operands: Operand) -> KernelSpec:
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


def order(name: str, dtype: DType, count: int, *, descending: bool) -> KernelSpec:
    body = OrderKernel(outer=O, length=L, count=count, inner=I, descending=descending)
    values, indices = tensor("values", dtype, "w", O, count, I), tensor("indices", "i64", "w", O, count, I)
    return spec(name, body, tensor("x", dtype, "r", O, L, I), values, indices)


def scatter(name: str, dtype: DType, fold: str) -> KernelSpec:
    body = ScatterKernel(outer=O, length=L, count=C, inner=I, fold=fold)  # type: ignore[arg-type]
    index, src = tensor("index", "i64", "r", O, C, I), tensor("src", dtype, "r", O, C, I)
    return spec(name, body, index, src, tensor("out", dtype, "rw", O, L, I))


def scan(name: str, dtype: DType, fold: str) -> KernelSpec:
    body = ScanKernel(outer=O, length=L, inner=I, fold=fold)  # type: ignore[arg-type]
    return spec(name, body, tensor("x", dtype, "r", O, L, I), tensor("out", dtype, "w", O, L, I))


ORDERS = [
    order("sort_f32", "f32", L, descending=False), order("sort_bf16", "bf16", L, descending=True),
    order("topk_i64", "i64", 3, descending=True),
]  # fmt: skip
ARGMAX = spec(
    "argmax",
    ArgmaxKernel(outer=O, length=L, inner=I),
    tensor("x", "f32", "r", O, L, I),
    tensor("out", "i64", "w", O, I),
)
ROWS = [
    spec(
        f"argmax_rows_{dtype}_{length}",
        ArgmaxKernel(outer=3, length=length, inner=1),
        tensor("x", dtype, "r", 3, length, 1),
        tensor("out", "i64", "w", 3, 1),
    )
    for dtype, length in (("f32", 255), ("f32", 256), ("f32", 257), ("f32", 32_000), ("bf16", 1009), ("i64", 1024))
]


def long_order(dtype: DType, length: int, count: int, *, descending: bool, inner: int = 1) -> KernelSpec:
    body = OrderKernel(outer=2, length=length, count=count, inner=inner, descending=descending)
    outputs = (tensor(name, kind, "w", 2, count, inner) for name, kind in (("values", dtype), ("indices", "i64")))
    name = f"order_{dtype}_{length}_{count}_{inner}_{descending}"
    return spec(name, body, tensor("x", dtype, "r", 2, length, inner), *outputs)


LONG_ORDERS = [
    long_order("f32", 128, 128, descending=False), long_order("f32", 129, 129, descending=True),
    long_order("bf16", 1000, 1000, descending=False, inner=2), long_order("i64", 2048, 2048, descending=True),
    long_order("f32", 2048, 1, descending=True), long_order("f32", 2049, 50, descending=True),
    long_order("i32", 5000, 129, descending=False), long_order("f32", 4097, 1024, descending=True),
    long_order("f32", 2049, 2049, descending=False), long_order("bf16", 20_000, 8, descending=True, inner=3),
]  # fmt: skip
N = dim("n").to_dim()
DYNAMIC = [
    KernelSpec(
        name=f"order_dynamic_{count}",
        symbols=("n",),
        operands=(
            tensor("x", "f32", "r", 1, N, 1), tensor("values", "f32", "w", 1, count, 1),
            tensor("indices", "i64", "w", 1, count, 1),
        ),
        body=OrderKernel(outer=1, length=N, count=count, inner=1, descending=True),
    )
    for count in (5, N)
]  # fmt: skip
SCATTERS = [
    *(scatter(f"scatter_{fold}_f32", "f32", fold) for fold in ("none", "add", "mul", "max", "min")),
    scatter("scatter_add_bf16", "bf16", "add"), scatter("scatter_add_i1", "i1", "add"),
    scatter("scatter_max_i32", "i32", "max"),
]  # fmt: skip
SCANS = [
    *(scan(f"scan_{fold}_f32", "f32", fold) for fold in ("mul", "max", "min", "logaddexp")),
    scan("scan_mul_i64", "i64", "mul"), scan("scan_max_bf16", "bf16", "max"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([*ORDERS, ARGMAX, *ROWS, *LONG_ORDERS, *DYNAMIC, *SCATTERS, *SCANS])


def data(dtype: str, *shape: int, seed: int = 9) -> np.ndarray:
    """Few different values, so that many are equal; floats with NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    if dtype == "i1":
        return rng.random(shape) > 0.5
    values = rng.integers(-4, 5, shape).astype(NUMPY_DTYPES[dtype])
    if dtype in ("f32", "bf16"):
        values[rng.random(shape) < 0.05] = np.nan
        values[rng.random(shape) < 0.05] = np.inf
    return values


def wanted_order(x: np.ndarray, *, descending: bool) -> np.ndarray:
    out = np.empty(x.shape, np.int64)
    sign = -1 if descending else 1
    for o, n in np.ndindex(x.shape[0], x.shape[2]):
        row = x[o, :, n].astype(np.float64)
        keys = [(sign, 0.0) if np.isnan(v) else (0, sign * v) for v in row]
        out[o, :, n] = sorted(range(len(keys)), key=keys.__getitem__)
    return out


@pytest.mark.parametrize("each", ORDERS, ids=lambda each: each.name)
def test_orders_are_stable_with_nan_the_largest(each: KernelSpec, kernels: Any) -> None:
    assert isinstance(each.body, OrderKernel)
    x, shape = data(each.operands[0].dtype, O, L, I), each.operands[1].shape
    values, indices = kernels.run(each.name, [x, np.zeros(shape, x.dtype), np.zeros(shape, np.int64)], ())
    wanted = wanted_order(x, descending=each.body.descending)[:, : int(each.body.count)]
    assert np.array_equal(indices, wanted)
    assert values.tobytes() == np.take_along_axis(x, wanted, 1).tobytes()


@pytest.mark.parametrize("each", LONG_ORDERS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", [9, None])
def test_orders_of_long_rows_are_those_of_short_ones(each: KernelSpec, kernels: Any, seed: int | None) -> None:
    """Few different values, or values that come the worst first, so that no part of the row is skipped."""
    assert isinstance(each.body, OrderKernel)
    (dtype, x_shape), shape = (each.operands[0].dtype, each.operands[0].shape), each.operands[1].shape
    x = data(dtype, *map(int, x_shape), seed=seed or 0)
    if seed is None:
        x = np.sort(x, axis=1) if each.body.descending else np.sort(x, axis=1)[:, ::-1].copy()
    values, indices = kernels.run(each.name, [x, np.zeros(shape, x.dtype), np.zeros(shape, np.int64)], ())
    wanted = wanted_order(x, descending=each.body.descending)[:, : int(each.body.count)]
    assert np.array_equal(indices, wanted)
    assert values.tobytes() == np.take_along_axis(x, wanted, 1).tobytes()
    length, count = int(each.body.length), int(each.body.count)
    assert ("a block of" in emit_kernel(each, "sm_90a").text) == (length > 128 and (length <= 2048 or count <= 1024))


@pytest.mark.parametrize("each", DYNAMIC, ids=lambda each: each.name)
@pytest.mark.parametrize("length", [5, 128, 1000, 3001])
def test_orders_of_rows_of_a_dynamic_length(each: KernelSpec, kernels: Any, length: int) -> None:
    x = data("f32", 1, length, 1)
    count = 5 if each.name.endswith("5") else length
    values, indices = kernels.run(
        each.name, [x, np.zeros((1, count, 1), np.float32), np.zeros((1, count, 1), np.int64)], {"n": length}
    )
    wanted = wanted_order(x, descending=True)[:, :count]
    assert np.array_equal(indices, wanted)
    assert values.tobytes() == np.take_along_axis(x, wanted, 1).tobytes()


def test_argmax_is_the_first_maximum_and_the_first_nan(kernels: Any) -> None:
    x = data("f32", O, L, I)
    (out,) = kernels.run("argmax", [x, np.zeros((O, I), np.int64)], ())
    assert np.array_equal(out, np.argmax(x, axis=1))


@pytest.mark.parametrize("each", ROWS, ids=lambda each: each.name)
def test_argmax_of_long_rows_is_one_answer_of_the_whole_block(each: KernelSpec, kernels: Any) -> None:
    """Few different values, so that many threads hold the maximum; a row of one value; one without NaN."""
    dtype, length = each.operands[0].dtype, int(each.operands[0].shape[1])
    x = data(dtype, 3, length, 1)
    x[1] = x[1, 0]
    x[2] = np.where(x[2] == x[2], x[2], 0)
    (out,) = kernels.run(each.name, [x, np.zeros((3, 1), np.int64)], ())
    assert np.array_equal(out, np.argmax(x.astype(np.float64), axis=1))
    assert ("a block of" in emit_kernel(each, "sm_90a").text) == (length >= 256)


_STEP: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda a, b: b, "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


@pytest.mark.parametrize("each", SCATTERS, ids=lambda each: each.name)
def test_equal_indices_meet_in_order_and_bad_ones_write_nothing(each: KernelSpec, kernels: Any) -> None:
    assert isinstance(each.body, ScatterKernel)
    dtype = each.operands[2].dtype
    x, src = data(dtype, O, L, I), data(dtype, O, C, I, seed=4)
    index = np.random.default_rng(2).integers(-L, L, (O, C, I))
    index[0, 1, :2] = L, -L - 1
    wanted = np.array(x)
    with np.errstate(all="ignore"):
        for o, i, n in np.ndindex(O, C, I):
            if -L <= index[o, i, n] < L:
                at = (o, int(index[o, i, n]), n)
                wanted[at] = _STEP[each.body.fold](wanted[at], src[o, i, n])
    (out,) = kernels.run(each.name, [index, src, np.array(x)], ())
    assert np.array_equal(out.astype(np.float64), wanted.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("each", SCANS, ids=lambda each: each.name)
def test_running_folds_equal_numpy(each: KernelSpec, kernels: Any) -> None:
    assert isinstance(each.body, ScanKernel)
    x = data(each.operands[0].dtype, O, L, I)
    (out,) = kernels.run(each.name, [x, np.zeros_like(x)], ())
    folds = {"mul": np.multiply, "max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp}
    with np.errstate(all="ignore"):
        wide = x if x.dtype.kind == "i" else x.astype(np.float64)
        wanted = folds[each.body.fold].accumulate(wide, axis=1)
    np.testing.assert_allclose(out.astype(np.float64), wanted.astype(np.float64), rtol=4e-6)


def test_one_kernel_of_each_kind_compiles_for_a_gpu(nvrtc: Callable[..., Any]) -> None:
    assert len(nvrtc([ORDERS[1], ARGMAX, SCATTERS[5], SCANS[3]], "sm_90a")) == 4


def test_a_fold_that_has_no_meaning_is_refused() -> None:
    with pytest.raises(KernelSelectionError, match="'out' is i64, not one of f64"):
        emit_kernel(scan("scan", "i64", "logaddexp"), "sm_80")
