"""Products of codes and rows of int8 on the CPU, to the bit what formats/integer_product.py says, on every ISA."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import same_bits

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import int8_rows, integer_product
from qcompiler.formats.integer_product import IntegerProduct
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.runtime.amx import INT8_FLAGS, tiles_refused

DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
WEIGHTS: dict[str, tuple[str, dict[str, Any], int, int, str]] = {  # format, N, K, the result's type
    "int8": ("int8", {}, 83, 101, "f32"),
    "int8_groups": ("int8", {"group": 64}, 33, 192, "f32"),
    "int8_zeros": ("int8", {"symmetric": False}, 18, 64, "f32"),
    "int8_odd": ("int8", {"symmetric": False}, 20, 101, "f32"),
    "int4": ("int4", {"group": 32}, 35, 96, "f32"),
    "int4_zeros": ("int4", {"group": 64, "symmetric": False}, 97, 128, "bf16"),
    "llm_int8": ("llm_int8", {}, 20, 70, "f16"),
    "q4_K": ("q4_K", {}, 17, 512, "f32"),
    "q8_0": ("q8_0", {}, 16, 64, "f32"),
    "int2": ("int2", {"group": 32}, 33, 96, "f32"),
    "int3": ("int3", {"group": 64}, 17, 192, "f32"),
    "int3_zeros": ("int3", {"group": 32, "symmetric": False}, 34, 64, "f32"),
    "q5_0": ("q5_0", {}, 16, 96, "f32"),
    "q5_1": ("q5_1", {}, 33, 64, "f32"),
    "q2_K": ("q2_K", {}, 17, 512, "f32"),
    "q3_K": ("q3_K", {}, 17, 512, "f32"),
    "q5_K": ("q5_K", {}, 33, 256, "f32"),
    "q6_K": ("q6_K", {}, 33, 512, "f32"),
    "tq1_0": ("tq1_0", {}, 17, 256, "f32"),
    "tq2_0": ("tq2_0", {}, 17, 512, "f32"),
    "iq4_nl": ("iq4_nl", {}, 33, 96, "f32"),
    "iq4_xs": ("iq4_xs", {}, 17, 256, "f32"),
    "iq3_xxs": ("iq3_xxs", {}, 17, 256, "f32"),
    "iq2_xs": ("iq2_xs", {}, 17, 512, "f32"),
    "iq1_m": ("iq1_m", {}, 17, 256, "f32"),
    "iq1_s": ("iq1_s", {}, 17, 256, "f32"),
    "mxfp4": ("mxfp4", {}, 33, 96, "f32"),
    "mxfp4_ggml": ("mxfp4_ggml", {}, 17, 64, "f32"),
    "nvfp4": ("nvfp4", {}, 33, 96, "f32"),
    # More columns than a piece of tiles (int8_tiles.h), whole steps of 64 and not, an odd number of groups.
    "int8_wide": ("int8", {}, 40, 1101, "f32"),
    "int8_wide_zeros": ("int8", {"symmetric": False}, 35, 702, "f32"),
    "int8_wide_groups": ("int8", {"group": 128}, 33, 640, "f32"),
    "int4_row": ("int4", {"group": "row"}, 35, 1056, "f32"),
    "int4_wide": ("int4", {"group": 32}, 50, 608, "f32"),
    "int4_wide_zeros": ("int4", {"group": 128, "symmetric": False}, 33, 896, "f32"),
    "q6_K_wide": ("q6_K", {}, 40, 768, "f32"),
}
FAST = ("int8", "int4_zeros", "q4_K", "q6_K", "mxfp4")
MS = (1, 2, 7, 8, 16, 24, 33, 64, 137)  # blocks of eight, seven and 32 rows; 137: more than the rows of one task
COLS = (1, 31, 64, 101, 300)
PAIRS, TILES = 1, 2
"""abi.h's QC_INT8_PAIRS and QC_INT8_TILES."""


def packed_weight(case: str) -> formats.PackedTensor:
    name, params, n, k, _ = WEIGHTS[case]
    rng = np.random.default_rng(len(case))
    weight = rng.standard_normal((n, k)).astype(np.float32)
    weight[0] = np.where(np.arange(k) % 2, 1.0, -1.0)  # codes at both ends
    return formats.get(name, **params).encode(weight)


def linear_spec(case: str, layout: str = "cpu_p16_v2") -> KernelSpec:
    """x, w, bias, out with a symbolic number of rows."""
    name, params, n, k, dtype = WEIGHTS[case]
    width = int8_rows.row_bytes(k)
    operands = (
        Operand(name="x", dtype="i8", access="r", shape=("m", width), strides=(width, 1)),
        Operand(name="w", dtype="f32", access="r", shape=(n, k), format=FormatRef(name=name, params=params),
                layout=layout),
        Operand(name="bias", dtype="f32", access="r", shape=(n,), strides=(1,)),
        Operand(name="out", dtype=dtype, access="w", shape=("m", n), strides=(n, 1)),  # type: ignore[arg-type]
    )  # fmt: skip
    body = LinearKernel(m="m", n=n, k=k, m_class="large", has_bias=True, codes=True)
    return KernelSpec(name=f"l_{case}", symbols=("m",), operands=operands, body=body)


def rows_spec(kind: Any, dtype: Any, cols: int, value: float) -> KernelSpec:
    width = int8_rows.row_bytes(cols)
    columns = Operand(name="columns", dtype="i1", access="r", shape=(cols,), strides=(1,))
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=("m", cols), strides=(cols + 3, 1)),
        *([columns] if kind == "outliers" else []),
        Operand(name="out", dtype="i8", access="w", shape=("m", width), strides=(width, 1)),
    )
    body = QuantizeRowsKernel(rows="m", cols=cols, kind=kind, value=value)
    return KernelSpec(name=f"q_{kind}_{dtype}_{cols}", symbols=("m",), operands=operands, body=body)


ROWS = [
    *(rows_spec("token", "f32", cols, 0.0) for cols in COLS),
    *(rows_spec(kind, dtype, 101, value) for kind, value in (("tensor", 2.5), ("outliers", 1.5)) for dtype in DTYPES),
    rows_spec("tensor", "f32", 33, 0.0),
    rows_spec("token", "bf16", 70, 0.0),
]


def activations(m: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of many magnitudes; a row of zeros, one whose codes are all at the ends, ties, tiny numbers, a NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)).astype(np.float32) * np.logspace(-3, 1, m, dtype=np.float32)[:, None]
    if m >= 7:
        x[1] = 0
        x[2] = np.where(np.arange(k) % 3, 5.0, -5.0)
        x[3] = (np.arange(k) % 5 - 2) / 2
        x[3, 0] = 127
        x[4] = 1e-41
        x[5, k // 2] = np.nan
        x[6, 0] = np.inf
    if m >= 8:
        x[7] = np.where(np.arange(k) % 2, 190, -190) * 2.0**-149  # whose scale is 2^-149: codes are cut to 127
    return x


def expected(case: str, packed: formats.PackedTensor, rows: np.ndarray, bias: np.ndarray) -> np.ndarray:
    codes, scales = int8_rows.codes_of(rows, packed.cols), int8_rows.scales_of(rows, packed.cols)
    return (integer_product.multiply(codes, scales, packed) + bias).astype(DTYPES[WEIGHTS[case][4]])


def check_products(kernels: Any, case: str) -> None:
    packed, (_, _, n, k, dtype) = packed_weight(case), WEIGHTS[case]
    data = layouts.get("cpu_p16_v2").pack(packed.format, "f32", n, k, packed.data)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for m in MS:
        rows = int8_rows.quantise(activations(m, k, m), "token", 0.0, None)
        given, out = (rows, data, bias), np.zeros((m, n), DTYPES[dtype])
        operands = kernels.run_both(f"l_{case}", lambda g=given, o=out: [*g, o.copy()], [m])
        assert same_bits(operands[-1], expected(case, packed, rows, bias)), (case, m)


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in WEIGHTS if each not in FAST)]
)
def test_products_have_the_bits_of_their_definition(
    build: Callable[[Sequence[KernelSpec], str], Any], isa: str, case: str
) -> None:
    together = FAST if case in FAST else [each for each in WEIGHTS if each not in FAST]
    check_products(build([linear_spec(each) for each in together], isa), case)


@pytest.mark.slow
def test_without_vnni_the_bits_are_the_same(build: Any, isa: str) -> None:
    """What processors without VNNI run, and what the context may ask for."""
    kernels = build([linear_spec(case) for case in FAST], isa)
    kernels.int8_units = PAIRS
    for case in FAST:
        check_products(kernels, case)


def test_rare_engines_have_the_bits_of_the_definition(int8_engine: Callable[..., Any]) -> None:
    check_engine(int8_engine([linear_spec("int4_zeros")]), "int4_zeros")


@pytest.mark.slow
@pytest.mark.parametrize("case", WEIGHTS)
def test_rare_engines_have_the_bits_of_every_format(int8_engine: Callable[..., Any], case: str) -> None:
    check_engine(int8_engine([linear_spec(each) for each in WEIGHTS]), case)


def check_engine(kernels: Any, case: str) -> None:
    """As `check_products`. On the model of tiles also: they are used, as the manual says, and released."""
    if "QC_AMX_MODEL 1" not in kernels.source:
        check_products(kernels, case)
        return
    errors, dots, configured, released = (
        ctypes.c_int64.in_dll(kernels.library, f"amx_{name}") for name in ("errors", "dots", "configured", "released")
    )
    before = dots.value
    check_products(kernels, case)
    assert errors.value == 0 and dots.value > before and configured.value == released.value


@pytest.mark.skipif(tiles_refused(INT8_FLAGS) is not None, reason=str(tiles_refused(INT8_FLAGS)))
def test_tiles_survive_signals_and_other_processes(build: Any) -> None:
    """Processes that share the processors and are interrupted by signals in kernels: the system saves their tiles."""
    kernels, case = build([linear_spec("int4_wide")], "x86-64-v4"), "int4_wide"
    kernels.int8_units = TILES
    packed, (_, _, n, k, dtype) = packed_weight(case), WEIGHTS[case]
    data = layouts.get("cpu_p16_v2").pack(packed.format, "f32", n, k, packed.data)
    bias, rows = np.zeros(n, np.float32), int8_rows.quantise(activations(500, k), "token", 0.0, None)
    wanted = expected(case, packed, rows, bias)

    def differs() -> int:
        seen: list[int] = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        wrong = 0
        while len(seen) < 100:
            out = np.zeros((500, n), DTYPES[dtype])
            kernels.run(f"l_{case}", [rows, data, bias, out], [500], threads=2)
            wrong += not same_bits(out, wanted)
        return min(wrong, 100)

    children = []
    for _ in range(2 * (os.cpu_count() or 1)):
        child = os.fork()
        if child == 0:
            code = 101
            try:
                code = differs()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)


@pytest.mark.slow
def test_the_build_for_avx512_has_the_instructions_of_tiles(build: Any) -> None:
    found = instructions(build([linear_spec("int4")], "x86-64-v4").library._name)
    for name in ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"):
        assert f"\t{name}" in found
    # W behind X, the sums last, as AT&T's syntax has operands
    assert re.search(r"tdpbssd %tmm6,%tmm4,%tmm0\b", found) and re.search(r"tdpbssd %tmm7,%tmm5,%tmm3\b", found)
    unsigned = instructions(build([linear_spec("int8_zeros")], "x86-64-v4").library._name)  # codes of 0 … 255
    assert re.search(r"tdpbsud %tmm6,%tmm4,%tmm0\b", unsigned) and "tdpbssd" not in unsigned


@pytest.mark.slow
def test_the_build_for_avx2_has_the_product_in_its_vex_encoding(build: Any) -> None:
    kernels = build([linear_spec("int4")], "x86-64-v3")
    found = instructions(kernels.library._name)
    assert "{vex} vpdpbusd" in found and "%zmm" not in found
    assert "vpmaddwd" in found  # for processors without AVX-VNNI


def instructions(library: str) -> str:
    """The disassembled text of a shared library."""
    return subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout


def test_rows_have_the_bits_of_their_definition(build: Any, isa: str) -> None:
    kernels = build(ROWS, isa)
    for spec in ROWS:
        body = spec.body
        assert isinstance(body, QuantizeRowsKernel)
        for m in (1, 9):
            held = np.zeros((m, body.cols + 3), DTYPES[spec.operands[0].dtype])
            held[:, : body.cols] = activations(m, body.cols, m).astype(held.dtype)
            x = held[:, : body.cols]
            columns = np.arange(body.cols) % 7 == 3
            middle = [columns] if body.kind == "outliers" else []
            out = np.full((m, int8_rows.row_bytes(body.cols)), 0x55, np.int8)
            operands = kernels.run_both(spec.name, lambda g=(held, *middle), o=out: [*g, o.copy()], [m])
            want = int8_rows.quantise(x, body.kind, body.value, columns if middle else None)
            assert operands[-1].tobytes() == want.tobytes(), (spec.name, m)


def test_the_definition_is_the_product_of_the_decoded_values() -> None:
    for case in WEIGHTS:
        packed, k = packed_weight(case), WEIGHTS[case][3]
        rows = int8_rows.quantise(activations(5, k), "token", 0.0, None)
        codes, scales = int8_rows.codes_of(rows, k), int8_rows.scales_of(rows, k)
        found = integer_product.multiply(codes, scales, packed)
        np.testing.assert_array_equal(integer_product.multiply(codes, scales, packed, (3, 11)), found[:, 3:11])
        exact = int8_rows.dequantise(rows, k).astype(np.float64) @ packed.format.decode(packed).T.astype(np.float64)
        assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()


def test_sums_of_wide_rows_stay_in_32_bits() -> None:
    """Codes at the ends over 200,000 columns: groups end after 65,536 of them."""
    fmt, k = formats.get("int8"), 200_000
    packed = fmt.encode(np.ones((2, k), np.float32))
    rows = int8_rows.quantise(np.ones((1, k), np.float32), "token", 0.0, None)
    found = integer_product.multiply(int8_rows.codes_of(rows, k), int8_rows.scales_of(rows, k), packed)
    assert np.abs(found - k).max() < 1e-6 * k
    product = integer_product.integer_product(fmt)
    assert isinstance(product, IntegerProduct) and product.columns(k) * 255 * 127 < 1 << 31


def test_formats_without_an_integer_product_say_why() -> None:
    reasons = {name: integer_product.integer_product(formats.get(name)) for name in formats.names()}
    assert "table" in str(reasons["nf4"]) and "table" in str(reasons["fp4"])
    served = {name for name, found in reasons.items() if isinstance(found, IntegerProduct)}
    assert set(reasons) - served == {"nf4", "fp4", "tq", "fp8_e4m3", "fp8_e5m2", "mxfp8"}
    spec = linear_spec("int8", layout="canonical")
    with pytest.raises(KernelSelectionError, match="'cpu_p16_v1' or 'cpu_p16_v2'"):
        emit(spec, "x86-64-v4")
