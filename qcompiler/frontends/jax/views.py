"""StableHLO operators that only move or make values: reshapes, broadcasts, slices, joins, padding, counts."""

from __future__ import annotations

from qcompiler.frontends.jax.fold import entries_of
from qcompiler.frontends.jax.graph import Node
from qcompiler.frontends.jax.scope import Result, Scope, V, lowers, number, splat
from qcompiler.ir import build, qc
from qcompiler.ir.types import shape_of
from qcompiler.plan.dims import Dim, dim


@lowers("stablehlo.reshape", "stablehlo.dynamic_reshape")
def _reshape(s: Scope, node: Node) -> Result:
    return s.reshape(s.value(node.operands[0]), node.result.shape)


@lowers("stablehlo.transpose")
def _transpose(s: Scope, node: Node) -> Result:
    return s.transpose(s.value(node.operands[0]), node.attrs["permutation"])


@lowers("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
def _broadcast(s: Scope, node: Node) -> Result:
    value, axes = node.operands[0], list(node.attrs["broadcast_dimensions"])
    shape = node.result.shape
    if value.known is not None and value.known.size == 1 and value.known.dtype != object and not value.unsigned:
        return s.full(number(value.known.reshape(-1)[0]), shape, node.result.dtype)
    x = s.value(value)
    if axes != sorted(axes):
        order = sorted(range(len(axes)), key=axes.__getitem__)
        x, axes = s.transpose(x, order), sorted(axes)
    return build.broadcast_in(s.builder, x, shape, axes)


@lowers("stablehlo.slice")
def _slice(s: Scope, node: Node) -> Result:
    a = node.attrs
    return build.extract_slice(
        s.builder, s.value(node.operands[0]), a["start_indices"], node.result.shape, a["strides"]
    )


@lowers("stablehlo.real_dynamic_slice")
def _real_slice(s: Scope, node: Node) -> Result:
    starts, steps = entries_of(node.operands[1]), entries_of(node.operands[3])
    if starts is None or steps is None or not all(isinstance(step, int) for step in steps):
        raise node.unsupported("a slice whose bounds depend on values; use jax.lax.dynamic_slice with a fixed size")
    return build.extract_slice(s.builder, s.value(node.operands[0]), starts, node.result.shape, steps)


@lowers("stablehlo.concatenate")
def _concatenate(s: Scope, node: Node) -> Result:
    axis = node.attrs["dimension"]
    values = [s.value(v) for v in node.operands if v.shape[axis] != 0]
    if not values:
        return s.full(0, node.result.shape, node.result.dtype)
    return build.concat(s.builder, values, axis)


@lowers("stablehlo.pad", "stablehlo.dynamic_pad")
def _pad(s: Scope, node: Node) -> Result:
    if node.op == "stablehlo.pad":
        parts = [list(node.attrs[n]) for n in ("edge_padding_low", "edge_padding_high", "interior_padding")]
    else:
        given = [entries_of(value) for value in node.operands[2:]]
        parts = [part for part in given if part is not None]
    if len(parts) < 3 or not all(isinstance(n, int) for part in parts for n in part):
        raise node.unsupported("padding of a symbolic amount")
    return padded(s, node, s.value(node.operands[0]), parts[0], parts[1], parts[2])


def padded(s: Scope, node: Node, x: V, low: list[int], high: list[int], inner: list[int]) -> V:
    """Padding with the value of the second operand; negative amounts cut, after the interior is spread."""
    fill = node.operands[1]
    given = shape_of(x.type)
    spread: list[Dim] = [
        0 if n == 0 else ((dim(n) - 1) * (i + 1) + 1).to_dim() for n, i in zip(given, inner, strict=True)
    ]
    wide = [(dim(n) + max(a, 0) + max(b, 0)).to_dim() for n, a, b in zip(spread, low, high, strict=True)]
    if any(a > 0 or b > 0 or i > 0 for a, b, i in zip(low, high, inner, strict=True)):
        known = splat(fill)
        filled = s.full(known, wide, node.result.dtype) if known is not None else s.broadcast(s.value(fill), wide)
        empty = 0 in given
        x = filled if empty else build.insert_slice(s.builder, x, filled, [max(a, 0) for a in low],
                                                    [i + 1 for i in inner])  # fmt: skip
    return build.extract_slice(s.builder, x, [max(-a, 0) for a in low], node.result.shape)


@lowers("stablehlo.iota", "stablehlo.dynamic_iota")
def _iota(s: Scope, node: Node) -> Result:
    axis, shape, dtype = node.attrs["iota_dimension"], node.result.shape, node.result.dtype
    counted = s.cast(s.iota(shape[axis], lambda m, i: i), dtype)
    return build.broadcast_in(s.builder, counted, shape, [axis])


@lowers("stablehlo.reverse")
def _reverse(s: Scope, node: Node) -> Result:
    value = s.value(node.operands[0])
    for axis in node.attrs["dimensions"]:
        value = reversed_along(s, value, axis)
    return value


def reversed_along(s: Scope, value: V, axis: int) -> V:
    """The last entry first."""
    index = s.iota(shape_of(value.type)[axis], lambda m, i: m.sub(m.const(-1), i))  # negative ones count from the end
    return s.insert(qc.GatherOp(value, index, value.type, axis=axis))
