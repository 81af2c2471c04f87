"""Pointwise ATen operators as loops: arithmetic, comparisons, logic, casts.

Operators compute in fp32 where torch's CPU kernels do, and round once; in the tables, one line is one operator.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from xdsl.dialects import arith
from xdsl.ir import SSAValue

from qcompiler.frontends.common.loops import round_number
from qcompiler.frontends.common.scalars import FLOATS, Compare, Scalars, cast, opmath
from qcompiler.frontends.torch.aten.scope import (
    BUILDERS,
    Args,
    BuildFn,
    Number,
    Result,
    Scope,
    broadcast_shapes,
    is_tensor,
    lowers,
    overload,
)
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.ir.types import shape_of
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
S = Scalars
V = SSAValue


def operand(s: Scope, argument: Any) -> SSAValue | Number:
    """A tensor, a symbolic number, or a Python number."""
    return s.value(argument) if isinstance(argument, fx.Node) else argument


def common_dtype(*arguments: Any) -> DType:
    """torch's promoted type of tensors and Python numbers."""
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
    values = [1 if isinstance(v, torch.SymInt) else v for v in values]
    dtype = torch.result_type(values[0], values[1]) if len(values) > 1 else values[0].dtype
    for value in values[2:]:
        dtype = torch.promote_types(dtype, value.dtype if isinstance(value, torch.Tensor) else dtype)
    return dtype_name(dtype)


# --- one tensor ------------------------------------------------------------------------------------------------------


def clamp(m: S, x: V, low: V | None, high: V | None) -> V:
    x = m.maximum(x, low) if low is not None else x
    return m.minimum(x, high) if high is not None else x


def _sign(m: S, x: V) -> V:
    zero = m.const(0)
    if m.dtype == "i1":
        return x
    one = m.select(m.compare("lt", x, zero), m.const(-1), zero)
    return m.select(m.compare("gt", x, zero), m.const(1), one)


def _sign_bit(m: S, x: V) -> V:
    """The sign bit, also of -0 and of NaN."""
    probe = m.call("copysign", m.const(1), x) if m.floating else x
    return m.compare("lt", probe, m.const(0)) if m.dtype != "i1" else m.const(False)


# M. Giles, "Approximating the erfinv function", GPU Computing Gems 2 (2010): polynomials in w - 2.5 (w < 5) and in
# sqrt(w) - 3, with w = -log(1 - x²); the highest power first.
_ERFINV_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(m: S, x: V) -> V:
    """Giles' polynomials, then two Newton steps in f64 (fp32 needs none, f64 both)."""
    wide = S(m.builder, "f64")
    y = cast(m.builder, x, "f64")
    one = wide.const(1)
    w = wide.neg(wide.call("log", wide.mul(wide.sub(one, y), wide.add(one, y))))
    near, far = wide.sub(w, wide.const(2.5)), wide.sub(wide.call("sqrt", w), wide.const(3))
    factor = wide.select(
        wide.compare("lt", w, wide.const(5)), _horner(wide, near, _ERFINV_CENTRAL), _horner(wide, far, _ERFINV_TAIL)
    )
    guess = wide.mul(factor, y)
    for _ in range(2):  # erf'(g) = 2 / sqrt(pi) * exp(-g²)
        slope = wide.mul(wide.const(2 / pymath.sqrt(pymath.pi)), wide.call("exp", wide.neg(wide.mul(guess, guess))))
        guess = wide.sub(guess, wide.div(wide.sub(wide.call("erf", guess), y), slope))
    end = wide.compare("eq", wide.abs(y), one)
    return cast(m.builder, wide.select(end, wide.div(y, wide.const(0)), guess), m.dtype)


def _horner(m: S, x: V, coefficients: Sequence[float]) -> V:
    total = m.const(coefficients[0])
    for coefficient in coefficients[1:]:
        total = m.add(m.mul(total, x), m.const(coefficient))
    return total


def _function(name: str) -> Callable[[S, V], V]:
    return lambda m, x: m.call(name, x)


def _rounding(name: str) -> Callable[[S, V], V]:
    return lambda m, x: m.call(name, x) if m.floating else x


_UNARY: dict[Any, Callable[[S, V], V]] = {
    aten.abs.default: lambda m, x: m.abs(x),
    aten.neg.default: lambda m, x: m.neg(x),
    aten.reciprocal.default: lambda m, x: m.div(m.const(1), x),
    aten.square.default: lambda m, x: m.mul(x, x),
    aten.sign.default: _sign,
    aten.sgn.default: _sign,
    aten.ceil.default: _rounding("ceil"),
    aten.floor.default: _rounding("floor"),
    aten.trunc.default: _rounding("trunc"),
    aten.round.default: _rounding("roundeven"),
    aten.erfinv.default: _erfinv,
    aten.bitwise_not.default: lambda m, x: m.bitwise("xor", x, m.const(1 if m.dtype == "i1" else -1)),
    **{
        getattr(aten, name).default: _function(name)
        for name in (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
            "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sqrt", "rsqrt",
        )
    },
}  # fmt: skip


def _unary_builder(body: Callable[[S, V], V]) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        return s.unary(node, next(iter(a.values())), body)

    return build


# --- two tensors, or a tensor and a number ---------------------------------------------------------------------------


def _floor_div(m: S, x: V, y: V) -> V:
    """floor(x / y) of the exact quotient, like Python's //."""
    if m.floating:
        return _floor_div_of_floats(m, x, y)
    quotient, remainder = m.div(x, y), m.rem(x, y)
    wrong = m.bitwise("and", _nonzero(m, remainder), _signs_differ(m, remainder, y))
    return m.select(wrong, m.sub(quotient, m.const(1)), quotient)


def _floor_div_of_floats(m: S, x: V, y: V, narrow: Callable[[V], V] = lambda value: value) -> V:
    """As CPython and torch define it: (x - remainder) / y is almost an integer, and is rounded to the nearest one.

    A quotient of 0 has the sign of x / y, and a division by 0 follows IEEE 754.  `narrow` rounds intermediate results.
    """
    plain, remainder = narrow(m.div(x, y)), m.rem(x, y)
    even = narrow(m.div(narrow(m.sub(x, remainder)), y))
    wrong = m.bitwise("and", _nonzero(m, remainder), _signs_differ(m, remainder, y))
    even = m.select(wrong, narrow(m.sub(even, m.const(1))), even)
    below = m.call("floor", even)
    nearest = m.select(m.compare("gt", m.sub(even, below), m.const(0.5)), m.add(below, m.const(1)), below)
    zero = m.const(0)
    whole = m.select(m.compare("eq", even, zero), m.call("copysign", zero, plain), nearest)
    return m.select(m.compare("eq", y, zero), plain, whole)


def _modulo(m: S, x: V, y: V) -> V:
    """Python's %: the sign of y."""
    remainder = m.rem(x, y)
    wrong = m.bitwise("and", _nonzero(m, remainder), _signs_differ(m, remainder, y))
    return m.select(wrong, m.add(remainder, y), remainder)


def _nonzero(m: S, x: V) -> V:
    return m.compare("ne", x, m.const(0))


def _signs_differ(m: S, x: V, y: V) -> V:
    zero = m.const(0)
    return m.bitwise("xor", m.compare("lt", x, zero), m.compare("lt", y, zero))


def _trunc_div(m: S, x: V, y: V) -> V:
    return m.call("trunc", m.div(x, y)) if m.floating else m.div(x, y)


def _whole_division_of_narrow_floats(mode: str, dtype: DType) -> Callable[[S, V, V], V]:
    """torch's kernels for two tensors of 16-bit floats round each step: 17.98 is 18 in bf16 before truncation."""

    def body(m: S, x: V, y: V) -> V:
        def narrow(value: V) -> V:
            return cast(m.builder, cast(m.builder, value, dtype), m.dtype)

        return m.call("trunc", narrow(m.div(x, y))) if mode == "trunc" else _floor_div_of_floats(m, x, y, narrow)

    return body


def _shift_left(m: S, x: V, y: V) -> V:
    """Shifts by a negative count, or by all bits and more, give 0."""
    return m.select(_in_width(m, y), m.insert(arith.ShLIOp(x, _shift_count(m, y))), m.const(0))


def _shift_right(m: S, x: V, y: V) -> V:
    """Arithmetic; shifts by a negative count, or by all bits and more, give the sign."""
    return m.insert(arith.ShRSIOp(x, m.select(_in_width(m, y), y, m.const(m.bits - 1))))


def _in_width(m: S, count: V) -> V:
    return m.bitwise("and", m.compare("ge", count, m.const(0)), m.compare("lt", count, m.const(m.bits)))


def _shift_count(m: S, count: V) -> V:
    return m.select(_in_width(m, count), count, m.const(0))


_BINARY: dict[str, Callable[[S, V, V], V]] = {
    "mul": lambda m, x, y: m.mul(x, y),
    "maximum": lambda m, x, y: m.maximum(x, y),
    "minimum": lambda m, x, y: m.minimum(x, y),
    "fmin": lambda m, x, y: m.number_minimum(x, y),
    "fmax": lambda m, x, y: m.number_maximum(x, y),
    "fmod": lambda m, x, y: m.rem(x, y),
    "remainder": _modulo,
    "floor_divide": _floor_div,
    "atan2": lambda m, x, y: m.call("atan2", x, y),
    "copysign": lambda m, x, y: m.call("copysign", x, y),
    "bitwise_and": lambda m, x, y: m.bitwise("and", x, y),
    "bitwise_or": lambda m, x, y: m.bitwise("or", x, y),
    "bitwise_xor": lambda m, x, y: m.bitwise("xor", x, y),
    "bitwise_left_shift": _shift_left,
    "bitwise_right_shift": _shift_right,
    "__lshift__": _shift_left,
    "__rshift__": _shift_right,
    "__and__": lambda m, x, y: m.bitwise("and", x, y),
    "__or__": lambda m, x, y: m.bitwise("or", x, y),
    "__xor__": lambda m, x, y: m.bitwise("xor", x, y),
}


def binary(s: Scope, node: fx.Node, x: Any, y: Any, body: Callable[[S, V, V], V], exact: int | None = None) -> SSAValue:
    """A function of two promoted operands; computed in the opmath of the result's type."""
    result = s.dtype(node)
    inputs = [operand(s, x), operand(s, y)]
    return s.pointwise(inputs, body, compute=opmath(result), result=result, common=result, exact=exact)


def _binary_builder(body: Callable[[S, V, V], V], exact: int | None) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        x, y = list(a.values())[:2]
        return binary(s, node, x, y, body, exact)

    return build


@lowers(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
def _add(s: Scope, node: fx.Node, a: Args) -> Result:
    """x ± alpha * y; rsub is y - alpha * x."""
    name, alpha = overload(node), a.get("alpha", 1)
    x, y = (a["other"], a["self"]) if name.startswith("rsub") else (a["self"], a["other"])
    if y == 0 and alpha == 1 and is_tensor(x) and s.dtype(x) == s.dtype(node):
        return s.value(x)

    weight = round_number(alpha, s.dtype(node))

    def body(m: S, left: V, right: V) -> V:
        scaled = right if alpha == 1 else m.mul(right, m.const(weight))
        return m.add(left, scaled) if name.startswith("add") else m.sub(left, scaled)

    return binary(s, node, x, y, body)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div(s: Scope, node: fx.Node, a: Args) -> Result:
    bodies: dict[str | None, Callable[[S, V, V], V]] = {
        None: lambda m, x, y: m.div(x, y), "floor": _floor_div, "trunc": _trunc_div,
    }  # fmt: skip
    mode, other, dtype = a.get("rounding_mode"), a["other"], s.dtype(node)
    if mode and dtype in ("bf16", "f16") and is_tensor(other) and any(n != 1 for n in s.shape(other)):
        return binary(s, node, a["self"], other, _whole_division_of_narrow_floats(mode, dtype), exact=1)
    return binary(s, node, a["self"], other, bodies[mode], exact=1)


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(s: Scope, node: fx.Node, a: Args) -> Result:
    """Fixed exponents as in torch's CPU kernels: 0.5 is sqrt, -0.5 rsqrt, integers are products."""
    exponent, dtype = a["exponent"], s.dtype(node)
    if isinstance(exponent, fx.Node):
        return binary(s, node, a["self"], exponent, lambda m, x, y: m.call("powf" if m.floating else "ipowi", x, y))

    def body(m: S, x: V) -> V:
        if float(exponent).is_integer() and abs(exponent) <= 32:
            return _integer_power(m, x, int(exponent), dtype)
        if abs(exponent) == 0.5:
            return m.call("sqrt" if exponent > 0 else "rsqrt", x)
        return m.call("powf", x, m.const(round_number(exponent, dtype)))

    return s.unary(node, a["self"], body)


def _integer_power(m: S, x: V, exponent: int, dtype: DType) -> V:
    """x**3 and x**-2 of 16-bit floats round after their first product, as torch's vector code does."""
    if exponent in (3, -2):
        square = cast(m.builder, cast(m.builder, m.mul(x, x), dtype), m.dtype)
        return m.mul(square, x) if exponent == 3 else m.div(m.const(1), square)
    power = m.power(x, abs(exponent))
    return power if exponent >= 0 else m.div(m.const(1), power)


@lowers(aten.round.decimals)
def _round_decimals(s: Scope, node: fx.Node, a: Args) -> Result:
    """round(x * 10^d) / 10^d; for d < 0 round(x / 10^-d) * 10^-d."""
    decimals = int(a["decimals"])
    scale = float(10 ** abs(decimals))

    def body(m: S, x: V) -> V:
        power = m.const(scale)
        if not m.floating:
            return x
        if decimals >= 0:
            return m.div(m.call("roundeven", m.mul(x, power)), power)
        return m.mul(m.call("roundeven", m.div(x, power)), power)

    return s.unary(node, a["self"], body)


@lowers(aten.hypot.default)
def _hypot(s: Scope, node: fx.Node, a: Args) -> Result:
    """In f64, in which squares of f32 cannot overflow. Infinite if either operand is, also beside NaN."""
    result = s.dtype(node)
    inputs = [s.value(a["self"]), s.value(a["other"])]

    def body(m: S, x: V, y: V) -> V:
        root = m.call("sqrt", m.add(m.mul(x, x), m.mul(y, y)))
        infinity = m.const(float("inf"))
        either = m.bitwise("or", m.compare("eq", m.abs(x), infinity), m.compare("eq", m.abs(y), infinity))
        return m.select(either, infinity, root)

    return s.pointwise(inputs, body, compute="f64", result=result, common=result)


@lowers(aten.addcmul.default, aten.addcdiv.default)
def _addc(s: Scope, node: fx.Node, a: Args) -> Result:
    divide, value = node.target is aten.addcdiv.default, a["value"]

    def body(m: S, x: V, y: V, z: V) -> V:
        scaled = y if value == 1 else m.mul(m.const(value), y)
        return m.add(x, m.div(scaled, z) if divide else m.mul(scaled, z))

    inputs = [s.value(a[name]) for name in ("self", "tensor1", "tensor2")]
    return s.pointwise(inputs, body, compute=opmath(s.dtype(node)), result=s.dtype(node), common=s.dtype(node))


# --- comparisons, logic, selection -----------------------------------------------------------------------------------


def _compare_builder(kind: Compare) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        common = common_dtype(a["self"], a["other"])
        inputs = [operand(s, a["self"]), operand(s, a["other"])]
        return s.pointwise(
            inputs, lambda m, x, y: m.compare(kind, x, y), compute=opmath(common), result="i1", common=common
        )

    return build


def _logical_builder(body: Callable[..., V]) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        inputs = [operand(s, value) for name, value in a.items() if name in ("self", "other")]
        return s.pointwise(inputs, body, compute="i1", result="i1")

    return build


def _is_class(body: Callable[[S, V], V]) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        dtype = s.dtype(a["self"])
        if dtype not in FLOATS:
            dtype = "f32"
        return s.pointwise([s.value(a["self"])], body, compute=opmath(dtype), result="i1")

    return build


@lowers(aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf)
def _where(s: Scope, node: fx.Node, a: Args) -> Result:
    result = s.dtype(node)
    return _select(s, node, a["condition"], operand(s, a["self"]), operand(s, a["other"]), result)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(s: Scope, node: fx.Node, a: Args) -> Result:
    return _select(s, node, a["mask"], operand(s, a["value"]), s.value(a["self"]), s.dtype(node))


def _select(s: Scope, node: fx.Node, condition: Any, x: V | Number, y: V | Number, result: DType) -> V:
    """Selects without arithmetic, so in the result's own type (numbers are rounded to it)."""
    mask = s.value(condition)
    compute = opmath(result) if any(not isinstance(v, SSAValue) for v in (x, y)) else result
    shapes = [shape_of(v.type) for v in (mask, x, y) if isinstance(v, SSAValue)]

    def body(m: S, c: V, left: V, right: V) -> V:
        return m.select(Scalars(m.builder, m.dtype).nonzero(c), left, right)

    return s.pointwise([mask, x, y], body, compute=compute, result=result, shape=broadcast_shapes(shapes))


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
        aten.clamp_min.Tensor, aten.clamp_max.Tensor)  # fmt: skip
def _clamp_any(s: Scope, node: fx.Node, a: Args) -> Result:
    bounds = [name for name in ("min", "max") if a.get(name) is not None]
    inputs = [s.value(a["self"]), *(operand(s, a[name]) for name in bounds)]
    result = s.dtype(node)

    def body(m: S, x: V, *limits: V) -> V:
        given = dict(zip(bounds, limits, strict=True))
        return clamp(m, x, given.get("min"), given.get("max"))

    return s.pointwise(inputs, body, compute=opmath(result), result=result, common=result)


# --- casts and copies ------------------------------------------------------------------------------------------------


@lowers(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.clone.default, aten.alias.default,
        aten.detach.default, aten.lift_fresh_copy.default, aten.contiguous.default,
        aten.copy.default, aten.type_as.default)  # fmt: skip
def _copy(s: Scope, node: fx.Node, a: Args) -> Result:
    """Copies and layouts vanish, since values have no memory; only a change of type or a broadcast stays."""
    source = a["src"] if node.target is aten.copy.default else a["self"]
    return s.cast(s.broadcast(s.value(source), s.shape(node)), s.dtype(node))


OVERLOADS = ("Tensor", "Scalar", "default", "Tensor_Scalar", "Scalar_Tensor")
"""ATen's names for the forms of an operator with two operands."""


def _register() -> None:
    for op, body in _UNARY.items():
        lowers(op)(_unary_builder(body))
    for name, combine in _BINARY.items():
        packet = getattr(aten, name)
        forms = [o for o in OVERLOADS if o in packet.overloads()]
        found = [
            getattr(packet, o) for o in forms if o != "default" or "Tensor" not in forms
        ]  # else the form with two numbers
        lowers(*(op for op in found if op not in BUILDERS))(
            _binary_builder(combine, 1 if name in ("mul", "floor_divide") else None)
        )
    kinds: tuple[Compare, ...] = ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in kinds:
        packet = getattr(aten, kind)
        lowers(packet.Tensor, packet.Scalar)(_compare_builder(kind))
    lowers(aten.logical_not.default)(_logical_builder(lambda m, x: m.bitwise("xor", x, m.const(True))))
    lowers(aten.logical_and.default)(_logical_builder(lambda m, x, y: m.bitwise("and", x, y)))
    lowers(aten.logical_or.default)(_logical_builder(lambda m, x, y: m.bitwise("or", x, y)))
    lowers(aten.logical_xor.default)(_logical_builder(lambda m, x, y: m.bitwise("xor", x, y)))
    lowers(aten.signbit.default)(_is_class(_sign_bit))
    lowers(aten.isnan.default)(_is_class(lambda m, x: m.is_nan(x)))
    lowers(aten.isinf.default)(_is_class(lambda m, x: m.compare("eq", m.abs(x), m.const(float("inf")))))
    lowers(aten.isfinite.default)(_is_class(lambda m, x: m.compare("lt", m.abs(x), m.const(float("inf")))))


_register()
