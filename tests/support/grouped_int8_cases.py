"""Cases of int8 rows times the codes of chosen experts, on every target, and the bits that they must give."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qcompiler import formats
from qcompiler.config import parse_format, resolve_format
from qcompiler.formats import int8_rows, integer_product
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

Array = np.ndarray
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Case:
    """`rows` is a number, or the symbol "t". The result has a column more than it needs, which nothing may write."""

    format: str
    experts: int
    n: int
    k: int
    rows: int | str = "t"
    repeat: int = 1
    index: DType = "i64"
    dtype: DType = "f32"
    layout: str = ""

    @property
    def name(self) -> str:
        return f"i{zlib.crc32(repr(self).encode()):08x}"

    @property
    def packed(self) -> formats.PackedTensor:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        weight = rng.standard_normal((self.experts * self.n, self.k)).astype(np.float32)
        weight[0] = np.where(np.arange(self.k) % 2, 1.0, -1.0)  # codes at both ends
        return resolve_format(self.format).encode(weight)

    @property
    def weight(self) -> Array:
        """The bytes that the kernel reads."""
        packed = self.packed
        return layouts.get(self.layout).pack(packed.format, "f32", packed.rows, packed.cols, packed.data)

    @property
    def spec(self) -> KernelSpec:
        width = int8_rows.row_bytes(self.k)
        pairs = self.rows * self.repeat if isinstance(self.rows, int) else f"{self.repeat}*{self.rows}"
        operands = (
            Operand(name="x", dtype="i8", access="r", shape=(self.rows, width), strides=(width + 16, 1)),
            Operand(name="w", dtype="f32", access="r", shape=(self.experts * self.n, self.k),
                    format=parse_format(self.format), layout=self.layout),
            Operand(name="index", dtype=self.index, access="r", shape=(pairs,),
                    strides=(1 if self.index == "i64" else 3,)),
            Operand(name="out", dtype=self.dtype, access="w", shape=(pairs, self.n), strides=(self.n + 1, 1)),
        )  # fmt: skip
        body = GroupedLinearKernel(
            rows=self.rows, repeat=self.repeat, experts=self.experts, n=self.n, k=self.k, codes=True
        )
        symbols = (self.rows,) if isinstance(self.rows, str) else ()
        return KernelSpec(name=self.name, symbols=symbols, operands=operands, body=body)

    def operands(self, chosen: Sequence[int]) -> list[Array]:
        """x, w, the experts of the pairs, and memory for the result, full of sevens."""
        count, width = len(chosen), int8_rows.row_bytes(self.k)
        rng = np.random.default_rng(count)
        x = rng.standard_normal((count // self.repeat, self.k)).astype(np.float32)
        x[0, 0] = 40.0
        if len(x) > 2:
            x[1], x[2, self.k // 2] = 0.0, np.nan
        rows = np.full((len(x), width + 16), 99, np.int8)
        rows[:, :width] = int8_rows.quantise(x, "token", 0.0, None)
        step = 1 if self.index == "i64" else 3
        index = np.full(count * step, -(2**30), np.int64 if self.index == "i64" else np.int32)
        index[::step] = chosen
        return [rows, self.weight, index, np.full((count, self.n + 1), 7, DTYPES[self.dtype])]

    def expected(self, rows: Array, chosen: Sequence[int]) -> Array:
        """The result (pairs, n), by formats/integer_product.py. NaN where no expert is."""
        packed, width = self.packed, int8_rows.row_bytes(self.k)
        rows = np.ascontiguousarray(rows[:, :width])
        codes, scales = int8_rows.codes_of(rows, self.k), int8_rows.scales_of(rows, self.k)
        every = integer_product.multiply(codes, scales, packed).reshape(len(rows), self.experts, self.n)
        sums = np.full((len(chosen), self.n), np.nan, np.float32)
        for pair, expert in enumerate(chosen):
            if 0 <= expert < self.experts:
                sums[pair] = every[pair // self.repeat, expert]
        return sums.astype(DTYPES[self.dtype])
