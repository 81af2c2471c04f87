"""Bits of numbers: precisions that are cut, bits as another type, counts of bits.

Kernels hold 16-bit floats as fp32, so their bits are computed. Fusion may delete the rounding of a conversion in front
of them; they are rounded here, which changes nothing for a number that is rounded already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import cast
from qcompiler.frontends.jax.graph import Node
from qcompiler.frontends.jax.pointwise import BITS, widened
from qcompiler.frontends.jax.scope import Result, Scalars, Scope, V, lowers
from qcompiler.ir import build, types
from qcompiler.plan.kernel import DType


@lowers("stablehlo.reduce_precision")
def _reduce_precision(s: Scope, node: Node) -> Result:
    """Rounded to fewer bits, on the bits: fusion deletes a conversion to a narrower type and back, and this stays."""
    exponent, mantissa = node.attrs["exponent_bits"], node.attrs["mantissa_bits"]
    if mantissa == 0 or exponent < 2:
        raise node.unsupported("a precision of no bit of mantissa, or one bit of exponent; take (5, 10) or (8, 7)")
    return s.elementwise(node, lambda m, x: _narrowed(m, x, exponent, mantissa))


def _narrowed(m: Scalars, x: V, exponent: int, mantissa: int) -> V:
    """XLA's rule: round the magnitude to nearest even; too large is infinity, and subnormal numbers are zeros."""
    n = Scalars(m.builder, "i64" if m.dtype == "f64" else "i32")
    exponents, fraction = (11, 52) if m.dtype == "f64" else (8, 23)
    bias = (1 << (exponents - 1)) - 1
    bits = n.insert(arith.BitcastOp(x, types.ELEMENT_TYPES[n.dtype]))
    size = n.bitwise("and", bits, n.const((1 << (n.bits - 1)) - 1))
    dropped = fraction - mantissa
    if dropped > 0:
        last = n.bitwise("and", n.insert(arith.ShRUIOp(size, n.const(dropped))), n.const(1))
        rounded = n.add(size, n.add(last, n.const((1 << (dropped - 1)) - 1)))
        size = n.bitwise("and", rounded, n.const(-(1 << dropped)))
    if exponent < exponents:
        reach = (1 << (exponent - 1)) - 1
        infinity = n.const(((1 << exponents) - 1) << fraction)
        size = n.select(n.compare("ge", size, n.const((bias + reach + 1) << fraction)), infinity, size)
        size = n.select(n.compare("lt", size, n.const((bias - reach + 1) << fraction)), n.const(0), size)
    made = m.insert(arith.BitcastOp(size, types.ELEMENT_TYPES[m.dtype]))
    return m.select(m.is_nan(x), x, m.call("copysign", made, x))


@lowers("stablehlo.bitcast_convert")
def _bitcast(s: Scope, node: Node) -> Result:
    """The same bits as another type of the same width."""
    source, target = node.operands[0].dtype, node.result.dtype
    if source == target:
        return s.value(node.operands[0])
    change = _CHANGES.get((source, target))
    if change is None:
        raise node.unsupported(f"the bits of {source} as {target}; only between types of one width")

    def body(inner: Builder, elements: Sequence[SSAValue]) -> SSAValue:
        return change(inner, elements[0])

    return build.pointwise(s.builder, [s.value(node.operands[0])], node.result.shape, target, body)


def _as(target: DType) -> Callable[[Builder, V], V]:
    return lambda b, x: b.insert(arith.BitcastOp(x, types.ELEMENT_TYPES[target])).results[0]


def _of_half(b: Builder, x: V, dtype: DType) -> V:
    """The i16 with the bits of a 16-bit float."""
    whole, real = Scalars(b, "i32"), Scalars(b, "f32")
    wide = cast(b, x, "f32")
    if dtype == "bf16":
        bits = _as("i32")(b, _narrowed(real, wide, 8, 7))
        return cast(b, whole.insert(arith.ShRUIOp(bits, whole.const(16))), "i16")
    size = real.abs(wide)
    small = cast(b, real.call("roundeven", real.mul(size, real.const(2.0**24))), "i32")  # in units of 2^-24
    rounded = _as("i32")(b, _narrowed(real, size, 5, 10))
    high = whole.insert(arith.ShRUIOp(rounded, whole.const(13)))
    normal = whole.sub(high, whole.const((127 - 15) << 10))
    special = whole.bitwise("or", whole.bitwise("and", high, whole.const(0x3FF)), whole.const(0x7C00))
    found = whole.select(whole.compare("ge", rounded, whole.const(0x7F800000)), special, normal)
    found = whole.select(real.compare("lt", size, real.const(2.0**-14)), small, found)
    sign = whole.insert(arith.ShRUIOp(_as("i32")(b, wide), whole.const(16)))
    return cast(b, whole.bitwise("or", found, whole.bitwise("and", sign, whole.const(0x8000))), "i16")


def _to_half(b: Builder, x: V, dtype: DType) -> V:
    """The 16-bit float with the bits of an i16."""
    whole, real = Scalars(b, "i32"), Scalars(b, "f32")
    bits = cast(b, x, "i32")
    high = whole.insert(arith.ShLIOp(bits, whole.const(16)))
    if dtype == "bf16":
        return cast(b, _as("f32")(b, high), "bf16")
    size = whole.bitwise("and", bits, whole.const(0x7FFF))
    moved = whole.insert(arith.ShLIOp(size, whole.const(13)))
    rest = whole.select(whole.compare("ge", size, whole.const(0x7C00)), whole.const((255 - 31) << 23),
                        whole.const((127 - 15) << 23))  # fmt: skip
    small = real.mul(cast(b, size, "f32"), real.const(2.0**-24))
    found = real.select(whole.compare("lt", size, whole.const(0x400)), small, _as("f32")(b, whole.add(moved, rest)))
    return cast(b, real.call("copysign", found, _as("f32")(b, high)), "f16")


_CHANGES: dict[tuple[str, str], Callable[[Builder, V], V]] = {
    ("f32", "i32"): _as("i32"),
    ("i32", "f32"): _as("f32"),
    ("f64", "i64"): _as("i64"),
    ("i64", "f64"): _as("f64"),
    ("i8", "ui8"): _as("ui8"),
    ("ui8", "i8"): _as("i8"),
    ("bf16", "i16"): lambda b, x: _of_half(b, x, "bf16"),
    ("f16", "i16"): lambda b, x: _of_half(b, x, "f16"),
    ("i16", "bf16"): lambda b, x: _to_half(b, x, "bf16"),
    ("i16", "f16"): lambda b, x: _to_half(b, x, "f16"),
    ("bf16", "f16"): lambda b, x: _to_half(b, _of_half(b, x, "bf16"), "f16"),
    ("f16", "bf16"): lambda b, x: _to_half(b, _of_half(b, x, "f16"), "bf16"),
}
"""By source and target: the scalar code."""


def _unsigned(b: Builder, x: V, dtype: DType) -> V:
    """The i64 with an integer's bits, zeros above them."""
    return x if dtype == "i64" else widened(Scalars(b, dtype), x, dtype)


def _ones(b: Builder, x: V) -> V:
    """The number of set bits of an i64: sums of 2, 4 and 8 bits side by side, and of the bytes by a product."""
    m = Scalars(b, "i64")

    def moved(value: V, count: int) -> V:
        return m.insert(arith.ShRUIOp(value, m.const(count)))

    twos, fours, bytes_ = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
    x = m.sub(x, m.bitwise("and", moved(x, 1), m.const(twos)))
    x = m.add(m.bitwise("and", x, m.const(fours)), m.bitwise("and", moved(x, 2), m.const(fours)))
    x = m.bitwise("and", m.add(x, moved(x, 4)), m.const(bytes_))
    return moved(m.mul(x, m.const(0x0101010101010101)), 56)


@lowers("stablehlo.popcnt")
def _popcount(s: Scope, node: Node) -> Result:
    dtype = node.operands[0].dtype
    return s.elementwise(node, lambda m, x: cast(m.builder, _ones(m.builder, _unsigned(m.builder, x, dtype)), m.dtype))


@lowers("stablehlo.count_leading_zeros")
def _leading_zeros(s: Scope, node: Node) -> Result:
    """The width less the number of bits up to the highest set one."""
    dtype = node.operands[0].dtype

    def body(m: Scalars, x: V) -> V:
        wide = Scalars(m.builder, "i64")
        x = _unsigned(m.builder, x, dtype)
        for count in (1, 2, 4, 8, 16, 32):  # each bit below the highest one becomes set
            x = wide.bitwise("or", x, wide.insert(arith.ShRUIOp(x, wide.const(count))))
        return cast(m.builder, wide.sub(wide.const(BITS[dtype]), _ones(m.builder, x)), m.dtype)

    return s.elementwise(node, body)
