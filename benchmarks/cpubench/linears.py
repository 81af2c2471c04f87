"""KernelSpecs of linears in one format and one kind of arithmetic, and the operands that they read."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qcompiler import formats
from qcompiler.formats.base import Format
from qcompiler.formats.int8_rows import quantise, row_bytes
from qcompiler.formats.integer_product import integer_product
from qcompiler.kernels import layouts
from qcompiler.kernels.select import weight_layout
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.encoder import encode

from .probes import aligned

Arithmetic = Literal["exact", "bf16", "int8"]
SUFFIX: dict[Arithmetic, str] = {"exact": "", "bf16": " bf16", "int8": " a8"}
KIND: dict[Arithmetic, str] = {"exact": "fp32", "bf16": "bf16", "int8": "int8"}
"""The name of the arithmetic's limit (qcompiler/runtime/limits.py)."""

OLDER = "cpu_p16_v1"
"""The layout in which every format was before."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Product:
    """A weight in a format (None: plain), and how it is multiplied: "exact" in fp32, "bf16" with x, bias and result in
    bf16, "int8" its codes with rows of int8."""

    label: str
    format: str | None = None
    params: dict[str, Any] = field(default_factory=dict, hash=False)
    arithmetic: Arithmetic = "exact"
    older: bool = False

    @property
    def name(self) -> str:
        return "v1 " * self.older + self.label + SUFFIX[self.arithmetic]

    @property
    def dtype(self) -> DType:
        return "bf16" if self.arithmetic == "bf16" else "f32"

    @property
    def ref(self) -> FormatRef | None:
        return None if self.format is None else FormatRef(name=self.format, params=self.params)

    @property
    def fmt(self) -> Format | None:
        return None if self.format is None else formats.get(self.format, **self.params)

    @property
    def layout(self) -> str:
        return OLDER if self.older else weight_layout("cpu", self.ref)

    @property
    def codes(self) -> bool:
        return self.arithmetic == "int8"

    def refused(self) -> str | None:
        """Why this cannot be: plain weights and some formats have no products of codes."""
        if not self.codes:
            return None
        if self.fmt is None:
            return "plain weights have no codes"
        product = integer_product(self.fmt)
        return product if isinstance(product, str) else None


def m_class(m: int) -> Any:
    return "1" if m == 1 else "2-8" if m <= 8 else "large"


def rows_spec(k: int) -> KernelSpec:
    """Makes rows of int8 of x."""
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=("m", k), strides=(k, 1)),
        Operand(name="out", dtype="i8", access="w", shape=("m", row_bytes(k)), strides=(row_bytes(k), 1)),
    )
    body = QuantizeRowsKernel(rows="m", cols=k, kind="token")
    return KernelSpec(name=f"rows_{k}", symbols=("m",), operands=operands, body=body)


def linear_spec(product: Product, m: int, n: int, k: int) -> KernelSpec:
    """x, w, bias, out; the number of rows is the symbol m."""
    dtype = product.dtype
    operands = (
        Operand(name="x", dtype="i8", access="r", shape=("m", row_bytes(k)), strides=(row_bytes(k), 1))
        if product.codes
        else Operand(name="x", dtype=dtype, access="r", shape=("m", k), strides=(k, 1)),
        Operand(name="w", dtype=dtype, access="r", shape=(n, k), format=product.ref, layout=product.layout),
        Operand(name="bias", dtype=dtype, access="r", shape=(n,), strides=(1,)),
        Operand(name="out", dtype=dtype, access="w", shape=("m", n), strides=(n, 1)),
    )
    body = LinearKernel(m="m", n=n, k=k, m_class=m_class(m), has_bias=True, codes=product.codes)
    name = re.sub(r"\W", "_", f"{product.name}_{n}_{k}_{m_class(m)}")
    return KernelSpec(name=name, symbols=("m",), operands=operands, body=body)


@functools.lru_cache(maxsize=2)
def weight(n: int, k: int) -> Array:
    """fp32 (n, k), always the same for a shape."""
    return np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)


@functools.lru_cache(maxsize=2)
def numbers(m: int, n: int, k: int) -> tuple[Array, Array, Array]:
    """(x, bias, their product with the weight) in fp32."""
    rng = np.random.default_rng(1)
    x, bias = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    return x, bias, x @ weight(n, k).T + bias


def packed(product: Product, n: int, k: int) -> Array:
    """The bytes that the kernel reads of a weight."""
    return _packed(product.format, tuple(product.params.items()), product.dtype, product.layout, n, k)


@functools.lru_cache(maxsize=64)
def _packed(
    format: str | None, params: tuple[tuple[str, Any], ...], dtype: DType, layout: str, n: int, k: int
) -> Array:
    w, fmt = weight(n, k), None if format is None else formats.get(format, **dict(params))
    canonical = w.astype(NUMPY_DTYPES[dtype]).view(np.uint8).reshape(-1) if fmt is None else encode(fmt, w).data
    return aligned(layouts.get(layout).pack(fmt, dtype, n, k, canonical))


def operands(product: Product, x: Array, data: Array, bias: Array) -> list[Array]:
    """x as the product reads it, the packed weight, bias, and room for the result."""
    kind = NUMPY_DTYPES[product.dtype]
    given = quantise(x, "token", 0.0, None) if product.codes else x.astype(kind)
    return [given, data, bias.astype(kind), np.zeros((len(x), len(bias)), kind)]


def specs_of(products: Sequence[Product], ms: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[KernelSpec]:
    """All kernels that these need."""
    made = [linear_spec(product, m, n, k) for n, k in shapes for m in ms for product in products]
    return made + [rows_spec(k) for k in sorted({k for _, k in shapes}) if any(each.codes for each in products)]
