"""Linears whose factors are rounded to bf16: against float64, by every number of rows, type of x, and processor.

A processor without AVX512-BF16 runs the same kernel in fp32; a definition makes any processor do so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bf16_linears import FEW, PANELS, WEIGHTS, check, in_blocks, rows_of, spec_of, weight
from kernel_cases import aligned

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window
from qcompiler.plan.weights import NUMPY_DTYPES

MS = (1, 2, 3, 4, 5, 6, 8, 9, 14, 64, 65, 131)


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


@pytest.mark.parametrize("isa", ["x86-64-v4"], indirect=True)
@pytest.mark.parametrize("text", ["q4_K", *(pytest.param(t, marks=pytest.mark.slow) for t in ("nf4:block=64", "q6_K"))])
def test_equal_rows_give_equal_bits(build: Callable[..., Any], isa: str, text: str) -> None:
    """Whichever block of nine rows and more they are in."""
    spec, n = spec_of(text, "bf16", "large"), WEIGHTS[text][0]
    kernels = build([spec], isa)
    for m in (9, 12, 21, 50):
        rows, out = np.repeat(rows_of(text, "bf16", 1), m, 0), np.full((m, n), np.nan, np.float32)
        kernels.run(spec.name, [rows, weight(text)[1], out], (m,))
        assert (out == out[0]).all(), m


@pytest.mark.parametrize(("text", "least"), [("q4_K", 48), ("q6_K", 24)])
def test_elements_are_multiplied_where_scales_serve_few_columns(
    build: Callable[..., Any], isa: str, text: str, least: int
) -> None:
    """A scale multiplies sums of fewer rows: codes that are exact in bf16 give elements as they are. (Tiles have
    another rule: test_bf16_tiles.py.)"""
    blocks = isa == "x86-64-v4" and in_blocks()  # others round no element
    n, k = WEIGHTS[text]
    _, data, w = weight(text)
    spec = spec_of(text, "bf16", "large", k)
    kernels = build([spec], isa)
    for m in (least - 1, least):
        rows = np.eye(k)[:m].astype(NUMPY_DTYPES["bf16"])
        out = kernels.run_both(spec.name, lambda r=rows, m=m: [r, data, np.zeros((m, n), np.float32)], (m,))[2]
        rounded = w.T[:m].astype(NUMPY_DTYPES["bf16"]).astype(np.float32)
        assert (out == rounded).all() == (m == least and blocks), m


@pytest.mark.parametrize("isa", ["x86-64-v4"], indirect=True)
@pytest.mark.parametrize(
    "text", ["q4_K", *(pytest.param(t, marks=pytest.mark.slow) for t in ("q2_K", "mxfp8", "int8"))]
)
def test_a_class_for_few_rows_takes_many(build: Callable[..., Any], isa: str, text: str) -> None:
    """As many as elements are multiplied from, in the other class."""
    kernels = build([spec_of(text, "bf16", m_class) for m_class in ("1", "2-8")], isa)
    for m_class, m in (("1", 3), ("2-8", 9), ("2-8", 53)):
        check(kernels, text, "bf16", m_class, m)


@pytest.mark.parametrize("isa", ["x86-64-v4"], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        "q4_K",
        *(pytest.param(t, marks=pytest.mark.slow) for t in ("nf4:block=64", "q6_K", "int8", "mxfp8", "tq:bits=3")),
    ],
)
def test_how_rows_are_read_changes_no_bit(build: Callable[..., Any], isa: str, build_folder: Path, text: str) -> None:
    """Each product reads its number of x from memory (a Zen 4), or one that is broadcast serves two panels."""
    specs = [spec_of(text, "bf16", m_class) for m_class in ("2-8", "large")]
    kernels, found = build(specs, isa), list[list[bytes]]()
    harness, n = sys.modules[type(kernels).__module__], WEIGHTS[text][0]
    for broadcasts in (0, 1):
        source = f"#define QG_BROADCASTS {broadcasts}\n" + kernels.source + harness.PARALLEL
        kernels.library = harness.compile_source(source, isa, build_folder)
        found.append([])
        for spec, m in ((spec, m) for spec, ms in zip(specs, ((3, 5, 8), (9, 20, 53)), strict=True) for m in ms):
            rows, out = rows_of(text, "bf16", m), np.full((m, n), np.nan, np.float32)
            kernels.run(spec.name, [rows, weight(text)[1], out], (m,))
            assert np.isfinite(out).all()
            found[-1].append(out.tobytes())
    assert "QG_BROADCASTS" in kernels.source
    assert found[0] == found[1]


@pytest.mark.parametrize("m", [5, *(pytest.param(m, marks=pytest.mark.slow) for m in (40, 70))])
@pytest.mark.parametrize(
    "text",
    ["q4_K", *(pytest.param(text, marks=pytest.mark.slow) for text in ("nf4:block=64", "int8", "q6_K", "plain"))],
)
def test_numbers_that_are_none_stay_in_their_rows_of_a_block(
    build: Callable[..., Any], isa: str, text: str, m: int
) -> None:
    """The first row has an infinity, the last one a NaN, and those between are as they were."""
    n, (_, data, w) = WEIGHTS[text][0], weight(text)
    spec = spec_of(text, "bf16", "large")
    kernels, rows = build([spec], isa), rows_of(text, "bf16", m)

    def run() -> Any:
        return kernels.run_both(spec.name, lambda: [rows, data, np.zeros((m, n), np.float32)], (m,))[2]

    plain = run()
    rows[0, 5], rows[m - 1, 7] = np.inf, np.nan
    out, there = run(), w[:, 5] != 0
    assert out[1 : m - 1].tobytes() == plain[1 : m - 1].tobytes()
    assert (out[0][there] == np.sign(w[there, 5]) * np.inf).all() and np.isnan(out[0][~there]).all()
    assert np.isnan(out[m - 1]).all()


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
    window = Window(image=(1, 4, 4, 704), size=(4, 4), kernel=(1, 1), strides=(1, 1), padding=(0, 0), dilation=(1, 1))
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=(1, 4, 4, 704), strides=(11264, 2816, 704, 1)),
        weight("nf4:block=64")[0],
        Operand(name="out", dtype="f32", access="w", shape=(16, 83), strides=(83, 1)),
    )
    body = LinearKernel(m=16, n=83, k=704, m_class="large", has_bias=False, window=window)
    with pytest.raises(KernelSelectionError, match="windows of f32"):
        emit_kernel(KernelSpec(name="w", symbols=(), operands=operands, body=body), "x86-64-v4")
