"""Elementwise operators of StableHLO as loops. 16-bit floats compute in fp32 and round once, as XLA does on CPUs.

Unsigned integers have the bits of signed ones: addition, multiplication and bitwise operators are the same, and
comparisons, divisions, right shifts and conversions go through a wider type or flip the sign bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import Compare, cast
from qcompiler.frontends.jax.graph import Node, Value
from qcompiler.frontends.jax.scope import FLOATS, Result, Scalars, Scope, V, lowers, opmath, splat
from qcompiler.ir import build, types
from qcompiler.ir.types import tensor_dtype
from qcompiler.plan.kernel import DType

Body = Callable[..., V]
BITS: dict[str, int] = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "ui8": 8}

# --- floats: one function each ----------------------------------------------------------------------------------------

_FUNCTIONS = {
    "exponential": "exp", "exponential_minus_one": "expm1", "log": "log", "log_plus_one": "log1p", "sine": "sin",
    "cosine": "cos", "tan": "tan", "tanh": "tanh", "sqrt": "sqrt", "rsqrt": "rsqrt", "ceil": "ceil", "floor": "floor",
    "round_nearest_even": "roundeven",
}  # fmt: skip
_CHLO = {
    "erf": "erf", "erfc": "erfc", "tan": "tan", "sinh": "sinh", "cosh": "cosh", "asin": "asin", "acos": "acos",
    "atan": "atan", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
}  # fmt: skip


def _function(name: str) -> Callable[[Scope, Node], Result]:
    def builder(s: Scope, node: Node) -> Result:
        return s.elementwise(node, lambda m, x: m.call(name, x))

    return builder


for _op, _name in _FUNCTIONS.items():
    lowers(f"stablehlo.{_op}")(_function(_name))
for _op, _name in _CHLO.items():
    lowers(f"chlo.{_op}")(_function(_name))


@lowers("stablehlo.logistic")
def _logistic(s: Scope, node: Node) -> Result:
    return s.elementwise(node, lambda m, x: m.div(m.const(1), m.add(m.const(1), m.call("exp", m.neg(x)))))


@lowers("stablehlo.cbrt")
def _cbrt(s: Scope, node: Node) -> Result:
    def body(m: Scalars, x: V) -> V:
        return m.call("copysign", m.call("powf", m.abs(x), m.const(1 / 3)), x)

    return s.elementwise(node, body)


@lowers("stablehlo.round_nearest_afz")
def _round(s: Scope, node: Node) -> Result:
    """Halves away from zero: truncate, then add one where the rest is at least a half."""

    def body(m: Scalars, x: V) -> V:
        whole = m.call("trunc", x)
        rest = m.abs(m.sub(x, whole))
        up = m.select(m.compare("ge", rest, m.const(0.5)), m.const(1), m.const(0))
        return m.call("copysign", m.add(m.abs(whole), up), x)

    return s.elementwise(node, body)


@lowers("stablehlo.is_finite")
def _is_finite(s: Scope, node: Node) -> Result:
    value, compute = node.operands[0], opmath(node.operands[0].dtype)

    def body(inner: Builder, elements: Sequence[SSAValue]) -> SSAValue:
        m = Scalars(inner, compute)
        return m.compare("lt", m.abs(cast(inner, elements[0], compute)), m.const(math.inf))

    return build.pointwise(s.builder, [s.value(value)], value.shape, "i1", body)


@lowers("stablehlo.power")
def _power(s: Scope, node: Node) -> Result:
    """A known small whole exponent is repeated multiplication, as XLA and JAX's integer_pow compute it."""
    x, y = node.operands
    exponent = splat(y)
    if exponent is not None and float(exponent).is_integer() and 0 <= exponent <= 8:
        whole = int(exponent)
        return s.pointwise([s.value(x)], lambda m, a: m.power(a, whole), compute=opmath(x.dtype), result=x.dtype)
    return s.elementwise(node, lambda m, a, b: m.call("powf", a, b) if m.floating else m.call("ipowi", a, b))


@lowers("stablehlo.atan2")
def _atan2(s: Scope, node: Node) -> Result:
    return s.elementwise(node, lambda m, a, b: m.call("atan2", a, b))


# --- arithmetic ------------------------------------------------------------------------------------------------------

_SAME_BITS: dict[str, Body] = {
    "add": lambda m, a, b: m.add(a, b),
    "subtract": lambda m, a, b: m.sub(a, b),
    "multiply": lambda m, a, b: m.mul(a, b),
    "and": lambda m, a, b: m.bitwise("and", a, b),
    "or": lambda m, a, b: m.bitwise("or", a, b),
    "xor": lambda m, a, b: m.bitwise("xor", a, b),
    "negate": lambda m, a: m.neg(a),
}


def _plain(body: Body) -> Callable[[Scope, Node], Result]:
    return lambda s, node: s.elementwise(node, body)


for _op, _body in _SAME_BITS.items():
    lowers(f"stablehlo.{_op}")(_plain(_body))


def is_wide_unsigned(value: Value) -> bool:
    """An unsigned type that the IR holds as a signed one."""
    return value.unsigned and value.dtype != "ui8"


def in_order(s: Scope, x: V, value: Value) -> V:
    """x, for which signed order is the order of the elements of `value`: the sign bit of unsigned ones is flipped.

    A second call gives x back.
    """
    dtype = tensor_dtype(x.type)
    if not is_wide_unsigned(value):
        return x
    lowest = -(1 << (BITS[value.dtype] - 1))
    return s.pointwise([x], lambda m, e: m.bitwise("xor", e, m.const(lowest)), compute=dtype, result=dtype)


def widened(m: Scalars, element: V, dtype: DType) -> V:
    """The i64 value of an unsigned element of fewer bits, held as a signed one."""
    wide = Scalars(m.builder, "i64")
    return wide.bitwise("and", cast(m.builder, element, "i64"), wide.const((1 << BITS[dtype]) - 1))


def _signed_or_wide(body: Body) -> Callable[[Scope, Node], Result]:
    """An op for which the sign matters: unsigned elements compute in i64."""

    def builder(s: Scope, node: Node) -> Result:
        value = node.operands[0]
        if not is_wide_unsigned(value):
            return s.elementwise(node, body)
        if value.dtype == "i64":
            return s.elementwise(node, _WIDEST[node.op.removeprefix("stablehlo.")])

        def wide(m: Scalars, *elements: V) -> V:
            numbers = Scalars(m.builder, "i64")
            return cast(m.builder, body(numbers, *(widened(m, e, value.dtype) for e in elements)), value.dtype)

        return s.elementwise(node, wide, compute=value.dtype)

    return builder


def _divide(m: Scalars, a: V, b: V) -> V:
    """Of integers towards zero; a division by zero is -1, as in XLA."""
    if m.floating:
        return m.div(a, b)
    zero = m.compare("eq", b, m.const(0))
    return m.select(zero, m.const(-1), m.div(a, m.select(zero, m.const(1), b)))


def _remainder(m: Scalars, a: V, b: V) -> V:
    if m.floating:
        return m.rem(a, b)
    zero = m.compare("eq", b, m.const(0))
    return m.select(zero, a, m.rem(a, m.select(zero, m.const(1), b)))


def _sign(m: Scalars, x: V) -> V:
    positive = m.select(m.compare("gt", x, m.const(0)), m.const(1), m.const(0))
    found = m.select(m.compare("lt", x, m.const(0)), m.const(-1), positive)
    return m.select(m.compare("eq", x, x), m.select(m.compare("eq", x, m.const(0)), x, found), x)


def _before(m: Scalars, a: V, b: V) -> V:
    """a < b of uint64."""
    flip = m.const(-(1 << 63))
    return m.compare("lt", m.bitwise("xor", a, flip), m.bitwise("xor", b, flip))


def _divide_widest(m: Scalars, a: V, b: V) -> V:
    """Of uint64: half of the dividend by the divisor, doubled, is the quotient or one less (Hacker's Delight, 9-3).

    A divisor from 2^63 on goes into the dividend once or not at all; a division by zero has all bits set.
    """
    large, zero = m.compare("lt", b, m.const(0)), m.compare("eq", b, m.const(0))
    safe = m.select(m.compare("le", b, m.const(0)), m.const(1), b)
    half = m.div(m.insert(arith.ShRUIOp(a, m.const(1))), safe)
    doubled = m.insert(arith.ShLIOp(half, m.const(1)))
    rest = m.sub(a, m.mul(doubled, safe))
    found = m.add(doubled, m.select(_before(m, rest, safe), m.const(0), m.const(1)))
    found = m.select(large, m.select(_before(m, a, b), m.const(0), m.const(1)), found)
    return m.select(zero, m.const(-1), found)


_WIDEST: dict[str, Body] = {
    "maximum": lambda m, a, b: m.select(_before(m, a, b), b, a),
    "minimum": lambda m, a, b: m.select(_before(m, a, b), a, b),
    "divide": _divide_widest,
    "remainder": lambda m, a, b: m.select(
        m.compare("eq", b, m.const(0)), a, m.sub(a, m.mul(_divide_widest(m, a, b), b))
    ),
    "abs": lambda m, a: a,
    "sign": lambda m, a: m.select(m.compare("eq", a, m.const(0)), a, m.const(1)),
}
"""Of uint64, which has no wider type to compute in."""

_SIGNED: dict[str, Body] = {
    "maximum": lambda m, a, b: m.maximum(a, b),
    "minimum": lambda m, a, b: m.minimum(a, b),
    "divide": _divide,
    "remainder": _remainder,
    "abs": lambda m, a: m.abs(a),
    "sign": _sign,
}
for _op, _body in _SIGNED.items():
    lowers(f"stablehlo.{_op}")(_signed_or_wide(_body))


@lowers("stablehlo.not")
def _not(s: Scope, node: Node) -> Result:
    return s.elementwise(node, lambda m, a: m.bitwise("xor", a, m.const(1 if m.dtype == "i1" else -1)))


def _shift(node: Node, m: Scalars, x: V, count: V) -> V:
    """Counts of the width and more give 0 (or the sign)."""
    dtype, kind = node.operands[0].dtype, node.op.removeprefix("stablehlo.shift_")
    bits, wide = BITS[dtype], Scalars(m.builder, "i64")
    amount = cast(m.builder, count, "i64")
    inside = wide.bitwise(
        "and", wide.compare("ge", amount, wide.const(0)), wide.compare("lt", amount, wide.const(bits))
    )
    kept = wide.select(inside, amount, wide.const(0))
    if dtype == "i64":
        op = {"left": arith.ShLIOp, "right_logical": arith.ShRUIOp, "right_arithmetic": arith.ShRSIOp}[kind]
        moved = wide.insert(op(x, kept))
    elif kind == "left":
        moved = wide.insert(arith.ShLIOp(cast(m.builder, x, "i64"), kept))
    else:
        source = widened(m, x, dtype) if kind == "right_logical" else cast(m.builder, x, "i64")
        moved = wide.insert(arith.ShRSIOp(source, kept))
    beyond = m.const(0)
    if kind == "right_arithmetic":
        beyond = m.select(m.compare("lt", x, m.const(0)), m.const(-1), m.const(0))
    return m.select(inside, cast(m.builder, moved, m.dtype), beyond)


@lowers("stablehlo.shift_left", "stablehlo.shift_right_logical", "stablehlo.shift_right_arithmetic")
def _shifts(s: Scope, node: Node) -> Result:
    dtype = node.operands[0].dtype
    if dtype != "ui8":
        return s.elementwise(node, lambda m, x, n: _shift(node, m, x, n), compute=dtype)

    def of_bytes(m: Scalars, x: V, count: V) -> V:  # held as 0 … 255; its sign is bit 7
        return _shift(node, m, m.sub(m.bitwise("xor", x, m.const(128)), m.const(128)), count)

    return s.elementwise(node, of_bytes)


# --- decisions -------------------------------------------------------------------------------------------------------


def comparison(m: Scalars, value: Value, kind: Compare, a: V, b: V) -> V:
    """An i1; unsigned elements compare with the sign bit flipped."""
    if is_wide_unsigned(value) and kind not in ("eq", "ne"):
        flip = m.const(-(1 << (BITS[value.dtype] - 1)))
        a, b = m.bitwise("xor", a, flip), m.bitwise("xor", b, flip)
    return m.compare(kind, a, b)


def _rank(m: Scalars, whole: Scalars, x: V) -> V:
    """The integer with a float's place in the total order -NaN, -inf, …, -0.0, 0.0, …, inf, NaN.

    The bits of positive floats are in order; those of negative ones are in the opposite order but for the sign.
    """
    bits = m.insert(arith.BitcastOp(x, types.ELEMENT_TYPES[whole.dtype]))
    turned = whole.bitwise("xor", bits, whole.const((1 << (whole.bits - 1)) - 1))
    return whole.select(whole.compare("lt", bits, whole.const(0)), turned, bits)


@lowers("stablehlo.compare")
def _compare(s: Scope, node: Node) -> Result:
    value, kind = node.operands[0], node.attrs["comparison_direction"].lower()
    total = value.floating and node.attrs.get("compare_type") == "TOTALORDER"
    inputs = [s.operand(v) for v in node.operands]

    def body(m: Scalars, a: V, b: V) -> V:
        if total:
            whole = Scalars(m.builder, "i64" if m.dtype == "f64" else "i32")
            return whole.compare(kind, _rank(m, whole, a), _rank(m, whole, b))
        return comparison(m, value, kind, a, b)

    return s.pointwise(inputs, body, compute=opmath(value.dtype), result="i1", shape=node.result.shape)


def _choose(s: Scope, node: Node, condition: V, yes: Value, no: Value) -> V:
    dtype, inputs = node.result.dtype, [condition, s.operand(yes), s.operand(no)]
    return s.pointwise(
        inputs, lambda m, c, a, b: m.select(m.nonzero(c), a, b), compute=opmath(dtype), result=dtype,
        shape=node.result.shape,
    )  # fmt: skip


@lowers("stablehlo.select")
def _select(s: Scope, node: Node) -> Result:
    return _choose(s, node, s.value(node.operands[0]), node.operands[1], node.operands[2])


@lowers("qc.choose")
def _branch(s: Scope, node: Node) -> Result:
    """A branch of a `case`: its result where the index is its number."""
    index, number = node.operands[0], int(node.attrs["number"])
    compute: DType = "i32" if index.dtype == "i1" else index.dtype
    condition = s.pointwise(
        [s.value(index)], lambda m, i: m.compare("eq", i, m.const(number)), compute=compute, result="i1"
    )
    return _choose(s, node, condition, node.operands[1], node.operands[2])


@lowers("stablehlo.clamp")
def _clamp(s: Scope, node: Node) -> Result:
    low, x, high = node.operands
    inputs = [in_order(s, s.value(v), v) if is_wide_unsigned(v) else s.operand(v) for v in (x, low, high)]
    out = s.pointwise(
        inputs, lambda m, v, a, b: m.minimum(m.maximum(v, a), b), compute=opmath(x.dtype), result=x.dtype,
        shape=x.shape,
    )  # fmt: skip
    return in_order(s, out, x)


# --- conversions -----------------------------------------------------------------------------------------------------


@lowers("stablehlo.convert")
def _convert(s: Scope, node: Node) -> Result:
    value, result = node.operands[0], node.result
    x = s.value(value)
    if is_wide_unsigned(value) and value.dtype not in ("i64", result.dtype) and result.type != "i1":
        return s.pointwise(
            [x], lambda m, e: cast(m.builder, widened(m, e, value.dtype), result.dtype), compute=value.dtype,
            result=result.dtype,
        )  # fmt: skip
    if (value.type == "ui64" and result.floating) or (value.floating and result.type == "ui64"):
        raise node.unsupported("conversions between uint64 and floats; convert through int64, or use uint32")
    if value.floating and result.unsigned:
        return _float_to_unsigned(s, x, result)
    return s.cast(x, result.dtype)


def _float_to_unsigned(s: Scope, x: V, result: Value) -> V:
    """Truncated and saturated, as XLA converts: through i64, which saturates and makes NaN 0."""
    highest = (1 << int(result.type.removeprefix("ui"))) - 1

    def body(m: Scalars, e: V) -> V:
        wide = Scalars(m.builder, "i64")
        kept = wide.minimum(wide.maximum(cast(m.builder, e, "i64"), wide.const(0)), wide.const(highest))
        return cast(m.builder, kept, result.dtype)

    return s.pointwise([x], body, compute=opmath(tensor_dtype(x.type)), result=result.dtype)


__all__ = ["BITS", "FLOATS", "comparison", "in_order", "is_wide_unsigned", "widened"]
