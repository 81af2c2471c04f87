"""Sparse memory, kernels on it, and weights of more than 2**31 elements of which only the last rows are there."""

from __future__ import annotations

import math
import mmap
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.layouts.base import views
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8}

ROWS, COLS, PANEL = (1 << 19) + 16, 4100, 16
"""2.15e9 elements. The last 16 rows begin behind element 2**31, and in 16-bit elements behind byte 2**32. Blocks of 64
straddle rows, and yet one begins with the last 16 rows, since 2**19 * 4100 is a multiple of 64."""
FAR_STEP = 1 << 26
"""Elements between rows of x and of the result: row 32 lies at 2**31."""


def sparse(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros whose pages come into being when they are written. The system is not asked whether there is room for all
    of them, so that memory smaller than the array will do."""
    kind = np.dtype(DTYPES[dtype])
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, math.prod(shape) * kind.itemsize, flags=flags)
    return np.frombuffer(memory, kind).reshape(shape)


@dataclass(frozen=True)
class FarWeight:
    """A weight of COLS columns whose last 16 rows are `values` and whose other bytes are zero, in a layout's bytes:
    `nbytes` in all, `pieces` (offset, bytes) where they are not zero."""

    operand: Operand
    nbytes: int
    pieces: tuple[tuple[int, npt.NDArray[np.uint8]], ...]
    values: npt.NDArray[np.float64]

    def bytes(self) -> npt.NDArray[np.uint8]:
        data = sparse((self.nbytes,), "u8")
        for offset, piece in self.pieces:
            data[offset : offset + piece.nbytes] = piece
        return data


def far_weight(kind: str, dtype: Any, layout: str, all_rows: int = ROWS) -> FarWeight:
    """`kind` is "plain" or a format's name. Packed values are those that a kernel decodes, rounded to `dtype`."""
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    rows = (rng.standard_normal((PANEL, COLS)) / math.sqrt(COLS)).astype(np.float32)
    how, fmt = layouts.get(layout), None if kind == "plain" else formats.get(kind)
    if fmt is None:
        plain = rows.astype(DTYPES[dtype])
        canonical, values = plain.view(np.uint8).reshape(-1), plain.astype(np.float64)
    else:
        packed = fmt.encode(rows)
        canonical, values = packed.data, fmt.decode(packed).astype(DTYPES[dtype]).astype(np.float64)
    few = how.sections(fmt, dtype, PANEL, COLS)
    last = views(how.pack(fmt, dtype, PANEL, COLS, canonical), few)
    pieces = []
    for section in how.sections(fmt, dtype, all_rows, COLS):
        piece = np.ascontiguousarray(last[section.name]).reshape(-1).view(np.uint8)
        assert section.nbytes * PANEL == piece.nbytes * all_rows, "a panel's share of each section is the same"
        pieces.append((section.offset + section.nbytes - piece.nbytes, piece))
    ref = None if fmt is None else FormatRef(name=fmt.name, params=dict(fmt.params))
    operand = Operand(name="w", dtype=dtype, access="r", shape=(all_rows, COLS), format=ref, layout=layout)
    return FarWeight(operand, how.nbytes(fmt, dtype, all_rows, COLS), tuple(pieces), values)


def linear(name: str, w: Operand, m: int, m_class: Any, *, step: int | None = None) -> KernelSpec:
    """x (m, K) times w; rows of x and of the result lie `step` elements apart (default: one behind the other)."""
    n, k = (int(size) for size in w.shape)
    x = Operand(name="x", dtype=w.dtype, access="r", shape=(m, k), strides=(step or k, 1))
    out = Operand(name="out", dtype=w.dtype, access="w", shape=(m, n), strides=(step or n, 1))
    body = LinearKernel(m=m, n=n, k=k, m_class=m_class, has_bias=False)
    return KernelSpec(name=name, symbols=(), operands=(x, w, out), body=body, serves="qc.linear at lm_head")


def close(got: Array, expected: Array, dtype: str) -> None:
    """Relative L2 error: fp32 sums, and half an ulp of the result's type."""
    error = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error <= {"f32": 2e-6, "bf16": 3e-3}[dtype], error


@pytest.fixture(scope="session")
def far() -> Any:
    """This module: what the tests of this folder share."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def best_isa() -> str:
    """The widest instruction set that this machine runs: large tensors take a while."""
    module = load("tests/kernels/conftest.py")
    return str([isa for isa in module.ISAS if module.runnable(isa)][-1])
