"""Linear kernels against NumPy in float64: every format, class of M, element type, odd shapes, epilogues, ISA."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import aligned, gelu, gelu_program, op, residual_program, stored_weight

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.kernels.cpu.emit import header
from qcompiler.kernels.cpu.linear import scratch_bytes
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
V3 = "x86-64-v3"
V4 = "x86-64-v4"
BOUNDS = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}
"""Relative L2 error: fp32 sums, and half an ulp of the result's type."""

MS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 21, 33, 64, 130)
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("nf4", {"block": 64}),
    "nf4_flat": ("nf4", {"block": 64}),
    "nf4_flat4096": ("nf4", {"block": 4096}),
    "int8": ("int8", {}),
    "int4": ("int4", {"group": 32}),
    "int4_zeros": ("int4", {"group": 64, "symmetric": False}),
}
SHAPES = {  # (N, K); the formats with blocks along K need multiples of them
    "nf4": (83, 192), "nf4_flat": (37, 97), "nf4_flat4096": (50, 131), "int8": (83, 101), "int4": (35, 96),
    "int4_zeros": (97, 128), "int4_wide": (533, 544), "panels": (51, 77), "rows": (67, 61), "rows_kn": (40, 45),
    "deep": (35, 1219),
}  # fmt: skip


@dataclass
class Case:
    """One kernel: its spec, the weight's bytes, and the weight as float64."""

    spec: KernelSpec
    weight: Array
    values: Array
    epilogue: str
    has_bias: bool

    @property
    def dtype(self) -> str:
        return self.spec.operands[0].dtype


def weight_operand(kind: str, dtype: Any) -> tuple[Operand, Array, Array]:
    """(operand, bytes, values that the kernel must multiply with, float64)."""
    n, k = SHAPES[kind]
    rng = np.random.default_rng(zlib.crc32(f"{kind} {dtype}".encode()))
    w = rng.standard_normal((n, k)).astype(np.float32) / np.float32(math.sqrt(k))
    plain = {"panels": "layout", "deep": "layout", "rows": "wide", "rows_kn": "columns"}
    stored = plain.get(kind) or FormatRef(*FORMATS[kind.removesuffix("_wide")])
    operand, data, values = stored_weight(w, stored, dtype, "cpu_p16_v2")
    return operand, data, values.astype(np.float64)


def make_case(name: str, kind: str, m_class: Any, dtype: Any, epilogue: str, *, has_bias: bool) -> Case:
    n, k = SHAPES[kind]
    w, data, values = weight_operand(kind, dtype)
    operands = [Operand(name="x", dtype=dtype, access="r", shape=("b*s", k), strides=(k + 5, 1)), w]
    if has_bias:
        operands.append(Operand(name="bias", dtype=dtype, access="r", shape=(n,), strides=(1,)))
    program = None
    if epilogue == "gelu":
        program = gelu_program(dtype)
    elif epilogue == "residual":
        program = residual_program(dtype)
        operands.append(Operand(name="r", dtype=dtype, access="r", shape=("b*s", n), strides=(n, 1)))
        strides: tuple[Any, Any] = (0, 1) if m_class == "large" else (1, 0) if m_class == "2-8" else (0, 2)
        operands.append(Operand(name="s", dtype=dtype, access="r", shape=("b*s", n), strides=strides))
    operands.append(Operand(name="out", dtype=dtype, access="w", shape=("b*s", n), strides=(n + 1, 1)))
    body = LinearKernel(m="b*s", n=n, k=k, m_class=m_class, has_bias=has_bias, epilogue=program)
    spec = KernelSpec(name=name, symbols=("s", "b"), operands=tuple(operands), body=body, serves="layer")
    return Case(spec, data, values, epilogue, has_bias)


def cases(dtypes: Sequence[str], kinds: Sequence[str]) -> Iterator[Case]:
    number = 0
    for dtype in dtypes:
        for kind in kinds:
            for m_class in ("1", "2-8", "large"):
                # Three classes and three epilogues would march in step without the second term.
                epilogue = ("none", "gelu", "residual")[(number + number // 3) % 3]
                name = f"{kind}_{m_class.replace('-', '_')}_{dtype}"
                yield make_case(name, kind, m_class, dtype, epilogue, has_bias=number % 2 == 0)
                number += 1


def check(kernels: Any, case: Case, m: int) -> None:
    body, dtype = case.spec.body, NUMPY_DTYPES[case.dtype]
    assert isinstance(body, LinearKernel)
    n, k = body.n, body.k
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k + 5)).astype(dtype)
    bias, r = rng.standard_normal(n).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    scale = rng.standard_normal(2 * n + m).astype(dtype)
    expected = x[:, :k].astype(np.float64) @ case.values.T
    if case.has_bias:
        expected = expected + bias.astype(np.float64)
    extras = []
    if case.epilogue == "gelu":
        expected = gelu(expected)
    elif case.epilogue == "residual":
        down, right = case.spec.operands[-2].strides
        index = np.arange(m)[:, None] * int(down) + np.arange(n) * int(right)
        expected = expected + r.astype(np.float64) * scale.astype(np.float64)[index]
        extras = [r, scale]
    weight = aligned(case.weight)

    def operands() -> list[Array]:
        out = np.full((m, n + 1), 7, dtype)
        return [x, weight, *([bias] if case.has_bias else []), *extras, out]

    done = kernels.run_both(case.spec.name, operands, symbols=(m, 1))
    out = done[-1].astype(np.float64)
    assert (out[:, n] == 7).all(), "wrote beside its columns"
    error = np.linalg.norm(out[:, :n] - expected) / np.linalg.norm(expected)
    assert error <= BOUNDS[case.dtype], f"{case.spec.name} at M = {m}: relative error {error:.2e}"


KINDS = (*FORMATS, "panels", "rows", "rows_kn", "deep")


@pytest.mark.parametrize("kinds", [KINDS[:5], KINDS[5:]], ids="+".join)
def test_linear_equals_float64_for_every_format_and_m(
    build: Callable[..., Any], isa: str, kinds: tuple[str, ...]
) -> None:
    made = list(cases(["f32"], kinds))
    kernels = build([case.spec for case in made], isa)
    for case in made:
        for m in MS:
            check(kernels, case, m)


WIDE = {"int4_zeros": (530, 704), "nf4_flat": (516, 131), "panels": (533, 1219), "int8": (513, 101)}
"""(N, K) of weights wide enough for passes over rows by columns (columns.h), behind which some columns are left."""


@pytest.mark.parametrize("kind", ["int4_zeros", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*WIDE][1:])])
def test_passes_over_many_rows_equal_float64(
    build: Callable[..., Any], isa: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """9 to 16 rows of codes are two blocks. The last blocks of a pass have 8 or 12 rows, some of which are beyond m."""
    monkeypatch.setitem(SHAPES, kind, WIDE[kind])
    case = make_case(f"wide_{kind}", kind, "large", "f32", "none", has_bias=True)
    kernels = build([case.spec], isa)
    for m in (9, 12, 14, 16, 24, 65, 70, 76, 77, 128, 129, 150, 261):
        check(kernels, case, m)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "k"), [("int4_zeros", 8256), ("panels", 8250), ("nf4", 33024), ("panels", 33001)])
def test_passes_of_fewer_rows_where_rows_are_long(
    build: Callable[..., Any], isa: str, monkeypatch: pytest.MonkeyPatch, kind: str, k: int
) -> None:
    """A pass has 56 rows of 8256 columns, and 16 of 33024."""
    monkeypatch.setitem(SHAPES, kind, (40, k))
    case = make_case(f"long_{kind}_{k}", kind, "large", "f32", "none", has_bias=False)
    kernels = build([case.spec], isa)
    for m in (9, 16, 17, 57, 64):
        check(kernels, case, m)


STRAIGHT: dict[str, dict[str, Any]] = {
    "q4_K": {}, "q5_K": {}, "q6_K": {}, "q3_K": {}, "int8": {}, "int2": {"group": 64}, "tq": {"bits": 4}, "layout": {},
}  # fmt: skip
OFTEN = ("q5_K", "int8")
"""Codes in two planes that are summed before they are scaled, and codes that are not."""


@pytest.mark.parametrize(
    "fmt", [*OFTEN, *(pytest.param(f, marks=pytest.mark.slow) for f in STRAIGHT if f not in OFTEN)]
)
def test_rows_straight_from_codes_equal_float64(
    build: Callable[..., Any], build_folder: Path, isa: str, fmt: str
) -> None:
    """Whether rows are multiplied by one panel, as on a Zen 4, or by two changes no bit, nor does an infinity in one of
    them. "layout": a plain weight in panels."""
    k = 523 if fmt in ("int8", "layout") else 512
    w = np.random.default_rng(3).standard_normal((83, k)).astype(np.float32)
    kind = fmt if fmt == "layout" else FormatRef(fmt, STRAIGHT[fmt])
    stored, data, values = stored_weight(w, kind, "f32", "cpu_p16_v2")
    specs = []
    for m_class in ("2-8", "large"):
        x = Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k + 3, 1))
        out = Operand(name="out", dtype="f32", access="w", shape=("m", 83), strides=(83, 1))
        body = LinearKernel(m="m", n=83, k=k, m_class=m_class, has_bias=False)
        name = f"straight_{m_class[0]}"
        specs.append(KernelSpec(name=name, symbols=("m",), operands=(x, stored, out), body=body))
    kernels, found = build(specs, isa), []
    assert "QG_BROADCASTS" in kernels.source
    harness = sys.modules[type(kernels).__module__]
    for broadcasts in (0, 1):
        source = f"#define QG_BROADCASTS {broadcasts}\n" + kernels.source + harness.PARALLEL
        kernels.library = harness.compile_source(source, isa, build_folder)
        for spec, ms in zip(specs, ((3, 4, 5, 6, 7, 8, 11), (9, 11, 12, 13, 16, 17)), strict=True):
            for m, bad in ((m, bad) for m in ms for bad in (False, True)):
                x = np.random.default_rng(m).standard_normal((m, k + 3)).astype(np.float32)
                x[m - 1, 77] = np.inf if bad else 1
                given = lambda x=x, m=m: [x, aligned(data), np.full((m, 83), np.nan, np.float32)]  # noqa: E731
                got = kernels.run_both(spec.name, given, (m,))[-1]
                wanted = x[: m - bad, :k].astype(np.float64) @ values.astype(np.float64).T
                error = np.linalg.norm(got[: m - bad] - wanted)
                assert error <= BOUNDS["f32"] * np.linalg.norm(wanted), (spec.name, m)
                signs = np.copysign(np.inf, values[:, 77])
                assert not bad or (got[-1] == signs)[values[:, 77] != 0].all()
                found.append(got.tobytes())
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_weight_without_a_number_leaves_other_panels_as_they_are(
    build: Callable[..., Any], build_folder: Path, isa: str
) -> None:
    """A scale that is NaN: neighbours of its row have the bits that they have without it, by one panel and by two."""
    w = np.random.default_rng(3).standard_normal((64, 256)).astype(np.float32)
    stored, data, _ = stored_weight(w, FormatRef("int4", {"group": 32}), "f32", "cpu_p16_v2")
    x = Operand(name="x", dtype="f32", access="r", shape=("m", 256), strides=(256, 1))
    out = Operand(name="out", dtype="f32", access="w", shape=("m", 64), strides=(64, 1))
    body = LinearKernel(m="m", n=64, k=256, m_class="large", has_bias=False)
    spec = KernelSpec(name="nan_scale", symbols=("m",), operands=(x, stored, out), body=body)
    kernels, found = build([spec], isa), dict[int, list[Array]]()
    harness = sys.modules[type(kernels).__module__]
    codes = 64 * 256 // 2
    scales = np.frombuffer(data[codes:].tobytes(), np.float32).copy()
    scales[3] = np.nan
    assert np.isfinite(scales).sum() == scales.size - 1
    damaged = np.concatenate([data[:codes], scales.view(np.uint8)])
    for broadcasts in (0, 1):
        source = f"#define QG_BROADCASTS {broadcasts}\n" + kernels.source + harness.PARALLEL
        kernels.library = harness.compile_source(source, isa, build_folder)
        for m in (8, 9, 13, 16):
            rows = np.random.default_rng(m).standard_normal((m, 256)).astype(np.float32)
            for weight in (data, damaged):
                result = np.empty((m, 64), np.float32)
                kernels.run(spec.name, [rows, aligned(weight), result], (m,))
                found.setdefault(m, []).append(result)
    for whole, bad, whole_of_two, bad_of_two in found.values():
        lost = np.isnan(bad).any(0)
        assert lost.sum() == 1
        np.testing.assert_array_equal(whole, whole_of_two)
        np.testing.assert_array_equal(bad, bad_of_two)
        panel = int(np.argmax(lost)) // 16 * 16
        others = np.delete(np.arange(64), np.arange(panel, panel + 16))
        np.testing.assert_array_equal(bad[:, others], whole[:, others])


def test_linear_of_narrow_types_rounds_once(build: Callable[..., Any], isa: str) -> None:
    made = [*cases(["bf16"], ["int4_zeros", "rows"]), *cases(["f16"], ["panels"])]
    kernels = build([case.spec for case in made], isa)
    for case in made:
        for m in (1, 8, 33):
            check(kernels, case, m)


def small_set() -> list[Case]:
    """Kernels of several tests, compiled together."""
    by_lane = make_case("by_lane", "int8", "large", "f32", "none", has_bias=True)
    ops = (
        op("d", "arith.extf", "acc", dtype="f64"), op("q", "arith.mulf", "d", "d", dtype="f64"),
        op("y", "arith.truncf", "q"),
    )  # fmt: skip
    body = by_lane.spec.body
    assert isinstance(body, LinearKernel)
    program = ScalarProgram(inputs=(("acc", "f32"),), ops=ops, yields=("y",))
    by_lane.spec = msgspec.structs.replace(by_lane.spec, body=msgspec.structs.replace(body, epilogue=program))
    deep = make_case("deep_gelu", "deep", "large", "f32", "gelu", has_bias=True)
    return [deep, by_lane, *cases(["f32"], ["nf4"])]


def test_k_in_several_blocks_keeps_partial_sums_with_epilogue(build: Callable[..., Any], isa: str) -> None:
    made = small_set()
    kernels = build([case.spec for case in made], isa)
    for m in (1, 47, 401):
        check(kernels, made[0], m)


def test_a_row_has_the_same_bits_in_passes_and_in_panels(build: Callable[..., Any], isa: str) -> None:
    """On AVX-512, up to 64 rows of these few panels are multiplied while panels are decoded, more of them afterwards:
    in the same order of k. 9 to 16 rows of codes are summed before their scale, where it serves 32 columns or more."""
    made = small_set()
    kernels = build([case.spec for case in made], isa)
    for case in (made[0], made[-1]):  # K in three blocks, and codes
        n, k = case.values.shape
        rng = np.random.default_rng(5)
        x, bias = rng.standard_normal((65, k + 5)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
        r, scale = rng.standard_normal((65, n)).astype(np.float32), rng.standard_normal(3 * n).astype(np.float32)
        extras = [*([bias] if case.has_bias else []), *([r, scale] if case.epilogue == "residual" else [])]
        found = {}
        for m in (65, 64, 47, 33, 28, 22, 17, *((16, 12, 9) if case is made[0] or isa != V4 else ()), 6):
            operands = [x[:m].copy(), aligned(case.weight), *extras, np.zeros((m, n + 1), np.float32)]
            kernels.run(case.spec.name, operands, symbols=(m, 1))
            found[m] = operands[-1]
            np.testing.assert_array_equal(found[m], found[65][:m], err_msg=f"{case.spec.name} at M = {m}")
        assert found[65][:, :n].any()


@pytest.mark.slow
def test_many_rows_take_several_passes(build: Callable[..., Any], isa: str) -> None:
    """Threads have more than 16 panels each, so that passes of up to 128 rows serve any number of them."""
    case = make_case("wide", "int4_wide", "large", "f32", "gelu", has_bias=True)
    kernels = build([case.spec], isa)
    for m in (65, 127, 128, 130, 257):
        check(kernels, case, m)


def test_no_rows_write_nothing(build: Callable[..., Any], isa: str) -> None:
    made = small_set()
    kernels = build([case.spec for case in made], isa)
    for case in made:
        out = np.full(8, 7, np.float32)
        kernels.run(case.spec.name, [out, aligned(case.weight), *[out] * (len(case.spec.operands) - 2)], (0, 4))
        assert (out == 7).all()


def test_epilogue_without_a_vector_form_runs_by_lane(build: Callable[..., Any], isa: str) -> None:
    """f64 arithmetic has no 16-lane form."""
    made = small_set()
    kernels = build([case.spec for case in made], isa)
    n, k = made[1].values.shape
    x, bias = np.random.default_rng(0).standard_normal((9, k + 5)), np.ones(n)
    out = np.zeros((9, n + 1), np.float32)
    kernels.run("by_lane", [x.astype(np.float32), aligned(made[1].weight), bias.astype(np.float32), out], (9, 1))
    expected = (x[:, :k] @ made[1].values.T + 1) ** 2
    assert np.linalg.norm(out[:, :-1] - expected) <= 2e-6 * np.linalg.norm(expected)


def test_decoded_weights_equal_the_format_to_the_bit(build: Callable[..., Any], isa: str) -> None:
    """x = identity: each output is one weight times 1, plus zeros, so rounding cannot hide a different decode."""
    made = [
        make_case(f"{kind}_{m_class.replace('-', '_')}_{dtype}", kind, m_class, dtype, "none", has_bias=False)
        for kind in FORMATS
        for m_class, dtype in (("1", "f32"), ("large", "f16"))
    ]
    kernels = build([case.spec for case in made], isa)
    for case in made:
        n, k = case.values.shape
        dtype = NUMPY_DTYPES[case.dtype]
        x = np.zeros((k, k + 5), dtype)
        x[:, :k] = np.eye(k)
        out = np.zeros((k, n + 1), dtype)
        kernels.run(case.spec.name, [x, aligned(case.weight), out], (k, 1))
        assert (out[:, :n] == case.values.T.astype(dtype)).all(), case.spec.name


def test_unknown_layouts_types_and_strides_are_refused() -> None:
    case = make_case("refused", "nf4", "large", "f32", "residual", has_bias=False)
    x, w = case.spec.operands[:2]

    def refuse(match: str, *operands: Operand) -> None:
        spec = msgspec.structs.replace(case.spec, operands=(*operands, *case.spec.operands[len(operands) :]))
        with pytest.raises(KernelSelectionError, match=match):
            emit(spec, "x86-64-v4")

    refuse("'cpu_p16_v1' or 'cpu_p16_v2', not 'canonical'", x, msgspec.structs.replace(w, layout="canonical"))
    refuse("'w' is f64, not one of f32, bf16, f16", x, msgspec.structs.replace(w, dtype="f64"))
    refuse("'x' needs unit stride", msgspec.structs.replace(x, strides=(1, 64)))
    refuse("'x' is i64", msgspec.structs.replace(x, dtype="i64"))
    spec = msgspec.structs.replace(case.spec, operands=(x, w, case.spec.operands[-1]))
    with pytest.raises(KernelSelectionError, match="takes 2 extra inputs, 0 are given"):
        emit(spec, "x86-64-v4")
    with pytest.raises(KernelSelectionError, match="no CPU matrix kernels for ISA 'z80'"):
        scratch_bytes(case.spec, "z80")


@pytest.mark.parametrize("factors", ["f32", "bf16"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("fp8_e5m2", "mxfp8"))])
def test_small_floats_are_the_formats(
    build: Callable[..., Any], build_folder: Path, isa: str, fmt: str, factors: DType
) -> None:
    """All numbers of a type, looked up by AVX-512 VBMI where the processor has it, and computed."""
    kind = ml_dtypes.float8_e5m2 if fmt == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
    codes = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    numbers, turn = codes[np.isfinite(codes)], 1
    if fmt == "mxfp8":  # the largest number stands in each block of 32, and so the block's scale is 1
        parts = np.resize(numbers, (9, 31))
        numbers, turn = np.column_stack([parts, np.full(9, numbers.max())]).reshape(-1), 32
    k = len(numbers)
    w = np.stack([np.roll(numbers, turn * row) for row in range(35)])  # absmax is the largest number: a scale of 1
    stored, data, values = stored_weight(w, FormatRef(fmt, {}), factors, "cpu_p16_v2")
    assert set(values[0]) == set(numbers)
    specs = []
    for m_class in ("1", "2-8", "large"):
        x = Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k, 1))
        out = Operand(name="out", dtype="f32", access="w", shape=("m", 35), strides=(35, 1))
        body = LinearKernel(m="m", n=35, k=k, m_class=m_class, has_bias=False)
        name = f"{fmt}_{m_class[0]}"
        specs.append(KernelSpec(name=name, symbols=("m",), operands=(x, stored, out), body=body))
    kernels = build(specs, isa)
    assert "QG_NOT_FASTER" in kernels.source
    harness = sys.modules[type(kernels).__module__]
    for define in ("", "#define QG_NOT_FASTER 1\n"):
        kernels.library = harness.compile_source(define + kernels.source + harness.PARALLEL, isa, build_folder)
        for spec, rows in zip(specs, (1, 7, 33), strict=True):
            for first in range(0, k - rows + 1, rows):
                x = np.eye(k, dtype=np.float32)[first : first + rows]
                got = kernels.run_both(
                    spec.name, lambda x=x: [x, aligned(data), np.empty((len(x), 35), np.float32)], (rows,)
                )
                np.testing.assert_array_equal(got[-1], values.T[first : first + rows])
        damaged = aligned(data)
        damaged[0] = 0x7F  # the first column of row 0 is no number
        for spec, rows in zip(specs, (1, 7, 33), strict=True):
            x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
            outs = [np.empty((rows, 35), np.float32) for _ in range(2)]
            for weight, out in zip((aligned(data), damaged), outs, strict=True):
                kernels.run(spec.name, [x, weight, out], (rows,))
            assert np.isnan(outs[1][:, 0]).all() and np.isfinite(outs[1][:, 1:]).all()
            assert outs[1][:, 16:].tobytes() == outs[0][:, 16:].tobytes()  # other panels


PLANES = {  # formats with codes in two planes: parameters, bytes of a block and where its fp16 scale stands in it
    "q6_K": ({}, 210, 208), "q5_K": ({}, 176, 0), "q3_K": ({}, 110, 108), "q5_0": ({}, 22, 0), "q5_1": ({}, 24, 0),
    "int3": ({"group": 32}, 0, 0), "int3_zeros": ({"group": 64, "symmetric": False}, 0, 0),
    "int3_row": ({"group": "row"}, 0, 0),
}  # fmt: skip


class FewRows(NamedTuple):
    """A weight of 37 rows for one row of x and for two to eight, with scales that are no numbers, zero and small."""

    specs: dict[str, KernelSpec]
    data: Array
    values: Array

    @classmethod
    def of(cls, kind: str, params: dict[str, Any], k: int, size: int, at: int) -> FewRows:
        """`size`: bytes of a block of `kind`, of which those from `at` on are a scale; 0 leaves all scales."""
        n = 37
        fmt = formats.get(kind, **params)
        packed = fmt.encode(np.random.default_rng(0).standard_normal((n, k)).astype(np.float32))
        if size:
            blocks = np.frombuffer(packed.to_bytes(), np.uint8).reshape(n, -1, size).copy()
            for row, scale in ((3, np.inf), (20, np.nan), (21, 0), (36, 6e-8)):
                blocks[row, -1, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
            packed = formats.from_bytes(fmt, n, k, blocks.tobytes())
        with np.errstate(invalid="ignore"):
            values = fmt.decode(packed).astype(np.float64)
        ref, layout = FormatRef(fmt.name, params), "cpu_p16_v2"
        stored = Operand(name="w", dtype="f32", access="r", shape=(n, k), format=ref, layout=layout)
        specs = {}
        for m_class in ("1", "2-8"):
            x = Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k, 1))
            out = Operand(name="out", dtype="f32", access="w", shape=("m", n), strides=(n, 1))
            body = LinearKernel(m="m", n=n, k=k, m_class=m_class, has_bias=False)
            name = f"few_{kind}_{k}_{m_class[0]}"
            specs[m_class] = KernelSpec(name=name, symbols=("m",), operands=(x, stored, out), body=body)
        return cls(specs, aligned(layouts.get(layout).pack(fmt, "f32", n, k, packed.data)), values)

    def products(self, kernels: Any, rows: Iterable[int]) -> dict[tuple[int, str], Array]:
        """The results for numbers, large and small ones, and with one that is none; each compared with fp64."""
        found = {}
        n, k = self.values.shape
        for m in rows:
            name = self.specs["1" if m == 1 else "2-8"].name
            for what in ("numbers", "infinite", "none", "large", "small"):
                x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
                if what in ("infinite", "none"):
                    x[m // 2, 77] = np.inf if what == "infinite" else np.nan
                x *= np.float32({"large": 1e34, "small": 1e-30}.get(what, 1))
                given = lambda x=x, m=m: [x, self.data, np.zeros((m, n), np.float32)]  # noqa: E731
                got = found[m, what] = kernels.run_both(name, given, (m,))[-1]
                with np.errstate(invalid="ignore", over="ignore"):
                    wanted = x.astype(np.float64) @ self.values.T
                    terms = np.abs(x.astype(np.float64)) @ np.abs(self.values.T)
                exact = np.isfinite(wanted)
                np.testing.assert_array_equal(got[~exact], wanted[~exact])
                assert (np.abs(got[exact] - wanted[exact]) <= 1e-6 * terms[exact] + 1e-44).all(), (m, what)
        return found


@pytest.mark.parametrize("kind", ["q6_K", *(pytest.param(k, marks=pytest.mark.slow) for k in PLANES if k != "q6_K")])
def test_codes_in_two_planes(build: Callable[..., Any], build_folder: Path, isa: str, kind: str) -> None:
    """Bytes of both planes by AVX-512 VBMI where the processor has it, and what is computed elsewhere: equal bits, with
    numbers and scales as well that are none, are large or are small."""
    params, size, at = PLANES[kind]
    case = FewRows.of(kind.partition("_")[0] if "int3" in kind else kind, params, 512 if "K" in kind else 320, size, at)
    kernels = build(list(case.specs.values()), isa)
    assert "QG_NOT_FASTER" in kernels.source
    harness = sys.modules[type(kernels).__module__]
    found = []
    for define in ("", "#define QG_NOT_FASTER 1\n") if isa == V4 else ("",):
        kernels.library = harness.compile_source(define + kernels.source + harness.PARALLEL, isa, build_folder)
        found.append(case.products(kernels, (1, 2, 3, 4, 5, 8)))
    for each, result in found[0].items():
        if each[1] != "large":  # where a multiple of a sum is no number, elements are summed
            np.testing.assert_array_equal(result, found[-1][each], f"{each}")


IN_PLACE = {
    "q4_K": ({}, 512, 144, 0), "q2_K": ({}, 512, 84, 80), "q4_1": ({}, 320, 20, 0),
    "int4": ({"group": 32, "symmetric": False}, 352, 0, 0), "int2": ({"group": 64, "symmetric": False}, 320, 0, 0),
    "q5_K": ({}, 512, 176, 0), "q5_1": ({}, 320, 24, 0), "int3": ({"group": 64, "symmetric": False}, 320, 0, 0),
}  # fmt: skip
"""Formats whose codes count from 0: these are multiplied where they stand in their words, or in bytes made of them."""


@pytest.mark.parametrize("isa", [V4])
@pytest.mark.parametrize("kind", ["q4_K", *(pytest.param(k, marks=pytest.mark.slow) for k in IN_PLACE if k != "q4_K")])
def test_codes_where_they_stand(build: Callable[..., Any], build_folder: Path, isa: str, kind: str) -> None:
    """One and two rows of codes of 2 and 4 bits, one row of those in two planes: the bits that lookups give."""
    case = FewRows.of(kind, *IN_PLACE[kind])
    kernels = build(list(case.specs.values()), isa)
    harness = sys.modules[type(kernels).__module__]
    (struct,) = set(re.findall(r"struct (qw_\w+) ", kernels.source))
    form = "qg_alone_of" if kind in PLANES else "qg_faster_of"
    walk = f"typename qg_few_decoder<qg_coded<{struct}>, 1>::type"
    checked = f'static_assert(qg_in_place<typename {form}<{walk}>::type>(), "looked up");\n'
    found = []
    for define in ("#define QG_IN_PLACE 1\n", "#define QG_IN_PLACE 0\n"):
        kernels.library = harness.compile_source(
            define + kernels.source + checked + harness.PARALLEL, isa, build_folder
        )
        found.append(case.products(kernels, (1, 2)))
    for each, result in found[0].items():
        if each[1] != "large":  # where a sum of codes is no number, elements are summed
            np.testing.assert_array_equal(result, found[1][each], f"{each}")


def test_a_row_with_an_infinity_is_what_the_decoded_weights_make_of_it(build: Callable[..., Any], isa: str) -> None:
    """Codes with an offset are summed before it: an infinity times a code of 0 would be no number."""
    found = {}
    rows = (("q4_K", 1), ("q4_K", 2), ("q4_1", 1), ("q5_K", 2), ("q4_K", 5), ("q4_K", 9), ("q4_1", 14))
    for number, (fmt, m) in enumerate(rows):
        w = np.random.default_rng(number).standard_normal((37, 256)).astype(np.float32)
        stored, data, values = stored_weight(w, FormatRef(fmt, {}), "f32", "cpu_p16_v2")
        x = Operand(name="x", dtype="f32", access="r", shape=(m, 256), strides=(256, 1))
        out = Operand(name="out", dtype="f32", access="w", shape=(m, 37), strides=(37, 1))
        body = LinearKernel(m=m, n=37, k=256, m_class="1" if m == 1 else "2-8" if m <= 8 else "large", has_bias=False)
        spec = KernelSpec(name=f"infinite_{fmt}_{m}", symbols=(), operands=(x, stored, out), body=body)
        found[spec.name] = (spec, aligned(data), values.astype(np.float64), m)
    kernels = build([spec for spec, *_ in found.values()], isa)
    for name, (_, data, values, m) in found.items():
        for infinite in (True, False):
            x = np.random.default_rng(1).standard_normal((m, 256)).astype(np.float32)
            given = lambda x=x, data=data, m=m: [x, data, np.zeros((m, 37), np.float32)]  # noqa: E731
            finite, bad = kernels.run_both(name, given)[-1], m // 9 * 8  # of 9 rows and more, one of the second block
            if infinite:
                x[bad, 77] = np.inf
            out = kernels.run_both(name, given)[-1]
            assert np.delete(out, bad, 0).tobytes() == np.delete(finite, bad, 0).tobytes(), "neighbours changed"
            with np.errstate(invalid="ignore"):
                wanted = x.astype(np.float64) @ values.T
            assert np.isinf(wanted[bad]).all() == infinite
            np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8", "int4"])
def test_words_of_codes_do_not_go_through_memory_on_avx2(compile_text: Callable[..., Any], kind: str) -> None:
    """GCC 12 copied the two registers of a word through the stack by halves, which took most of the time of one row."""
    spec = make_case("one", kind, "1", "f32", "none", has_bias=False).spec
    names = ("decode.h", "bf16.h", "gemm.h", "few_rows.h", "gemm_bf16.h")
    text = "\n".join([*(header(name) for name in names), emit(spec, V3)])
    library = compile_text(text, V3, "-O3")._name
    found = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    functions = re.split(r"\n(?=[0-9a-f]+ <)", found.stdout)
    products = [each for each in functions if "qg_few_" in each.partition("\n")[0]]  # some are part of their task
    assert products and "vfmadd" in "".join(products)
    assert not re.search(r"vmovdq[au]\s+%xmm\d+,", "".join(products))
