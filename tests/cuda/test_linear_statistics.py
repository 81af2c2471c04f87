"""Statistics of rows that one linear writes and the next one normalises by: float64's numbers, and no spills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load
from kernel_cases import aligned, residual_program, stored_weight

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.row_statistics import mean_and_square, parts_of
from qcompiler.kernels.cpu import emit as cpu
from qcompiler.kernels.cuda import emit, linear
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, RowNorm
from qcompiler.plan.row_statistics import width
from qcompiler.plan.weights import NUMPY_DTYPES

swiglu = load("tests/cuda/test_linear_pairs.py").swiglu
LAYOUT = "cuda_t16_v1"
EPS = 1e-5
BOUNDS = {"f32": 2e-6, "bf16": 1e-2, "f16": 2e-3}
Module = Callable[..., Any]
SLOW = pytest.mark.slow


def m_class(m: int) -> Any:
    return "9-64" if m <= 64 else "large"


def matrix(name: str, dtype: Any, m: int, columns: int, access: Any = "r", gap: int = 0) -> Operand:
    return Operand(name=name, dtype=dtype, access=access, shape=(m, columns), strides=(columns + gap, 1))


def vector(name: str, dtype: Any, size: int) -> Operand:
    return Operand(name=name, dtype=dtype, access="r", shape=(size,), strides=(1,))


def weight(kind: str, dtype: Any, n: int, k: int) -> tuple[Operand, Any, Any]:
    w = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32) / np.float32(k**0.5)
    return stored_weight(w, "layout" if kind == "plain" else FormatRef(name="nf4", params={"block": 64}), dtype, LAYOUT)


def writes(fmt: str, dtype: Any, kind: Any, m: int, n: int, k: int = 64, gap: int = 0) -> tuple[KernelSpec, Any, Any]:
    """(spec, stored weight, its values) of a linear with a residual, that writes statistics."""
    w, data, values = weight(fmt, dtype, n, k)
    operands = (
        matrix("x", dtype, m, k), w, matrix("r", dtype, m, n), matrix("s", dtype, m, n),
        matrix("parts", "f32", m, width(kind, n), "w", gap), matrix("out", dtype, m, n, "w", gap),
    )  # fmt: skip
    body = LinearKernel(
        m=m, n=n, k=k, m_class=m_class(m), has_bias=False, epilogue=residual_program(dtype), statistics=kind
    )
    return KernelSpec(name=f"writes_{kind}_{m}_{n}x{k}", symbols=(), operands=operands, body=body), data, values


def reads(
    fmt: str, dtype: Any, kind: Any, m: int, k: int, n: int = 70, gap: int = 0, affine: bool = True
) -> tuple[KernelSpec, Any, Any]:
    """The same of a linear that normalises its rows by statistics."""
    w, data, values = weight(fmt, dtype, n, k)
    norm = RowNorm(kind=kind, eps=EPS, has_weight=affine, has_bias=affine and kind == "layer", given=True)
    vectors = [vector(name, dtype, k) for name in norm.names[:-1]]
    parts = matrix("statistics", "f32", m, width(kind, k), gap=gap)
    operands = (matrix("x", dtype, m, k, gap=gap), w, *vectors, parts, matrix("out", dtype, m, n, "w"))
    body = LinearKernel(m=m, n=n, k=k, m_class=m_class(m), has_bias=False, norm=norm)
    name = f"reads_{kind}_{m}_{n}x{k}_{affine}"
    return KernelSpec(name=name, symbols=(), operands=operands, body=body), data, values


def normalised(rows: Any, kind: str, weight: Any = 1.0, bias: Any = 0.0) -> Any:
    wide = rows.astype(np.float64)
    if kind == "layer":
        wide = wide - wide.mean(1, keepdims=True)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight + bias


def check_chain(sim_module: Module, arch: str, dtype: Any, fmt: str, m: int, k: int, kind: Any, shift: float) -> None:
    """One linear writes rows and statistics, another one reads both. `shift` moves all rows away from zero, where a
    difference of large sums would cancel."""
    rng, real = np.random.default_rng(m * k), NUMPY_DTYPES[dtype]
    gap = 3 if k % 2 else 0
    first, first_data, first_values = writes(fmt, dtype, kind, m, k, gap=gap)
    second, second_data, second_values = reads(fmt, dtype, kind, m, k, gap=gap, affine=k != 64)
    wanted = {"fma"} if dtype == "f32" or arch == "sm_70" or (arch, dtype) == ("sm_75", "bf16") else {"mma"}
    if wanted == {"mma"} and arch == "sm_90a" and m > 64:
        wanted = {"wgmma"}
    assert {linear.decision_of(spec, arch).key for spec in (first, second)} == wanted
    module = sim_module([first, second], arch)
    given = [rng.standard_normal(o.shape).astype(real) for o in first.operands[:1]]
    r = (rng.standard_normal((m, k)) + shift).astype(real)
    s = np.ones((m, k), real)
    parts = np.zeros((m, width(kind, k) + gap), np.float32)[:, : width(kind, k)]
    out = np.zeros((m, k + gap), real)[:, :k]
    made_parts, rows = module.run(first.name, [given[0], aligned(first_data), r, s, parts, out])[-2:]
    product = given[0].astype(np.float64) @ first_values.astype(np.float64).T + r.astype(np.float64)
    error = np.linalg.norm(rows.astype(np.float64) - product) / np.linalg.norm(product)
    assert error <= BOUNDS[dtype], error
    np.testing.assert_allclose(made_parts, parts_of(rows.astype(np.float32), kind), rtol=2e-5, atol=1e-5)
    vectors = [
        (rng.standard_normal(k) + 1).astype(real)
        for each in second.operands
        if each.name in ("norm_weight", "norm_bias")
    ]
    found = module.run(
        second.name, [rows, aligned(second_data), *vectors, made_parts, np.zeros((m, 70), real)]
    )[-1]  # fmt: skip
    affine = [each.astype(np.float64) for each in vectors]
    exact = normalised(rows, kind, *affine).astype(np.float32).astype(real).astype(np.float64)
    expected = exact @ second_values.astype(np.float64).T
    error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
    # Where rows are far from zero, a last place of x is as large against their spread; the sums see rounded x, too.
    assert error <= BOUNDS[dtype] * (1 if shift == 0 or dtype != "f32" else 20), (first.name, error)


CASES = [
    ("sm_80", "bf16", "nf4", 17, 64, "layer", 0.0), ("sm_80", "bf16", "plain", 9, 101, "rms", 0.0),
    ("sm_90a", "bf16", "nf4", 65, 192, "layer", 8.0), ("sm_75", "f16", "nf4", 33, 128, "layer", 0.0),
    ("sm_70", "f32", "plain", 17, 97, "layer", 300.0), ("sm_80", "f32", "nf4", 65, 64, "rms", 0.0),
    *(
        pytest.param(*each, marks=SLOW)
        for each in (
            ("sm_90a", "bf16", "nf4", 197, 768, "layer", 0.0), ("sm_75", "f16", "nf4", 64, 768, "rms", 0.0),
            ("sm_70", "f16", "plain", 17, 33, "layer", 0.0), ("sm_75", "bf16", "nf4", 17, 64, "layer", 0.0),
            ("sm_80", "f16", "nf4", 64, 768, "layer", 4.0), ("sm_80", "f32", "nf4", 197, 768, "layer", 0.0),
            ("sm_90a", "bf16", "plain", 197, 97, "rms", 0.0), ("sm_80", "bf16", "nf4", 128, 64, "rms", 0.0),
            ("sm_70", "f32", "nf4", 64, 768, "rms", 0.0), ("sm_90a", "f32", "plain", 9, 1, "layer", 0.0),
            ("sm_90a", "f16", "plain", 16, 31, "layer", 0.0), ("sm_80", "bf16", "plain", 32, 32, "rms", 0.0),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "fmt", "m", "k", "kind", "shift"), CASES)
def test_a_linear_normalises_by_what_another_one_wrote(
    sim_module: Module, arch: str, dtype: Any, fmt: str, m: int, k: int, kind: Any, shift: float
) -> None:
    check_chain(sim_module, arch, dtype, fmt, m, k, kind, shift)


def test_parts_give_the_variance_of_rows_far_from_zero() -> None:
    """The mean of the squares less the square of the mean has no correct digit here."""
    rows = (np.random.default_rng(0).standard_normal((5, 97)) + 3000).astype(np.float32)
    mean, square = mean_and_square(parts_of(rows, "layer"), "layer", 97)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(square, wide.var(1, keepdims=True), rtol=1e-4)
    naive = np.square(rows).mean(1, dtype=np.float32) - np.square(rows.mean(1, dtype=np.float32))
    assert np.abs(naive / wide.var(1) - 1).max() > 0.1


ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=() if arch == "sm_80" else SLOW) for arch in ARCHS])
def test_no_kernel_spills_at_sizes_of_models(nvrtc: Callable[..., Any], arch: str) -> None:
    """ViT-B/16's layers, 17 rows and 197, on both engines; wide rows; pairs that are normalised first."""
    half: Any = "f16" if arch in ("sm_70", "sm_75") else "bf16"
    cases: list[Any] = [(half, 17, "layer"), (half, 197, "layer")]
    if arch != "sm_80":
        cases += [(half, 64, "rms"), ("f32", 17, "layer"), ("f32", 197, "rms"), (half, 4096, "layer")]
    specs = []
    for dtype, m, kind in cases:
        for made in (writes("nf4", dtype, kind, m, 768, 3072)[0], reads("nf4", dtype, kind, m, 768, 2304)[0]):
            specs.append(msgspec.structs.replace(made, name=f"{made.name}_{dtype}"))
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)


def test_a_norm_whose_vectors_fill_shared_memory_goes_to_cuda_cores() -> None:
    """Of a 64 KiB block on sm_75, 16 KiB of weights and biases leave too little for the tiles of x."""
    spec = reads("plain", "f16", "layer", 64, 4096)[0]
    assert linear.decision_of(spec, "sm_75").key == "fma"
    assert linear.decision_of(spec, "sm_80").key == "mma"


def test_a_cpu_refuses_statistics() -> None:
    for spec in (writes("plain", "f32", "layer", 17, 64)[0], reads("plain", "f32", "rms", 17, 64)[0]):
        w = msgspec.structs.replace(spec.operands[1], layout="cpu_p16_v1")
        on_cpu = msgspec.structs.replace(spec, operands=(spec.operands[0], w, *spec.operands[2:]))
        with pytest.raises(KernelSelectionError, match="only GPUs have kernels that do"):
            cpu.emit_kernel(on_cpu, "x86-64-v3")
        emit.emit_kernel(spec, "sm_80")
