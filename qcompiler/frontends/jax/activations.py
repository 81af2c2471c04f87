"""Inputs of linears with quantised weights in int8, as ops of the IR: the recipes of models of torch.

    %r = qc.quantize_rows %x {kind = "token"};  %v = qc.dequantize_rows %r;  qc.linear %v, %w

Where the weight's format has no product of integers, loops compute the same values (frontends/quantise/activations.py).
`qc.quantize_rows` and formats/int8_rows.py define them; oracle.py computes them in JAX.
"""

from __future__ import annotations

from collections.abc import Callable

from qcompiler.config import Activations
from qcompiler.formats.int8_rows import clip_factors, row_bytes
from qcompiler.formats.llm_int8 import SMALLEST_ABSMAX
from qcompiler.frontends.jax.scope import Scalars, Scope, V
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim

CODE = 127.0

Input = Callable[[Scope, V], tuple[V, V | None]]
"""(x as its linear reads it, or the columns that a second linear of the same weight reads), of x (…, K)."""


def as_integers(kind: Activations, clip: float = 0.0) -> Input:
    """Rows of int8 and their values, for a weight that is multiplied as integers. `clip` is the magnitude that becomes
    127, of kind "tensor"."""

    def rows(s: Scope, x: V) -> tuple[V, V | None]:
        shape, dtype = shape_of(x.type), tensor_dtype(x.type)
        columns = alone = None
        if kind.kind == "outliers":
            columns = _outlier_columns(s, x, kind.threshold)
            alone = s.pointwise([columns, x], lambda m, c, v: m.select(m.nonzero(c), v, m.const(0)), compute=dtype,
                                result=dtype, shape=shape)  # fmt: skip
        depth = row_bytes(int(shape[-1]))
        value = {"token": 0.0, "tensor": clip, "outliers": kind.threshold}[kind.kind]
        codes = qc.QuantizeRowsOp(x, columns, types.tensor([*shape[:-1], depth], "i8"), kind=kind.kind, value=value)
        return s.insert(qc.DequantizeRowsOp(s.insert(codes), types.tensor(shape, dtype))), alone

    return rows


def as_floats(kind: Activations, clip: float = 0.0) -> Input:
    """The same values of x, computed in fp32 and rounded once to x's type."""

    def rounded(s: Scope, x: V) -> tuple[V, V | None]:
        shape, dtype = shape_of(x.type), tensor_dtype(x.type)
        wide = s.cast(x, "f32")
        if kind.kind == "tensor":
            return s.cast(_tensor(s, wide, clip), dtype), None
        out = _token(s, wide, shape) if kind.kind == "token" else _outliers(s, wide, shape, kind.threshold)
        return s.cast(out, dtype), None

    return rounded


def _largest(s: Scope, x: V, shape: tuple[Dim, ...]) -> V:
    last = len(shape) - 1
    found = s.fold([x], shape, (last,), "max", compute="f32", term=lambda m, v: m.abs(v))
    return s.keep_axes(found, shape, (last,))


def _token(s: Scope, x: V, shape: tuple[Dim, ...]) -> V:
    """The codes of the format int8 for each row: a scale of 0 is replaced by 1."""

    def body(m: Scalars, v: V, largest: V) -> V:
        exact = m.div(largest, m.const(CODE))
        scale = m.select(m.compare("gt", exact, m.const(0)), exact, m.const(1))
        return m.mul(_code(m, m.div(v, scale)), scale)

    return s.pointwise([x, _largest(s, x, shape)], body, compute="f32", result="f32", shape=shape)


def _tensor(s: Scope, x: V, clip: float) -> V:
    """One scale for all: codes of ``x * fp32(127 / clip)``; inputs that were always 0 become 0."""
    factor, scale = (float(each) for each in clip_factors(clip))

    def body(m: Scalars, v: V) -> V:
        return m.mul(_code(m, m.mul(v, m.const(factor))), m.const(scale))

    return s.pointwise([x], body, compute="f32", result="f32")


def _outliers(s: Scope, x: V, shape: tuple[Dim, ...], threshold: float) -> V:
    """LLM.int8: codes of what is below the threshold; the columns of outliers as they are."""
    columns = _outlier_columns(s, x, threshold)

    def below(m: Scalars, v: V) -> V:
        return m.select(m.compare("ge", m.abs(v), m.const(threshold)), m.const(0), v)

    kept = s.pointwise([x], below, compute="f32", result="f32")

    def body(m: Scalars, column: V, v: V, k: V, largest: V) -> V:
        tiny = m.compare("lt", largest, m.const(float(SMALLEST_ABSMAX)))
        inverse = m.select(tiny, m.const(0), m.div(m.const(CODE), largest))
        decoded = m.mul(_code(m, m.mul(k, inverse)), m.div(largest, m.const(CODE)))
        return m.select(m.nonzero(column), v, decoded)

    inputs = [columns, x, kept, _largest(s, kept, shape)]
    return s.pointwise(inputs, body, compute="f32", result="f32", shape=shape)


def _code(m: Scalars, scaled: V) -> V:
    return m.maximum(m.minimum(m.call("roundeven", scaled), m.const(CODE)), m.const(-CODE))


def _outlier_columns(s: Scope, x: V, threshold: float) -> V:
    """i1 (1, …, K): the columns in which any row has an outlier."""
    shape = shape_of(x.type)
    over = s.pointwise([x], lambda m, v: m.compare("ge", m.abs(v), m.const(threshold)), compute="f32", result="i1")
    leading = tuple(range(len(shape) - 1))
    return s.keep_axes(s.reduce(over, leading, "or", compute="i1"), shape, leading)
