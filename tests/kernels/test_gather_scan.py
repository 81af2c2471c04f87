"""Gather, index_update and scan against NumPy, with the errors they report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import C, I, L, O, gather, row_major

from qcompiler.kernels.kinds.gather import BLOCK
from qcompiler.plan.kernel import DType, KernelSpec
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.weights import NUMPY_DTYPES


def repeated(name: str, length: int = L) -> KernelSpec:
    """Rows of a matrix (C, I) of indices, the same for each of O: read where it lies, written with count fastest."""
    index = row_major("index", "i64", "r", O, C, I, strides=(0, 1, C + 2))
    x = row_major("x", "f32", "r", O, length, I, strides=(I * length, 1, length))
    out = row_major("out", "f32", "w", O, C, I, strides=(C * I, 1, C))
    body = GatherKernel(mode="along", outer=O, length=length, count=C, inner=I)
    return KernelSpec(name=name, symbols=(), operands=(x, index, out), body=body)


def picked_rows(name: str, inner: int) -> KernelSpec:
    """`torch.gather` with one index for each row, expanded along it: whole rows are copied."""
    index = row_major("index", "i64", "r", O, C, inner, strides=(C, 1, 0))
    operands = (row_major("x", "bf16", "r", O, L, inner), index, row_major("out", "bf16", "w", O, C, inner))
    body = GatherKernel(mode="along", outer=O, length=L, count=C, inner=inner)
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


LONG = 2 * BLOCK + 5
"""The inner dim of rows that several items copy."""


def scan(name: str, dtype: DType, out: DType) -> KernelSpec:
    operands = (row_major("x", dtype, "r", O, 101, 70), row_major("out", out, "w", O, 101, 70))
    return KernelSpec(name=name, symbols=(), operands=operands, body=ScanKernel(outer=O, length=101, inner=70))


def update(name: str, src_strides: tuple[int, ...] | None = None) -> KernelSpec:
    src = row_major("src", "f32", "r", O, C, I, strides=src_strides)
    operands = (row_major("x", "f32", "rw", O, L, I), row_major("index", "i64", "r", C), src)
    body = IndexUpdateKernel(outer=O, length=L, count=C, inner=I)
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


SPECS = [
    gather("take", "take", "f32"), gather("take_bf16_i32", "take", "bf16", "i32"), gather("along", "along", "i64"),
    repeated("along_repeated"),
    picked_rows("picked_1", 1), picked_rows("picked_29", 29), picked_rows("picked_long", LONG),
    update("update"), update("update_strided", (1, O, O * C)),
    scan("scan_f32", "f32", "f32"), scan("scan_bf16", "bf16", "bf16"), scan("scan_i64", "i64", "i64"),
    scan("scan_bool", "i1", "i64"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build(SPECS, isa)


def data(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(9)
    if dtype == "i1":
        return rng.random(shape) > 0.5
    return (rng.normal(size=shape) * 100).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize(("name", "dtype", "index"), [("take", "f32", "i64"), ("take_bf16_i32", "bf16", "i32")])
def test_take(kernels: Any, name: str, dtype: str, index: str) -> None:
    x = data(dtype, O, L, I)
    where = np.array([0, 10, -1, -11, 5, 5, 3], NUMPY_DTYPES[index])
    out = kernels.run_both(name, lambda: [x, where, np.zeros((O, C, I), x.dtype)])[-1]
    assert out.tobytes() == np.take(x, where, 1).tobytes()


def test_gather_along(kernels: Any) -> None:
    x = data("i64", O, L, I)
    where = np.random.default_rng(1).integers(-L, L, (O, C, I))
    out = kernels.run_both("along", lambda: [x, where, np.zeros((O, C, I), np.int64)])[-1]
    np.testing.assert_array_equal(out, np.take_along_axis(x, where % L, 1))


def test_gather_along_with_one_index_for_all(kernels: Any) -> None:
    x = data("f32", O, I, L)
    where = np.random.default_rng(1).integers(-L, L, (I, C + 2))
    where[:, C:] = 99  # is not read
    out = kernels.run_both("along_repeated", lambda: [x, where, np.zeros((O, I, C), np.float32)])[-1]
    rows = np.broadcast_to(where[:, :C] % L, (O, I, C))
    assert out.tobytes() == np.take_along_axis(x, rows, 2).tobytes()
    where[I - 1, C - 1] = -L - 1
    context = kernels.run("along_repeated", [x, where, out])
    assert (context.error_code, context.error_value, context.error_limit) == (1, -L - 1, L)


@pytest.mark.parametrize(("name", "inner"), [("picked_1", 1), ("picked_29", 29), ("picked_long", LONG)])
def test_gather_of_rows_by_an_expanded_index(kernels: Any, name: str, inner: int) -> None:
    x, where = data("bf16", O, L, inner), np.random.default_rng(1).integers(-L, L, (O, C))
    out = kernels.run_both(name, lambda: [x, where, np.zeros((O, C, inner), x.dtype)])[-1]
    assert out.tobytes() == np.take_along_axis(x, (where % L)[:, :, None], 1).tobytes()
    task = kernels.source.split(f"static void qk_{name}_task")[1].split("qc_run")[0]
    assert ("memcpy" in task) == (inner > 1), "rows that lie side by side are copied whole"


@pytest.mark.parametrize("bad", [L, -L - 1, 2**40])
def test_gather_reports_an_index_out_of_range(kernels: Any, bad: int) -> None:
    where, out = np.array([0, 1, bad, 99, 0, 0, 0]), np.full((O, C, I), 7, np.float32)
    context = kernels.run("take", [data("f32", O, L, I), where, out])
    assert (context.error_code, context.error_value, context.error_limit) == (1, bad, L)
    assert (out == 7).all(), "an output was written although an index is out of range"


@pytest.mark.parametrize("name", ["update", "update_strided"])
def test_index_update_last_of_equal_indices_wins(kernels: Any, name: str) -> None:
    x, where = data("f32", O, L, I), np.array([3, 10, 3, 0, 7, 7, 3])
    flat = data("f32", O * C * I)
    src = flat.reshape(O, C, I) if name == "update" else flat.reshape(I, C, O).transpose(2, 1, 0)
    got = kernels.run_both(name, lambda: [x.copy(), where, flat])[0]
    want = x.copy()
    for i, at in enumerate(where):
        want[:, at] = src[:, i]
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("bad", [-1, -L, -L - 1, L, 2**40, -(2**40)])
def test_index_update_reports_before_it_writes(kernels: Any, bad: int) -> None:
    """A negative position is none, as one behind the end: it wrote the cache's last slot."""
    x = data("f32", O, L, I)
    before = x.copy()
    context = kernels.run("update", [x, np.array([0, 1, 2, 3, 4, 5, bad]), data("f32", O, C, I)])
    assert (context.error_code, context.error_value, context.error_limit) == (1, bad, L)
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["scan_f32", "scan_bf16", "scan_i64", "scan_bool"])
def test_scan_matches_numpy(kernels: Any, name: str) -> None:
    spec = next(s for s in SPECS if s.name == name)
    kept = NUMPY_DTYPES[spec.operands[1].dtype]
    x = data(spec.operands[0].dtype, O, 101, 70)
    out = kernels.run_both(name, lambda: [x, np.zeros(x.shape, kept)])[-1]
    inner = np.float32 if kept.kind not in "iu" else np.int64
    want = np.cumsum(x.astype(inner), axis=1, dtype=inner).astype(kept)
    assert out.tobytes() == want.tobytes()
