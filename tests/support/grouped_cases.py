"""Kernels of experts for tests: specs, weights, and the experts' matrices."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from kernel_cases import Array, aligned, stored_weight

from qcompiler.config import parse_format
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

PANELS = "cpu_p16_v2"


@dataclass
class Case:
    """One kernel: its spec, the weight as the kernel reads it, and the experts' matrices as float64 (E, N, K)."""

    spec: KernelSpec
    weight: Array
    values: Array

    @property
    def body(self) -> GroupedLinearKernel:
        assert isinstance(self.spec.body, GroupedLinearKernel)
        return self.spec.body


def make_case(
    weight: str,
    experts: int,
    n: int,
    k: int,
    *,
    dtype: DType = "f32",
    repeat: int = 1,
    index: DType = "i64",
    factors: DType | None = None,
) -> Case:
    """`weight`: the text of a format, "panels", "rows" or "columns". `factors`: its type, if x has another."""
    name = f"g{zlib.crc32(f'{weight} {experts} {n} {k} {dtype} {repeat} {index} {factors}'.encode()):08x}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    rows = experts * n
    w = (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
    how = {"panels": "layout", "rows": "rows", "columns": "columns"}.get(weight) or parse_format(weight)
    operand, data, values = stored_weight(w, how, factors or dtype, PANELS)
    pairs = f"{repeat}*t" if repeat > 1 else "t"
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=("t", k), strides=(k + 5, 1)),
        operand,
        Operand(name="index", dtype=index, access="r", shape=(pairs,), strides=(1 if index == "i64" else 3,)),
        Operand(name="out", dtype=dtype, access="w", shape=(pairs, n), strides=(n + 1, 1)),
    )
    body = GroupedLinearKernel(rows="t", repeat=repeat, experts=experts, n=n, k=k)
    return Case(
        KernelSpec(name=name, symbols=("t",), operands=operands, body=body),
        aligned(data),
        values.astype(np.float64).reshape(experts, n, k),
    )
