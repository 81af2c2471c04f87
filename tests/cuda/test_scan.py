"""Cumulative sums on the device: rows over several turns of a block, columns side by side, every kind of element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.kernels.cuda import signature
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.weights import NUMPY_DTYPES

TYPES: list[tuple[DType, DType]] = [
    ("f32", "f32"), ("bf16", "bf16"), ("f64", "f64"), ("i64", "i64"), ("i1", "i64"), ("i32", "i8"), ("f32", "i1"),
]  # fmt: skip


def scan(x: DType, out: DType, inner: Any) -> KernelSpec:
    """(o, l, inner): a static inner of 1, or a symbol."""
    strides = ("l", 1, 1) if inner == 1 else ("l*n", "n", 1)
    operands = (
        Operand(name="x", dtype=x, access="r", shape=("o", "l", inner), strides=strides),
        Operand(name="out", dtype=out, access="w", shape=("o", "l", inner), strides=strides),
    )
    body = ScanKernel(outer="o", length="l", inner=inner)
    name = f"scan_{x}_{out}_{inner}"
    return KernelSpec(name=name, symbols=("o", "l", "n"), operands=operands, body=body)


SPECS = [scan(*types, inner) for types in TYPES for inner in (1, "n")]
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def data(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(9)
    if dtype == "i1":
        return rng.random(shape) > 0.5
    return (rng.normal(size=shape) * 100).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize("shape", [(3, 700, 1), (2, 1, 1), (3, 101, 70), (1, 9, 130)])
@pytest.mark.parametrize(("x_dtype", "out_dtype"), TYPES)
def test_scan_matches_numpy(kernels: Any, x_dtype: DType, out_dtype: DType, shape: tuple[int, ...]) -> None:
    x, kept = data(x_dtype, *shape), NUMPY_DTYPES[out_dtype]
    name = f"scan_{x_dtype}_{out_dtype}_{'1' if shape[2] == 1 else 'n'}"
    (out,) = kernels.run(name, [x, np.zeros(shape, kept)], shape)
    (again,) = kernels.run(name, [x, np.zeros(shape, kept)], shape, seed=3)
    assert out.tobytes() == again.tobytes()
    if kept.kind == "b":  # whatever is no zero is true, and stays it
        x[:, : shape[1] // 2] = 0
        (out,) = kernels.run(name, [x, np.zeros(shape, kept)], shape)
        assert out.tobytes() == np.logical_or.accumulate(x != 0, axis=1).tobytes()
        return
    if kept.kind in "iu":
        assert out.tobytes() == np.cumsum(x.astype(np.int64), axis=1).astype(kept).tobytes()
        return
    want = np.cumsum(x.astype(np.float64), axis=1)
    scale = np.abs(x.astype(np.float64)).sum(axis=1, keepdims=True)
    bound = {"f32": 3e-7, "bf16": 4e-3, "f64": 1e-15}[out_dtype]
    assert (np.abs(out.astype(np.float64) - want) <= bound * scale).all()


def test_columns_are_summed_in_order(kernels: Any) -> None:
    x = data("f32", 2, 50, 33)
    (out,) = kernels.run("scan_f32_f32_n", [x, np.zeros_like(x)], x.shape)
    assert out.tobytes() == np.cumsum(x, axis=1, dtype=np.float32).tobytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills_on_every_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    for name, used in nvrtc(SPECS[:6], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
