"""Kernels of experts that combine their sums, with weights, inputs, and what float64 says of them.

for case in cases("cpu_p16_v2"):           # or cuda_t16_v1; codes(…): x has rows of int8
    case.spec, case.weight, case.inputs(chosen), case.expected(chosen)
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import grouped_cases
import numpy as np
from kernel_cases import Array, stored_weight

from qcompiler.config import parse_format, resolve_format
from qcompiler.formats import PackedTensor, int8_rows, integer_product
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

BOUNDS = {"f32": 3e-6, "bf16": 8e-3, "f16": 1e-3}


def _op(result: str, name: str, *args: str, dtype: DType = "f32") -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args)


def _rounded(inputs: list[tuple[str, DType]], ops: list[ScalarOp], dtype: DType) -> ScalarProgram:
    """A program whose last value is rounded to `dtype`."""
    if dtype != "f32":
        ops = [*ops, _op("rounded", "arith.truncf", ops[-1].result, dtype=dtype)]
    return ScalarProgram(inputs=tuple(inputs), ops=tuple(ops), yields=(ops[-1].result,))


def _wide(name: str, dtype: DType) -> tuple[list[ScalarOp], str]:
    return ([], name) if dtype == "f32" else ([_op(f"{name}w", "arith.extf", name)], f"{name}w")


@dataclass
class Case(grouped_cases.Case):
    """One kernel that combines its sums, with known numbers of rows."""

    @property
    def pairs(self) -> int:
        assert isinstance(self.body.rows, int)
        return self.body.rows * self.body.repeat

    def inputs(self, chosen: list[int]) -> list[Array]:
        """All operands in order; the result is full of sevens."""
        rng, found = np.random.default_rng(len(chosen)), list[Array]()
        for operand in self.spec.operands:
            shape = [int(size) for size in operand.shape]
            dtype = NUMPY_DTYPES[operand.dtype]
            if operand.name == "w":
                found.append(self.weight)
            elif operand.name == "index":
                found.append(np.array(chosen, dtype))
            elif operand.name == "out":
                found.append(np.full(shape, 7, dtype))
            else:
                found.append(rng.standard_normal(shape).astype(dtype))
        return found

    def expected(self, chosen: list[int], inputs: list[Array]) -> Array:
        body, sums = self.body, self.sums(chosen, inputs[0])
        if body.pairs:
            gate, up = np.split(sums, 2, axis=1)
            return gate / (1 + np.exp(-gate)) * up
        weights = inputs[3].astype(np.float64)
        total = np.einsum("rtn,rt->rn", sums.reshape(-1, body.top, body.n), weights)
        return total + inputs[4].astype(np.float64)

    def sums(self, chosen: list[int], x: Array) -> Array:
        """Of the pairs, (pairs, n); NaN where no expert is."""
        body, every = self.body, self.every(x)
        sums = np.full((len(chosen), body.n), np.nan, every.dtype)
        for pair, expert in enumerate(chosen):
            if 0 <= expert < body.experts:
                sums[pair] = every[pair // body.repeat, expert]
        return sums

    def every(self, x: Array) -> Array:
        """The products of all rows with all experts, (rows, experts, n)."""
        rows = x.astype(NUMPY_DTYPES[self.spec.operands[1].dtype]).astype(np.float64)
        return np.einsum("enk,rk->ren", self.values.astype(np.float64), rows)


@dataclass
class CodesCase(Case):
    """The same of rows of int8, whose products are those of `packed`."""

    packed: PackedTensor

    def inputs(self, chosen: list[int]) -> list[Array]:
        found, k = super().inputs(chosen), self.body.k
        rng = np.random.default_rng(len(chosen))
        x = rng.standard_normal((len(found[0]), k)).astype(np.float32)
        found[0] = int8_rows.quantise(x, "token", 0.0, None)
        return found

    def every(self, x: Array) -> Array:
        """In fp32, to the bit (formats/integer_product.py)."""
        codes, scales = int8_rows.codes_of(x, self.body.k), int8_rows.scales_of(x, self.body.k)
        return integer_product.multiply(codes, scales, self.packed).reshape(len(x), self.body.experts, self.body.n)


def make(
    layout: str, weight: str, experts: int, n: int, k: int, *, rows: int, repeat: int = 1, top: int = 0,
    dtype: DType = "f32", index: DType = "i64", factors: DType | None = None, codes: bool = False,
) -> Case:  # fmt: skip
    """`weight`: the text of a format, or "panels". Without `top` a SwiGLU of halves, else a weighted sum and a
    residual. `factors`: the type of the weight, to which x is rounded, if it is not x's. `codes`: rows of int8."""
    text = f"{layout} {weight} {experts} {n} {k} {rows} {repeat} {top} {dtype} {factors}{' codes' * codes}"
    name = f"c{zlib.crc32(text.encode()):08x}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    w = (rng.standard_normal((experts * n, k)) / np.sqrt(k)).astype(np.float32)
    kind = "layout" if weight == "panels" else parse_format(weight)
    operand, data, values = stored_weight(w, kind, factors or dtype, layout)
    pairs = rows * repeat
    width = int8_rows.row_bytes(k) if codes else k
    x = Operand(name="x", dtype="i8" if codes else dtype, access="r", shape=(rows, width), strides=(width, 1))
    chosen = Operand(name="index", dtype=index, access="r", shape=(pairs,), strides=(1,))
    if top:
        shape = (pairs // top, n)
        more = (
            Operand(name="weights", dtype="f32", access="r", shape=(pairs // top, top), strides=(top, 1)),
            Operand(name="extra0", dtype=dtype, access="r", shape=shape, strides=(n, 1)),
        )
        mix = ScalarProgram(
            inputs=(("s", "f32"), ("w", "f32"), ("t", "f32")),
            ops=(_op("m", "arith.mulf", "s", "w"), _op("a", "arith.addf", "t", "m")), yields=("a",),
        )  # fmt: skip
        widen, extra = _wide("e", dtype)
        epilogue = _rounded([("t", "f32"), ("e", dtype)], [*widen, _op("a", "arith.addf", "t", extra)], dtype)
    else:
        shape, more, mix = (pairs, n // 2), (), None
        one = ScalarOp(result="one", op="arith.constant", dtype="f32", value=(1.0).hex())
        silu = [
            _op("n", "arith.negf", "g"), _op("p", "math.exp", "n"), one, _op("d", "arith.addf", "one", "p"),
            _op("s", "arith.divf", "g", "d"), _op("y", "arith.mulf", "s", "u"),
        ]  # fmt: skip
        epilogue = _rounded([("g", "f32"), ("u", "f32")], silu, dtype)
    out = Operand(name="out", dtype=dtype, access="w", shape=shape, strides=(shape[1], 1))
    body = GroupedLinearKernel(
        rows=rows, repeat=repeat, experts=experts, n=n, k=k, pairs=not top, top=top, mix=mix, epilogue=epilogue,
        codes=codes,
    )  # fmt: skip
    spec = KernelSpec(name=name, symbols=(), operands=(x, operand, chosen, *more, out), body=body)
    if codes:
        return CodesCase(spec, data, values, resolve_format(weight).encode(w))
    return Case(spec, data.view(values.dtype) if weight == "panels" else data, values.reshape(experts, n, k))


def cases(layout: str) -> list[Case]:
    """Both forms in several formats, from one token to eight rows, from one expert of a row to eight."""
    return [
        make(layout, "nf4", 5, 64, 97, rows=1, repeat=2), make(layout, "int8", 4, 96, 160, rows=3, repeat=2),
        make(layout, "q4_K", 8, 32, 256, rows=8, repeat=8, dtype="bf16"), make(layout, "panels", 60, 32, 77, rows=2),
        make(layout, "nf4", 5, 48, 97, rows=2, top=2), make(layout, "int8", 4, 16, 160, rows=6, top=2, index="i32"),
        make(layout, "q4_K", 8, 160, 256, rows=8, top=8, dtype="bf16"),
        make(layout, "panels", 2, 32, 77, rows=3, top=1), make(layout, "q8_0", 60, 32, 64, rows=4, top=4),
        *wide(layout, codes=False),
    ]  # fmt: skip


def wide(layout: str, *, codes: bool) -> list[Case]:
    """More panels than a thread of the CPU multiplies in one turn: halves of 33 and 65, experts of 33 and 66."""
    of = functools.partial(make, layout, "int8", 2, k=33, codes=codes)
    return [
        of(n=1056, rows=1, repeat=2), of(n=2080, rows=3), of(n=528, rows=2, top=2), of(n=1056, rows=2, top=1),
    ]  # fmt: skip


def codes(layout: str) -> list[Case]:
    """The same of rows of int8: weights with one group and several, nested ones, codes in planes and lists."""
    of = functools.partial(make, layout, codes=True)
    return [
        of("int8", 5, 64, 101, rows=1, repeat=2), of("q4_K", 4, 96, 512, rows=3, repeat=2),
        of("int4", 8, 32, 256, rows=8, repeat=8, dtype="bf16"), of("q6_K", 2, 32, 256, rows=7),
        of("int8", 5, 48, 101, rows=2, top=2), of("q6_K", 4, 16, 256, rows=6, top=2, index="i32"),
        of("q4_K", 8, 160, 256, rows=8, top=8, dtype="bf16"), of("mxfp4", 60, 32, 96, rows=4, top=4),
        of("int8:symmetric=False", 12, 32, 64, rows=9, top=9), of("q4_K", 2, 16, 2304, rows=3, top=3),
        of("int8", 2, 16, 64, rows=5, top=5), *wide(layout, codes=True),
    ]  # fmt: skip


def routings(case: Case) -> list[list[int]]:
    """Any experts; all on the last; and some that leave others without rows."""
    last, rng = case.body.experts - 1, np.random.default_rng(case.pairs)
    return [
        [int(e) for e in rng.integers(0, last + 1, case.pairs)],
        [last] * case.pairs,
        [int(e) for e in rng.choice([1, last], case.pairs)],
    ]


def check(case: Case, result: Array, expected: Array) -> None:
    """The result is float64's, up to the bound of its type, row by row."""
    error = np.linalg.norm(result.astype(np.float64) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    bound = BOUNDS[case.spec.operands[-1].dtype]
    assert error.max() <= bound, f"{case.spec.operands[1].format}, top {case.body.top}: {error.max():.2e} in a row"
