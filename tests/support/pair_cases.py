"""Linears that combine pairs of rows, each beside the plain linear whose sums it combines: the bits must be the same.

    for case in cases("cpu_p16_pairs_v1", …):
        case.paired, case.plain        two specs, over the same weight in two layouts
        case.combined(sums, extra)     what the first must give, from the sums of the second

The epilogue is max(sum, 0) * other + extra in fp32, which NumPy computes with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from qcompiler import formats
from qcompiler.formats import int8_rows
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.pairs import PAIR_LAYOUTS

Array = Any
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
FORMATS: dict[str, dict[str, Any] | None] = {
    "plain": None, "nf4": {"block": 64}, "int4": {"group": 32}, "int8": {}, "q4_K": {}, "q6_K": {},
    "tq": {"bits": 3},
}  # fmt: skip
COLS = {"plain": 77, "nf4": 192, "int4": 96, "int8": 101, "q4_K": 512, "q6_K": 256, "tq": 256}


def combine(dtype: Any) -> ScalarProgram:
    ops = [
        ScalarOp(result="c", op="arith.constant", dtype="f32", value=(0.0).hex()),
        ScalarOp(result="r", op="arith.maximumf", dtype="f32", args=("g", "c")),
        ScalarOp(result="p", op="arith.mulf", dtype="f32", args=("r", "u")),
        ScalarOp(result="y", op="arith.addf", dtype="f32", args=("p", "e")),
    ]
    if dtype != "f32":
        ops.append(ScalarOp(result="z", op="arith.truncf", dtype=dtype, args=("y",)))
    inputs = (("g", "f32"), ("u", "f32"), ("e", "f32"))
    return ScalarProgram(inputs=inputs, ops=tuple(ops), yields=("y" if dtype == "f32" else "z",))


@dataclass
class Case:
    """`columns` of the result from 2 * columns rows of w; `dtype` is that of x, the weight and the result."""

    paired: KernelSpec
    plain: KernelSpec
    paired_weight: Array
    plain_weight: Array
    columns: int
    dtype: str
    codes: bool

    def inputs(self, m: int) -> tuple[Array, Array | None, Array]:
        """(x, bias or None, extra) for m rows."""
        rng = np.random.default_rng(m)
        x = rng.standard_normal((m, self.cols)).astype(DTYPES[self.dtype])
        if self.codes:
            x = int8_rows.quantise(x, "token", 0.0, None)
        bias = rng.standard_normal(2 * self.columns).astype(np.float32) if self.has_bias else None
        return x, bias, rng.standard_normal((m, self.columns)).astype(np.float32)

    @property
    def cols(self) -> int:
        return int(self.paired.operands[1].shape[1])

    @property
    def has_bias(self) -> bool:
        return bool(getattr(self.paired.body, "has_bias", False))

    def given(self, m: int) -> tuple[list[Array], list[Array]]:
        """Operands of the two kernels, the result last."""
        x, bias, extra = self.inputs(m)
        biases = [] if bias is None else [bias]
        out = np.zeros((m, self.columns + 3), DTYPES[self.dtype])[:, : self.columns]
        sums = np.zeros((m, 2 * self.columns), np.float32)
        return [x, self.paired_weight, *biases, extra, out], [x, self.plain_weight, *biases, sums]

    def combined(self, sums: Array, m: int) -> Array:
        gate, up = np.split(sums, 2, axis=1)
        return (np.maximum(gate, 0) * up + self.inputs(m)[2]).astype(DTYPES[self.dtype])


def check(kernels: Any, case: Case, m: int) -> None:
    """The bits of the plain kernel's sums, combined; nothing beside the result is written."""
    symbols, (paired, plain) = (m,) if case.paired.symbols else (), case.given(m)
    sums = kernels.run_both(case.plain.name, lambda: [*plain[:-1], plain[-1].copy()], symbols)[-1]
    wide = np.zeros((m, case.columns + 3), DTYPES[case.dtype])
    found = kernels.run_both(case.paired.name, lambda: [*paired[:-1], wide.copy()], symbols)[-1]
    assert found[:, : case.columns].tobytes() == case.combined(sums, m).tobytes()
    assert not found[:, case.columns :].any(), "it writes beside its result"


def make(
    layout: str, fmt_name: str, dtype: str, m_class: Any, *, columns: int, has_bias: bool, m: Any = "m",
    codes: bool = False,
) -> Case:  # fmt: skip
    """One case; the weight is drawn anew from its format and number of columns."""
    rows, cols, params = 2 * columns, COLS[fmt_name], FORMATS[fmt_name]
    w = np.random.default_rng(columns).standard_normal((rows, cols)).astype(np.float32) / np.float32(cols**0.5)
    fmt = None if params is None else formats.get(fmt_name, **params)
    canonical = w.astype(DTYPES[dtype]).view(np.uint8).reshape(-1) if fmt is None else fmt.encode(w).data
    ref = None if params is None else FormatRef(name=fmt_name, params=params)

    def spec(kind: str, layout: str, out: str, width: int, epilogue: ScalarProgram | None) -> KernelSpec:
        k = int8_rows.row_bytes(cols) if codes else cols
        operands = [
            Operand(name="x", dtype="i8" if codes else dtype, access="r", shape=(m, k), strides=(k, 1)),
            Operand(name="w", dtype=dtype, access="r", shape=(rows, cols), format=ref, layout=layout),
        ]
        if has_bias:
            operands.append(Operand(name="bias", dtype="f32", access="r", shape=(rows,), strides=(1,)))
        if epilogue is not None:
            operands.append(Operand(name="e", dtype="f32", access="r", shape=(m, width), strides=(width, 1)))
        gap = 0 if epilogue is None else 3
        operands.append(Operand(name="out", dtype=out, access="w", shape=(m, width), strides=(width + gap, 1)))
        body = LinearKernel(m=m, n=rows, k=cols, m_class=m_class, has_bias=has_bias, epilogue=epilogue, codes=codes,
                            pairs=epilogue is not None)  # fmt: skip
        name = f"{kind}_{fmt_name}_{dtype}_{str(m_class).replace('-', '_')}_{columns}_{m}{'_codes' * codes}"
        symbols = (m,) if isinstance(m, str) else ()
        return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body)

    base = PAIR_LAYOUTS[layout]
    weights = [layouts.get(name).pack(fmt, dtype, rows, cols, canonical) for name in (layout, base)]
    if fmt is None:
        weights = [each.view(DTYPES[dtype]) for each in weights]
    return Case(
        spec("paired", layout, dtype, columns, combine(dtype)), spec("plain", base, "f32", rows, None), *weights,
        columns, dtype, codes,
    )  # fmt: skip


def cases(layout: str, dtypes: Iterable[str], names: Iterable[str], classes: Iterable[str]) -> Iterator[Case]:
    """Every format and class; sizes of whole panels, of half ones and odd ones in turn, every second with biases."""
    number = 0
    for dtype in dtypes:
        for name in names:
            for m_class in classes:
                columns = (40, 37, 24, 3)[number % 4]
                yield make(layout, name, dtype, m_class, columns=columns, has_bias=number % 3 == 0)
                number += 1
