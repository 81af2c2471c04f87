"""Linears whose factors are rounded to bf16: against float64, by every number of rows, type of x, and processor.

A processor without AVX512-BF16 runs the same kernel in fp32; a definition makes any processor do so.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import aligned

from qcompiler import formats
from qcompiler.config import parse_format
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
PANELS = "cpu_p16_v2"
ROUNDED = 2.0**-8
"""Half an ulp of bf16, twice: a factor may be an element, or its code."""

WEIGHTS = {  # a format, or None for plain values: (N, K)
    "nf4:block=64": (83, 192), "int4:group=32": (40, 96), "q4_K": (35, 512), "q2_K": (33, 256), "q6_K": (20, 256),
    "q3_K": (19, 512), "q5_K": (18, 256), "int3:group=32": (21, 96), "q5_0": (18, 96), "int8:symmetric=False": (18, 8),
    "int8": (37, 101), "nf4:block=128": (37, 100), "fp8_e4m3": (19, 77), "plain": (51, 77),
}  # fmt: skip
FEW = ("nf4:block=64", "q4_K", "int8", "int8:symmetric=False", "plain")
"""Those of the short run: one of each way through the codes."""

MS = (1, 2, 3, 5, 8, 9, 14, 64, 65, 131)


def weight(text: str) -> tuple[Operand, Array, Array]:
    """(operand, bytes, elements in fp32). Blocks of nf4 may run across rows."""
    n, k = WEIGHTS[text]
    w = np.random.default_rng(zlib.crc32(text.encode())).standard_normal((n, k)).astype(np.float32)
    if text == "plain":
        plain = w.astype(NUMPY_DTYPES["bf16"])
        data = layouts.get(PANELS).pack(None, "bf16", n, k, plain.view(np.uint8).reshape(-1))
        operand = Operand(name="w", dtype="bf16", access="r", shape=(n, k), layout=PANELS)
        return operand, aligned(data), plain.astype(np.float32)
    ref = parse_format(text)
    fmt = formats.get(ref.name, **ref.params)
    packed = fmt.encode(w)
    data = layouts.get(PANELS).pack(fmt, "bf16", n, k, packed.data)
    operand = Operand(name="w", dtype="bf16", access="r", shape=(n, k), format=ref, layout=PANELS)
    return operand, aligned(data), fmt.decode(packed)


def spec_of(text: str, x: DType, m_class: Any, width: int | None = None) -> KernelSpec:
    operand, n, k = weight(text)[0], *WEIGHTS[text]
    operands = (
        Operand(name="x", dtype=x, access="r", shape=("m", k), strides=(width or k + 3, 1)),
        operand,
        Operand(name="out", dtype="f32", access="w", shape=("m", n), strides=(n, 1)),
    )
    name = f"b{zlib.crc32(f'{text} {x} {m_class} {width}'.encode()):08x}"
    body = LinearKernel(m="m", n=n, k=k, m_class=m_class, has_bias=False)
    return KernelSpec(name=name, symbols=("m",), operands=operands, body=body)


def rows_of(text: str, x: DType, m: int, width: int | None = None) -> Array:
    k = WEIGHTS[text][1]
    rows = np.full((m, width or k + 3), np.nan, NUMPY_DTYPES[x])  # what lies between rows is no number
    rows[:, :k] = np.random.default_rng(m).standard_normal((m, k)).astype(rows.dtype)
    return rows


def check(kernels: Any, text: str, x: DType, m_class: Any, m: int) -> None:
    (n, k), (_, data, w) = WEIGHTS[text], weight(text)
    rows = rows_of(text, x, m)
    spec = spec_of(text, x, m_class)
    out = kernels.run_both(spec.name, lambda: [rows, data, np.full((m, n), np.nan, np.float32)], (m,))[2]
    given = rows[:, :k].astype(NUMPY_DTYPES["bf16"]).astype(np.float64)
    terms = np.abs(given) @ np.abs(w.astype(np.float64)).T
    error = np.abs(out - given @ w.astype(np.float64).T)
    assert (error <= terms * (ROUNDED + (k + 2) * 2.0**-24)).all(), (text, x, m_class, m)
    # rounding is random: what is off by more than the typical error has another cause
    typical = ROUNDED * np.sqrt((given**2) @ (w.astype(np.float64) ** 2).T)
    assert np.sqrt(np.mean((error / typical) ** 2)) < 1, (text, x, m_class, m)


def classes(m: int) -> tuple[str, ...]:
    return ("1", "large") if m == 1 else ("2-8", "large") if m <= 8 else ("large",)


def check_all(build: Callable[..., Any], isa: str, x: DType, some: Sequence[str]) -> None:
    kernels = build([spec_of(text, x, m_class) for text in some for m_class in ("1", "2-8", "large")], isa)
    for text in some:
        for m in MS:
            for m_class in classes(m):
                check(kernels, text, x, m_class, m)


def test_products_are_those_of_factors_in_bf16(build: Callable[..., Any], isa: str) -> None:
    check_all(build, isa, "f32", FEW)


def test_codes_in_two_planes_are_looked_up(build: Callable[..., Any], isa: str) -> None:
    some = ("q6_K", "q5_K", "q3_K")
    kernels = build([spec_of(text, "bf16", "1") for text in some], isa)
    for text in some:
        check(kernels, text, "bf16", "1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("x", ["bf16", "f32", "f16"])
def test_products_of_every_way_through_the_codes(build: Callable[..., Any], isa: str, x: DType) -> None:
    check_all(build, isa, x, tuple(WEIGHTS))


@pytest.mark.slow
def test_a_processor_without_the_instruction_multiplies_the_same_rows(
    build: Callable[..., Any], isa: str, build_folder: Path
) -> None:
    kernels = build([spec_of(text, "f32", m_class) for text in WEIGHTS for m_class in ("2-8", "large")], isa)
    assert "QB_NO_BF16" in kernels.source and "avx512bf16" in kernels.source
    harness = sys.modules[type(kernels).__module__]
    source = "#define QB_NO_BF16 1\n" + kernels.source + harness.PARALLEL
    kernels.library = harness.compile_source(source, isa, build_folder)
    for text in WEIGHTS:
        for m in (1, 8, 65):
            check(kernels, text, "f32", "large", m)


def test_the_instruction_is_used_where_it_is_there() -> None:
    assert "qb_run<" in emit_kernel(spec_of("nf4:block=64", "f32", "large"), "x86-64-v4")
    assert "qb_run_few<" in emit_kernel(spec_of("nf4:block=64", "bf16", "1"), "x86-64-v4")
    assert "qb_run" not in emit_kernel(spec_of("nf4:block=64", "f32", "large"), "x86-64-v3")


@pytest.mark.parametrize(
    "text", ["q4_K", *(pytest.param(text, marks=pytest.mark.slow) for text in ("nf4:block=64", "int8"))]
)
def test_numbers_that_are_none_stay_in_their_rows(build: Callable[..., Any], isa: str, text: str) -> None:
    """An infinity gives one where the sum has one sign, a NaN a NaN, and neighbours are as they were."""
    n, (_, data, w) = WEIGHTS[text][0], weight(text)
    kernels = build([spec_of(text, "bf16", "2-8")], isa)
    rows = rows_of(text, "bf16", 3)
    plain = kernels.run_both(
        spec_of(text, "bf16", "2-8").name, lambda: [rows, data, np.zeros((3, n), np.float32)], (3,)
    )
    rows[1, 5], rows[2, 7] = np.inf, np.nan
    out = kernels.run_both(spec_of(text, "bf16", "2-8").name, lambda: [rows, data, np.zeros((3, n), np.float32)], (3,))
    assert out[2][0].tobytes() == plain[2][0].tobytes()
    assert np.isnan(out[2][2]).all()
    there = w[:, 5] != 0
    assert (out[2][1][there] == np.sign(w[there, 5]) * np.inf).all()
    assert np.isnan(out[2][1][~there]).all()


@pytest.mark.parametrize(("x", "k"), [("f32", 1024), ("bf16", 2048)])
def test_rows_a_power_of_two_apart_give_the_bits_of_others(
    build: Callable[..., Any], isa: str, x: DType, k: int
) -> None:
    """They are copied, since they would share one set of the cache."""
    n, m, made = 36, 70, []
    w = np.random.default_rng(0).standard_normal((n, k)).astype(NUMPY_DTYPES[x])
    data = aligned(layouts.get(PANELS).pack(None, x, n, k, w.view(np.uint8).reshape(-1)))
    for width in (k, k + 16):
        operands = (
            Operand(name="x", dtype=x, access="r", shape=("m", k), strides=(width, 1)),
            Operand(name="w", dtype=x, access="r", shape=(n, k), layout=PANELS),
            Operand(name="out", dtype="f32", access="w", shape=("m", n), strides=(n, 1)),
        )
        body = LinearKernel(m="m", n=n, k=k, m_class="large", has_bias=False)
        made.append(KernelSpec(name=f"apart_{width}", symbols=("m",), operands=operands, body=body))
    kernels = build(made, isa)
    given = np.random.default_rng(1).standard_normal((m, k)).astype(NUMPY_DTYPES[x])
    outs = []
    for spec, width in zip(made, (k, k + 16), strict=True):
        rows = np.full((m, width), np.nan, given.dtype)
        rows[:, :k] = given
        outs.append(kernels.run_both(spec.name, lambda r=rows: [r, data, np.zeros((m, n), np.float32)], (m,))[2])
    assert outs[0].tobytes() == outs[1].tobytes()


def test_windows_of_another_type_are_refused() -> None:
    """The images of convolutions have the type of their weights."""
    window = Window(image=(1, 4, 4, 192), size=(4, 4), kernel=(1, 1), strides=(1, 1), padding=(0, 0), dilation=(1, 1))
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=(1, 4, 4, 192), strides=(3072, 768, 192, 1)),
        weight("nf4:block=64")[0],
        Operand(name="out", dtype="f32", access="w", shape=(16, 83), strides=(83, 1)),
    )
    body = LinearKernel(m=16, n=83, k=192, m_class="large", has_bias=False, window=window)
    with pytest.raises(KernelSelectionError, match="windows of f32"):
        emit_kernel(KernelSpec(name="w", symbols=(), operands=operands, body=body), "x86-64-v4")
