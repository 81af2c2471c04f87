"""Bodies of linalg.generic: scalar ops of a text, as plain records, and as the IR's scalar ops.

    %1 = arith.mulf %in, %in_0 : f32        Scalar("arith.mulf", (0, 1), "f32")
    linalg.yield %1

The records hold no parser's objects. Ops on 16-bit floats compute in fp32 and round after each, which is what arith
means: sums, products, quotients and roots of such numbers are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, IntegerType
from xdsl.ir import Operation, SSAValue

from qcompiler.frontends.common.scalars import _FUNCTIONS as FUNCTIONS
from qcompiler.frontends.common.scalars import Scalars, cast
from qcompiler.frontends.mlir.scalars import PREDICATES
from qcompiler.ir.scalar_ops import RemFOp
from qcompiler.ir.types import ELEMENT_TYPES, dtype_of
from qcompiler.plan.kernel import DType

FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true",
)  # fmt: skip
"""Predicates of arith.cmpf, by number."""


@dataclass
class Scalar:
    """One op. `operands` are places of earlier values: the body's inputs first, then its ops."""

    op: str
    operands: tuple[int, ...]
    element: str
    number: Any = None
    """The value of a constant, the axis of an index, the name of a predicate."""


@dataclass
class ScalarBody:
    """Inputs with their element types, and ops. `extra` are inputs that were found while ops were read, by place."""

    inputs: list[str]
    ops: list[Scalar] = field(default_factory=list)
    extra: dict[int, str] = field(default_factory=dict)

    def op_at(self, place: int) -> Scalar | None:
        """The op that computes a value; None for an input."""
        is_input = place < len(self.inputs) or place in self.extra
        return None if is_input else self.ops[place - len(self.inputs)]

    def element(self, place: int) -> str:
        """The element type of a value."""
        op = self.op_at(place)
        if op is not None:
            return op.element
        return self.extra[place] if place in self.extra else self.inputs[place]

    def reads(self, place: int) -> set[int]:
        """The inputs that a value depends on."""
        return {each for each in self.needs([place]) if self.op_at(each) is None}

    def needs(self, places: Sequence[int]) -> set[int]:
        """All places that these values are computed from, themselves included."""
        found, stack = set[int](), list(places)
        while stack:
            place = stack.pop()
            if place not in found:
                found.add(place)
                op = self.op_at(place)
                stack += op.operands if op is not None else ()
        return found

    def add(self, op: Scalar) -> int:
        """Appends an op; returns its place."""
        self.ops.append(op)
        return len(self.inputs) + len(self.ops) - 1

    def __str__(self) -> str:
        return f"{len(self.ops)} scalar ops"


_BINARY: dict[str, Callable[[SSAValue, SSAValue], Operation]] = {
    "arith.addf": arith.AddfOp, "arith.subf": arith.SubfOp, "arith.mulf": arith.MulfOp, "arith.divf": arith.DivfOp,
    "arith.remf": RemFOp, "arith.maximumf": arith.MaximumfOp, "arith.minimumf": arith.MinimumfOp,
    "arith.maxnumf": arith.MaxnumfOp, "arith.minnumf": arith.MinnumfOp, "arith.addi": arith.AddiOp,
    "arith.subi": arith.SubiOp, "arith.muli": arith.MuliOp, "arith.divsi": arith.DivSIOp, "arith.remsi": arith.RemSIOp,
    "arith.floordivsi": arith.FloorDivSIOp, "arith.ceildivsi": arith.CeilDivSIOp, "arith.divui": arith.DivUIOp,
    "arith.remui": arith.RemUIOp, "arith.andi": arith.AndIOp, "arith.ori": arith.OrIOp, "arith.xori": arith.XOrIOp,
    "arith.shli": arith.ShLIOp, "arith.shrsi": arith.ShRSIOp, "arith.shrui": arith.ShRUIOp,
    "arith.maxsi": arith.MaxSIOp, "arith.minsi": arith.MinSIOp, "arith.maxui": arith.MaxUIOp,
    "arith.minui": arith.MinUIOp,
}  # fmt: skip
_MATH = {f"math.{name}": name for name in FUNCTIONS if name not in ("erfc",)}
_MATH["math.absf"] = "abs"
_CASTS = (
    "arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.extsi", "arith.extui",
    "arith.trunci", "arith.index_cast", "arith.index_castui",
)  # fmt: skip
OPS = frozenset({
    *_BINARY, *_MATH, *_CASTS, "arith.constant", "arith.cmpf", "arith.cmpi", "arith.select", "arith.negf",
    "arith.bitcast", "math.absi", "math.fma", "math.round", "linalg.index", "math.cbrt", "math.fpowi",
})  # fmt: skip
"""Every op that a body may have."""


def emit(inner: Builder, body: ScalarBody, inputs: Mapping[int, SSAValue], wanted: Sequence[int]) -> list[SSAValue]:
    """The values at these places, and only the ops that they need. `inputs` are scalars by the places that are read."""
    values = dict(inputs)
    for place in sorted(body.needs(wanted)):
        op = body.op_at(place)
        if op is not None:
            values[place] = _emit_one(inner, op, [values[each] for each in op.operands])
    return [values[place] for place in wanted]


def _emit_one(inner: Builder, op: Scalar, operands: list[SSAValue]) -> SSAValue:
    """One op; 16-bit floats widen to fp32 and round."""
    dtype = _dtype(op.element)
    if op.op == "arith.constant":
        return Scalars(inner, dtype).const(op.number)
    if op.op == "linalg.index":
        return Scalars(inner, "i64").index(op.number)
    if op.op in _CASTS:
        return _convert(inner, op, operands[0], dtype)
    if op.op == "arith.select":
        return inner.insert(arith.SelectOp(*operands)).results[0]
    if op.op == "arith.bitcast":
        return inner.insert(arith.BitcastOp(operands[0], ELEMENT_TYPES[dtype])).results[0]
    source = dtype_of(operands[0].type)
    wide: DType = "f32" if source in ("f16", "bf16") else source
    if op.op == "math.fpowi":
        made = _power(inner, operands[0], operands[1], wide)
        return cast(inner, made, dtype)
    given = [cast(inner, each, wide) for each in operands]
    made = _computed(inner, op, given, Scalars(inner, wide))
    return cast(inner, made, dtype) if dtype in ("f16", "bf16") else made


def _computed(inner: Builder, op: Scalar, given: list[SSAValue], m: Scalars) -> SSAValue:
    if op.op in _BINARY:
        return inner.insert(_BINARY[op.op](given[0], given[1])).results[0]
    if op.op == "arith.cmpf":
        return inner.insert(arith.CmpfOp(given[0], given[1], str(op.number))).results[0]
    if op.op == "arith.cmpi":
        return inner.insert(arith.CmpiOp(given[0], given[1], str(op.number))).results[0]
    if op.op in ("arith.negf", "math.absf", "math.absi"):
        return m.neg(given[0]) if op.op == "arith.negf" else m.abs(given[0])
    if op.op == "math.fma":
        return m.add(m.mul(given[0], given[1]), given[2])
    if op.op == "math.round":  # halves away from zero
        whole = m.call("trunc", given[0])
        up = m.compare("ge", m.abs(m.sub(given[0], whole)), m.const(0.5))
        return m.call("copysign", m.add(m.abs(whole), m.select(up, m.const(1), m.const(0))), given[0])
    if op.op == "math.cbrt":
        return m.call("copysign", m.call("powf", m.abs(given[0]), m.const(1 / 3)), given[0])
    return m.call(_MATH[op.op], *given)


def _power(inner: Builder, base: SSAValue, exponent: SSAValue, wide: DType) -> SSAValue:
    """A float to a whole power: products for small numbers, as MLIR lowers it."""
    m, owner = Scalars(inner, wide), exponent.owner
    x = cast(inner, base, wide)
    if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr):
        times = owner.value.value.data
        if abs(times) <= 8:
            made = m.power(x, abs(times))
            return m.div(m.const(1), made) if times < 0 else made
    return m.call("powf", x, cast(inner, exponent, wide))


def _convert(inner: Builder, op: Scalar, value: SSAValue, dtype: DType) -> SSAValue:
    """Conversions of arith; those of truth values differ from torch's, which `cast` has."""
    source = dtype_of(value.type)
    target = ELEMENT_TYPES[dtype]
    if source == dtype:
        return value
    if source == "i1" and op.op in ("arith.extsi", "arith.sitofp", "arith.index_cast"):
        wide = cast(inner, value, "i32")
        return cast(inner, Scalars(inner, "i32").neg(wide), dtype)  # a signed true is -1
    if op.op == "arith.trunci" and isinstance(target, IntegerType):
        return inner.insert(arith.TruncIOp(value, target)).results[0]
    if op.op in ("arith.extui", "arith.uitofp", "arith.index_castui") and source != "i1":
        bits = {"i8": 0xFF, "i16": 0xFFFF, "i32": 0xFFFFFFFF}.get(source)
        if bits is not None:
            wide64 = Scalars(inner, "i64")
            value = wide64.bitwise("and", cast(inner, value, "i64"), wide64.const(bits))
    return cast(inner, value, dtype)


def _dtype(element: str) -> DType:
    return "i64" if element == "index" else element  # type: ignore[return-value]


def predicate(op: str, number: int) -> str:
    """The name of a comparison."""
    return FLOAT_PREDICATES[number] if op == "arith.cmpf" else PREDICATES[number]
