"""Layer and RMS norm on the device against float64: tails, strides, narrow types, rows of a warp and of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.weights import NUMPY_DTYPES

EPS = 1e-5
TOLERANCE = {"f32": 1e-6, "bf16": 4e-3, "f16": 5e-4}
"""Of the result's norm: fp32 statistics, or one rounding."""


@dataclass(frozen=True)
class Case:
    kind: str
    cols: int
    dtype: DType = "f32"
    weight: bool = True
    bias: bool = False
    rows: int = 7
    x_strides: tuple[Any, Any] | None = None  # default: three columns of padding
    weight_dtype: DType | None = None
    heads: int = 0  # rows of x that are parts of a wider row, and results in the order of heads

    @property
    def name(self) -> str:
        extra = f"{self.weight:d}{self.bias:d}{'s' if self.x_strides else ''}{self.weight_dtype or ''}"
        extra += f"_{self.heads}" if self.heads else ""
        return f"{self.kind}_{self.cols}_{self.dtype}_{extra}"

    @property
    def spec(self) -> KernelSpec:
        def vector(name: str) -> Operand:
            dtype = self.weight_dtype or self.dtype
            return Operand(name=name, dtype=dtype, access="r", shape=(self.cols,), strides=(1,))

        shape, strides, out = ("r", self.cols), (self.cols + 3, 1), (self.cols, 1)
        if self.heads:
            shape = ("r", self.heads, self.cols)
            strides, out = ((self.heads + 2) * self.cols, self.cols, 1), (self.cols, f"{self.cols}*r", 1)
        operands = [
            Operand(
                name="x", dtype=self.dtype, access="r", shape=shape, strides=self.x_strides or strides,
            ),
            *([vector("weight")] if self.weight else []),
            *([vector("bias")] if self.bias else []),
            Operand(name="out", dtype=self.dtype, access="w", shape=shape, strides=out),
        ]  # fmt: skip
        body = NormKernel(
            kind=self.kind,  # type: ignore[arg-type]
            rows="r",
            cols=self.cols,
            eps=EPS,
            has_weight=self.weight,
            has_bias=self.bias,
            inner=self.heads or None,
        )
        return KernelSpec(name=self.name, symbols=("r",), operands=tuple(operands), body=body)


CASES = [
    Case("layer", 1, bias=True),
    Case("rms", 15),
    Case("layer", 384, weight=False),
    Case("layer", 403, bias=True),
    Case("rms", 96, "bf16"),
    Case("layer", 77, "f16", bias=True),
    Case("rms", 96, "bf16", weight_dtype="f32", rows=3),
    Case("layer", 513, bias=True, rows=3),
    Case("rms", 1000, "bf16", rows=2),
    Case("layer", 4096, "f16", bias=True, rows=2),
    Case("rms", 17000, rows=1),
    Case("layer", 17000, bias=True, rows=1),
    Case("rms", 40, x_strides=(1, "r")),
    Case("layer", 600, x_strides=(1, "r"), bias=True),
]
HEADS = [
    Case("rms", 128, heads=4, rows=3),
    Case("rms", 40, "bf16", heads=3, rows=5),
    Case("layer", 600, heads=1, rows=2, bias=True),
]
LARGEST = (
    "layer_384_f32_00",
    "layer_403_f32_11",
    "rms_1000_bf16_10",
    "layer_4096_f16_11",
    "layer_17000_f32_11",
    "rms_128_f32_10_4",
)
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([case.spec for case in (*CASES, *HEADS)])


def reference(case: Case, x: np.ndarray, vectors: list[np.ndarray]) -> np.ndarray:
    v = x.astype(np.float64)
    if case.kind == "layer":
        v = v - v.mean(1, keepdims=True)
    want = v / np.sqrt((v * v).mean(1, keepdims=True) + EPS)
    rest = [each.astype(np.float64) for each in vectors]
    if case.weight:
        want = want * rest.pop(0)
    return want + rest.pop(0) if case.bias else want


def matrix(case: Case, values: np.ndarray) -> np.ndarray:
    """`values` as an array with the operand's strides."""
    if case.x_strides:
        return np.ascontiguousarray(values.T).T
    return np.pad(values, ((0, 0), (0, 3)))[:, : case.cols]


def vectors(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    kept = NUMPY_DTYPES[case.weight_dtype or case.dtype]
    return [rng.normal(size=case.cols).astype(kept) for _ in range(case.weight + case.bias)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norm_matches_float64_and_does_not_depend_on_the_order_of_threads(kernels: Any, case: Case) -> None:
    rng = np.random.default_rng(1)
    kept = NUMPY_DTYPES[case.dtype]
    x = matrix(case, (rng.normal(size=(case.rows, case.cols)) * 3 + 1.5).astype(kept))
    operands = [x, *vectors(case, rng), np.empty((case.rows, case.cols), kept)]
    (out,) = kernels.run(case.name, operands, [case.rows])
    (again,) = kernels.run(case.name, operands, [case.rows], seed=1)
    want = reference(case, x, operands[1:-1])
    error = np.linalg.norm(out.astype(np.float64) - want) / (np.linalg.norm(want) + 1e-30)
    assert error <= TOLERANCE[case.dtype], error
    assert out.tobytes() == again.tobytes()


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_rows_with_two_strides_have_the_bits_of_even_rows(
    kernels: Any, sim_run: Callable[..., Any], case: Case
) -> None:
    rng = np.random.default_rng(5)
    kept, total = NUMPY_DTYPES[case.dtype], case.rows * case.heads
    x = rng.normal(size=(case.rows, case.heads + 2, case.cols)).astype(kept)
    w = vectors(case, rng)
    (out,) = kernels.run(case.name, [x, *w, np.empty((case.heads, case.rows, case.cols), kept)], [case.rows])
    apart = replace(case, heads=0, x_strides=(case.cols, 1), rows=total)
    even = np.ascontiguousarray(x[:, : case.heads]).reshape(total, case.cols)
    (want,) = sim_run(apart.spec, [even, *w, np.empty((total, case.cols), kept)], [total])
    want = want.reshape(case.rows, case.heads, case.cols).transpose(1, 0, 2)
    assert np.ascontiguousarray(want).tobytes() == out.tobytes()


def test_large_mean_does_not_cancel_the_variance(kernels: Any) -> None:
    """A one-pass E[x^2] - E[x]^2 would lose every digit here."""
    case = next(case for case in CASES if case.cols == 513)
    x = matrix(case, (np.random.default_rng(2).normal(size=(4, case.cols)) + 3000).astype(np.float32))
    ones, zeros = np.ones(case.cols, np.float32), np.zeros(case.cols, np.float32)
    (out,) = kernels.run(case.name, [x, ones, zeros, np.empty((4, case.cols), np.float32)], [4])
    assert np.abs(out - reference(case, x, [ones, zeros])).max() < 2e-3


def test_norm_in_place(sim_run: Callable[..., Any]) -> None:
    case = Case("rms", 70, x_strides=(70, 1))
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(6, 70)).astype(np.float32), rng.normal(size=70).astype(np.float32)
    (out,) = sim_run(case.spec, [x, w, x], [6])
    assert np.abs(out - reference(case, x, [w])).max() < 1e-5


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    largest = [case.spec for case in (*CASES, *HEADS) if case.name in LARGEST]
    for name, used in nvrtc(largest, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"


def test_double_precision_is_refused_by_name() -> None:
    with pytest.raises(KernelSelectionError, match="operand 'x' is f64"):
        emit_kernel(Case("rms", 8, "f64").spec, "sm_80")
