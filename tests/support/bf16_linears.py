"""Linears of bf16 factors for tests: formats, specs, and the comparison with float64."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_cases import aligned

from qcompiler import formats
from qcompiler.config import parse_format
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.isa import cpuinfo_flags

Array = npt.NDArray[Any]
PANELS = "cpu_p16_v2"
ROUNDED = 2.0**-8
"""Half an ulp of bf16, twice: a factor may be an element, or its code."""

WEIGHTS = {  # a format, or None for plain values: (N, K)
    "nf4:block=64": (83, 704), "int4:group=32": (40, 96), "q4_K": (35, 1280), "q2_K": (33, 256), "q6_K": (20, 768),
    "q3_K": (19, 512), "q5_K": (18, 256), "int3:group=32": (21, 96), "q5_0": (18, 96), "int8:symmetric=False": (18, 8),
    "int8": (37, 1101), "nf4:block=128": (37, 100), "fp8_e4m3": (19, 77), "mxfp8": (21, 1056),
    "q8_0": (18, 64), "nvfp4": (19, 1072), "tq:bits=3": (17, 512), "plain": (51, 1077),
}  # fmt: skip
"""Some have more columns than blocks take at a time (bf16_blocks.h: 512)."""
FEW = ("nf4:block=64", "q4_K", "q6_K", "int8", "int8:symmetric=False", "fp8_e4m3", "plain")
"""Those of the short run: one of each way through the codes."""


def in_blocks() -> bool:
    """Whether kernels multiply rows of bf16 in blocks (bf16_blocks.h) here. A test's context allows no tiles."""
    return "avx512_bf16" in (cpuinfo_flags(Path("/proc/cpuinfo")) or ())


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
