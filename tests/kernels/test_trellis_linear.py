"""Linears with weights in `tq`: exact sums, equal for every instruction set and with AVX-512 VNNI and without it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

BITS = (2, 3, 4)
N, K = 35, 768  # a last panel of three rows; three blocks
CLASSES = {"1": 1, "2-8": 7, "large": 20}


def packed_weight(bits: int, k: int) -> formats.PackedTensor:
    """Random codes, in which every window of 12 bits is nearly sure to occur; scales are powers of two."""
    fmt, rng = formats.get("tq", bits=bits), np.random.default_rng(bits)
    packed = fmt.allocate(N, k)
    codes = rng.integers(0, 1 << bits, (N * k // 256, 256)).astype(np.uint8)
    scales = np.exp2(rng.integers(-2, 3, (N * k // 256, 1))).astype(np.float16)
    fmt.store(packed, 0, {"codes": codes, "scales": scales})
    return packed


def spec_of(bits: int, m_class: Any, k: int = K) -> KernelSpec:
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k, 1)),
        Operand(name="w", dtype="f32", access="r", shape=(N, k), format=FormatRef(name="tq", params={"bits": bits}),
                layout="cpu_p16_v2"),
        Operand(name="out", dtype="f32", access="w", shape=("m", N), strides=(N, 1)),
    )  # fmt: skip
    body = LinearKernel(m="m", n=N, k=k, m_class=m_class, has_bias=False)
    return KernelSpec(name=f"tq{bits}_{k}_{m_class.replace('-', '_')}", symbols=("m",), operands=operands, body=body)


def check(kernels: Any, bits: int, m_class: str, k: int = K) -> None:
    """Rows of -1, 0 and 1: partial sums are below 2^24 units of 2^-9 (1280 values of at most 2^13), exact in fp32."""
    packed, m = packed_weight(bits, k), CLASSES[m_class]
    data = layouts.get("cpu_p16_v2").pack(packed.format, "f32", N, k, packed.data)
    x = np.random.default_rng(7).integers(-1, 2, (m, k)).astype(np.float32)
    expected = x.astype(np.float64) @ packed.format.decode(packed).astype(np.float64).T
    found = kernels.run_both(spec_of(bits, m_class, k).name, lambda: [x, data, np.zeros((m, N), np.float32)], [m])[-1]
    np.testing.assert_array_equal(found, expected)


def test_one_row_is_exact_in_4_bits(build: Callable[[Sequence[KernelSpec], str], Any], harness: Any) -> None:
    widest = next(name for name in reversed(harness.ISAS) if harness.runnable(name))
    check(build([spec_of(4, "1")], widest), 4, "1")


@pytest.mark.slow
def test_sums_are_exact(build: Callable[[Sequence[KernelSpec], str], Any], isa: str) -> None:
    kernels = build([spec_of(bits, m_class) for bits in BITS for m_class in CLASSES], isa)
    for bits in BITS:
        for m_class in CLASSES:
            check(kernels, bits, m_class)


@pytest.mark.slow
def test_blocks_of_k_begin_where_a_step_of_the_decoder_does(build: Any, isa: str) -> None:
    """1280 columns are three blocks, which were of 432: a step takes 32 columns in 2 and 3 bits."""
    kernels = build([spec_of(bits, "large", 1280) for bits in (2, 3)], isa)
    for bits in (2, 3):
        check(kernels, bits, "large", 1280)


@pytest.mark.slow
def test_sums_are_exact_without_vnni(build: Any, build_folder: Path, harness: Any) -> None:
    """What AVX-512 runs on processors without VNNI; the other ISAs have no such choice."""
    if not harness.runnable("x86-64-v4"):
        pytest.skip("this CPU cannot run x86-64-v4")
    kernels = build([spec_of(bits, "1") for bits in BITS], "x86-64-v4")
    assert ("QG_NOT_FASTER" in kernels.source) and ("vpdpbusd" in kernels.source)
    source = "#define QG_NOT_FASTER 1\n" + kernels.source + harness.PARALLEL
    kernels.library = harness.compile_source(source, "x86-64-v4", build_folder)
    for bits in BITS:
        check(kernels, bits, "1")


@pytest.mark.slow
def test_a_window_of_3_bits_takes_few_instructions(build: Any, build_folder: Path, harness: Any) -> None:
    """2.1 to 2.2 shifts and logical instructions with AVX-512, where two sequences share what they can; 3 otherwise."""
    source = build([spec_of(3, "1")], "x86-64-v4").source + harness.PARALLEL
    library = harness.compile_source(source, "x86-64-v4", build_folder, "-O3")._name
    found = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    products = [each for each in re.split(r"\n(?=[0-9a-f]+ <)", found.stdout) if "vpdpbusd" in each]
    assert products
    for text in products:
        cut = re.findall(r"\b(?:vps[lr]l[wd]|vpand|vpor|vpternlog|vpshufb)\w*\s.*zmm", text)
        assert len(cut) <= 2.3 * len(re.findall(r"\bvpmulld\s.*zmm", text))
