"""Activation functions of ATen as loops, and dropout.

Operators compute in fp32 where torch's CPU kernels do, and round once; in the tables, one line is one operator.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import Scalars, opmath
from qcompiler.frontends.torch.aten.pointwise import clamp
from qcompiler.frontends.torch.aten.scope import Args, BuildFn, Number, Result, Scope, lowers
from qcompiler.ir.types import shape_of

aten = torch.ops.aten
S = Scalars
V = SSAValue


def _sigmoid(m: S, x: V) -> V:
    one = m.const(1)
    return m.div(one, m.add(one, m.call("exp", m.neg(x))))


def _hard_gate(m: S, x: V) -> V:
    """min(max(x + 3, 0), 6)"""
    return clamp(m, m.add(x, m.const(3)), m.const(0), m.const(6))


def _log_sigmoid(m: S, x: V) -> V:
    """min(0, x) - log1p(exp(-|x|)), which does not overflow."""
    return m.sub(m.minimum(m.const(0), x), m.call("log1p", m.call("exp", m.neg(m.abs(x)))))


def _mish(m: S, x: V) -> V:
    return m.mul(x, m.call("tanh", m.call("log1p", m.call("exp", x))))


def _silu(m: S, x: V) -> V:
    return m.div(x, m.add(m.const(1), m.call("exp", m.neg(x))))


_PLAIN: dict[Any, Callable[[S, V], V]] = {
    aten.relu.default: lambda m, x: m.maximum(x, m.const(0)),
    aten.relu6.default: lambda m, x: clamp(m, x, m.const(0), m.const(6)),
    aten.sigmoid.default: _sigmoid,
    aten.silu.default: _silu,
    aten.mish.default: _mish,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.hardsigmoid.default: lambda m, x: m.div(_hard_gate(m, x), m.const(6)),
    aten.hardswish.default: lambda m, x: m.div(m.mul(x, _hard_gate(m, x)), m.const(6)),
}
"""Activations without parameters."""


def _gelu(m: S, x: V, approximate: str) -> V:
    half = m.mul(m.const(0.5), x)
    if approximate == "tanh":
        cube = m.mul(m.mul(x, x), x)
        inner = m.mul(m.const(pymath.sqrt(2 / pymath.pi)), m.add(x, m.mul(m.const(0.044715), cube)))
        return m.mul(half, m.add(m.const(1), m.call("tanh", inner)))
    return m.mul(half, m.add(m.const(1), m.call("erf", m.mul(x, m.const(pymath.sqrt(0.5))))))


def _elu(m: S, x: V, alpha: Number, scale: Number, input_scale: Number) -> V:
    negative = m.mul(m.call("expm1", m.mul(x, m.const(input_scale))), m.const(alpha * scale))
    return m.select(m.compare("le", x, m.const(0)), negative, m.mul(x, m.const(scale)))


def _softplus(m: S, x: V, beta: Number, threshold: Number) -> V:
    scaled = m.mul(x, m.const(beta))
    soft = m.div(m.call("log1p", m.call("exp", scaled)), m.const(beta))
    return m.select(m.compare("gt", scaled, m.const(threshold)), x, soft)


def _leaky_relu(m: S, x: V, slope: Number) -> V:
    return m.select(m.compare("gt", x, m.const(0)), x, m.mul(x, m.const(slope)))


def _softshrink(m: S, x: V, lambd: Number) -> V:
    above, below = m.sub(x, m.const(lambd)), m.add(x, m.const(lambd))
    low = m.select(m.compare("lt", x, m.const(-lambd)), below, m.mul(x, m.const(0)))  # 0 * NaN stays NaN
    return m.select(m.compare("gt", x, m.const(lambd)), above, low)


def _hardshrink(m: S, x: V, lambd: Number) -> V:
    inside = m.bitwise("and", m.compare("ge", x, m.const(-lambd)), m.compare("le", x, m.const(lambd)))
    return m.select(inside, m.const(0), x)


def _threshold(m: S, x: V, threshold: Number, value: Number) -> V:
    return m.select(m.compare("le", x, m.const(threshold)), m.const(value), x)


_PARAMETRIC: dict[Any, tuple[Callable[..., V], tuple[str, ...]]] = {
    aten.gelu.default: (_gelu, ("approximate",)),
    aten.elu.default: (_elu, ("alpha", "scale", "input_scale")),
    aten.softplus.default: (_softplus, ("beta", "threshold")),
    aten.leaky_relu.default: (_leaky_relu, ("negative_slope",)),
    aten.hardtanh.default: (lambda m, x, lo, hi: clamp(m, x, m.const(lo), m.const(hi)), ("min_val", "max_val")),
    aten.softshrink.default: (_softshrink, ("lambd",)),
    aten.hardshrink.default: (_hardshrink, ("lambd",)),
    aten.threshold.default: (_threshold, ("threshold", "value")),
    aten.selu.default: (lambda m, x: _elu(m, x, 1.6732632423543772, 1.0507009873554805, 1.0), ()),
    aten.celu.default: (lambda m, x, alpha: _elu(m, x, alpha, 1.0, 1.0 / alpha), ("alpha",)),
}
"""Activations with numbers as parameters: the body, and the names of the parameters in the operator's schema."""


def _builder(body: Callable[..., V], names: tuple[str, ...] = ()) -> BuildFn:
    def build(s: Scope, node: fx.Node, a: Args) -> Result:
        numbers = [a[name] for name in names]
        return s.unary(node, a["self"], lambda m, x: body(m, x, *numbers))

    return build


@lowers(aten.prelu.default, aten._prelu_kernel.default)
def _prelu(s: Scope, node: fx.Node, a: Args) -> Result:
    """The weight has one entry, or one for each channel (dimension 1)."""
    x, weight = s.value(a["self"]), s.value(a["weight"])
    shape, count = shape_of(x.type), shape_of(weight.type)
    if node.target is aten.prelu.default:
        axis = 1 if len(shape) > 1 else 0
        spread = [1] * len(shape)
        if count and count[0] != 1:
            spread[axis] = int(count[0])
        weight = s.reshape(weight, spread)
    result = s.dtype(node)

    def body(m: S, value: V, slope: V) -> V:
        return m.select(m.compare("gt", value, m.const(0)), value, m.mul(slope, value))

    return s.pointwise([x, weight], body, compute=opmath(result), result=result, common=result)


@lowers(aten.dropout.default, aten.native_dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def _dropout(s: Scope, node: fx.Node, a: Args) -> Result:
    if a.get("train") and a["p"] != 0:
        raise s.unsupported(node, "the model is in training mode; call model.eval() before compiling it")
    value = s.value(a["input"])
    return (value, None) if node.target is aten.native_dropout.default else value


@lowers(aten.rrelu_with_noise_functional.default, aten.rrelu_with_noise.default)
def _rrelu(s: Scope, node: fx.Node, a: Args) -> Result:
    """In evaluation mode the slope is the middle of its range."""
    if a["training"]:
        raise s.unsupported(node, "the model is in training mode; call model.eval() before compiling it")
    slope = (a["lower"] + a["upper"]) / 2
    dtype = s.dtype(a["self"])
    value = s.pointwise(
        [s.value(a["self"])], lambda m, x: _leaky_relu(m, x, slope), compute=opmath(dtype), result=dtype
    )
    return (value, None) if node.target is aten.rrelu_with_noise_functional.default else value


def _register() -> None:
    for op, body in _PLAIN.items():
        lowers(op)(_builder(body))
    for op, (parametric, names) in _PARAMETRIC.items():
        lowers(op)(_builder(parametric, names))


_register()
