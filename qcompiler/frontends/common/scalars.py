"""A small vocabulary for scalar bodies: torch's arithmetic on one element, as arith and math ops.

Each method takes and returns scalars of one type.  `cast` converts as torch does.  Nothing is computed in 16-bit
floats: bodies widen to fp32 (`opmath`), compute, and round once at the end, like torch's CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IndexType, IntegerType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir.build import scalar
from qcompiler.ir.scalar_ops import ErfcOp, RemFOp
from qcompiler.ir.types import ELEMENT_TYPES, dtype_of
from qcompiler.plan.kernel import DType

FLOATS: tuple[DType, ...] = ("f64", "f32", "f16", "bf16")
_BITS: dict[DType, int] = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 1}

BinaryOp = Callable[[SSAValue, SSAValue], Operation]
Compare = Literal["eq", "ne", "lt", "le", "gt", "ge"]
_FLOAT_COMPARE = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}


def opmath(dtype: DType) -> DType:
    """The type to compute in: torch's fp32 for 16-bit floats; i32 for ui8, since arith works on signless integers."""
    return "f32" if dtype in ("f16", "bf16") else "i32" if dtype == "ui8" else dtype


class Scalars:
    """Ops on scalars of one compute type `dtype`, inserted through `builder`."""

    def __init__(self, builder: Builder, dtype: DType) -> None:
        self.builder, self.dtype = builder, dtype
        self.floating = dtype in FLOATS

    def insert(self, op: Operation) -> SSAValue:
        return self.builder.insert(op).results[0]

    def const(self, value: float | int | bool) -> SSAValue:
        return scalar(self.builder, value, self.dtype)

    @property
    def bits(self) -> int:
        """The width of an integer type."""
        return _BITS[self.dtype]

    # --- arithmetic ---

    def _pick(self, a: SSAValue, b: SSAValue, floating: BinaryOp, integer: BinaryOp) -> SSAValue:
        return self.insert((floating if self.floating else integer)(a, b))

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self._pick(a, b, arith.AddfOp, arith.OrIOp if self.dtype == "i1" else arith.AddiOp)

    def sub(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self._pick(a, b, arith.SubfOp, arith.SubiOp)

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self._pick(a, b, arith.MulfOp, arith.AndIOp if self.dtype == "i1" else arith.MuliOp)

    def div(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """True division of floats, division towards zero of integers."""
        return self._pick(a, b, arith.DivfOp, arith.DivSIOp)

    def rem(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """C's remainder, with the sign of `a`; exact for floats, and `a` itself if `b` is infinite."""
        return self._pick(a, b, RemFOp, arith.RemSIOp)

    def maximum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """NaN propagates."""
        integer = arith.MaxUIOp if self.dtype == "i1" else arith.MaxSIOp
        return self._pick(a, b, arith.MaximumfOp, integer)

    def minimum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        integer = arith.MinUIOp if self.dtype == "i1" else arith.MinSIOp
        return self._pick(a, b, arith.MinimumfOp, integer)

    def number_maximum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """The other operand if one is NaN (C's fmax)."""
        return self.insert(arith.MaxnumfOp(a, b)) if self.floating else self.maximum(a, b)

    def number_minimum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.MinnumfOp(a, b)) if self.floating else self.minimum(a, b)

    def neg(self, a: SSAValue) -> SSAValue:
        return self.insert(arith.NegfOp(a)) if self.floating else self.sub(self.const(0), a)

    def abs(self, a: SSAValue) -> SSAValue:
        return self.insert(math.AbsFOp(a)) if self.floating else self.maximum(a, self.neg(a))

    def bitwise(self, kind: Literal["and", "or", "xor"], a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert({"and": arith.AndIOp, "or": arith.OrIOp, "xor": arith.XOrIOp}[kind](a, b))

    # --- decisions ---

    def compare(self, kind: Compare, a: SSAValue, b: SSAValue) -> SSAValue:
        """An i1; ordered for floats (`ne` is true for NaN)."""
        if self.floating:
            return self.insert(arith.CmpfOp(a, b, _FLOAT_COMPARE[kind]))
        sign = "" if kind in ("eq", "ne") else "u" if self.dtype == "i1" else "s"
        return self.insert(arith.CmpiOp(a, b, sign + kind))

    def select(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.SelectOp(condition, a, b))

    def is_nan(self, a: SSAValue) -> SSAValue:
        return self.insert(arith.CmpfOp(a, a, "uno"))

    def nonzero(self, a: SSAValue) -> SSAValue:
        """Whether `a` is not 0; for a widened truth value, that truth value."""
        owner = a.owner
        if isinstance(owner, arith.UIToFPOp | arith.ExtUIOp) and owner.operands[0].type == ELEMENT_TYPES["i1"]:
            return owner.operands[0]
        return a if self.dtype == "i1" else self.compare("ne", a, self.const(0))

    # --- functions (floats) ---

    def call(self, name: str, *operands: SSAValue) -> SSAValue:
        return self.insert(_FUNCTIONS[name](*operands))

    def power(self, a: SSAValue, exponent: int) -> SSAValue:
        """`a` to a non-negative integer, by repeated squaring."""
        result: SSAValue | None = None
        square = a
        while exponent:
            if exponent & 1:
                result = square if result is None else self.mul(result, square)
            exponent >>= 1
            if exponent:
                square = self.mul(square, square)
        return result if result is not None else self.const(1)

    def index(self, axis: int) -> SSAValue:
        """The loop's index as i64, converted to the compute type."""
        i = self.insert(IndexOp(axis))
        number = self.insert(arith.IndexCastOp(i, ELEMENT_TYPES["i64"]))
        return cast(self.builder, number, self.dtype)


_FUNCTIONS: dict[str, Callable[..., Operation]] = {
    "exp": math.ExpOp, "exp2": math.Exp2Op, "expm1": math.ExpM1Op, "log": math.LogOp, "log2": math.Log2Op,
    "log10": math.Log10Op, "log1p": math.Log1pOp, "sin": math.SinOp, "cos": math.CosOp, "tan": math.TanOp,
    "asin": math.AsinOp, "acos": math.AcosOp, "atan": math.AtanOp, "sinh": math.SinhOp, "cosh": math.CoshOp,
    "tanh": math.TanhOp, "asinh": math.AsinhOp, "acosh": math.AcoshOp, "atanh": math.AtanhOp, "erf": math.ErfOp,
    "erfc": ErfcOp,
    "sqrt": math.SqrtOp, "rsqrt": math.RsqrtOp, "ceil": math.CeilOp, "floor": math.FloorOp, "trunc": math.TruncOp,
    "roundeven": math.RoundEvenOp, "powf": math.PowFOp, "atan2": math.Atan2Op, "copysign": math.CopySignOp,
    "ipowi": math.IPowIOp,
}  # fmt: skip


def cast(builder: Builder, value: SSAValue, target: DType) -> SSAValue:
    """Converts a scalar like torch's `.to(dtype)`: floats truncate to integers, anything nonzero is True."""
    if isinstance(value.type, IndexType):
        value = builder.insert(arith.IndexCastOp(value, ELEMENT_TYPES["i64"])).results[0]
    source = dtype_of(value.type)
    if source == target:
        return value
    if source == "ui8":  # signless first: arith has no unsigned types
        byte = builder.insert(arith.BitcastOp(value, ELEMENT_TYPES["i8"])).results[0]
        return cast(builder, builder.insert(arith.ExtUIOp(byte, _integer(ELEMENT_TYPES["i32"]))).results[0], target)
    if target == "ui8":
        wide = cast(builder, value, "i32")
        byte = builder.insert(arith.TruncIOp(wide, _integer(ELEMENT_TYPES["i8"]))).results[0]
        return builder.insert(arith.BitcastOp(byte, ELEMENT_TYPES["ui8"])).results[0]
    if target == "i1":
        return Scalars(builder, source).nonzero(value)
    if source in FLOATS and target in FLOATS:
        return _cast_float(builder, value, source, target)
    if source in FLOATS:
        wide = _cast_float(builder, value, source, opmath(source))
        return builder.insert(arith.FPToSIOp(wide, _integer(ELEMENT_TYPES[target]))).results[0]
    if target in FLOATS:
        compute = opmath(target)
        convert = arith.UIToFPOp if source == "i1" else arith.SIToFPOp
        number = builder.insert(convert(value, ELEMENT_TYPES[compute])).results[0]  # type: ignore[arg-type]
        return _cast_float(builder, number, compute, target)
    if _BITS[target] < _BITS[source]:
        return builder.insert(arith.TruncIOp(value, _integer(ELEMENT_TYPES[target]))).results[0]
    extend = arith.ExtUIOp if source == "i1" else arith.ExtSIOp
    return builder.insert(extend(value, _integer(ELEMENT_TYPES[target]))).results[0]


def _integer(type_: object) -> IntegerType:
    assert isinstance(type_, IntegerType)
    return type_


def _cast_float(builder: Builder, value: SSAValue, source: DType, target: DType) -> SSAValue:
    if source == target:
        return value
    if source in ("f16", "bf16") and target in ("f16", "bf16"):
        return _cast_float(builder, _cast_float(builder, value, source, "f32"), "f32", target)
    wider = source in ("f16", "bf16") or target == "f64"
    op = arith.ExtFOp if wider else arith.TruncFOp
    return builder.insert(op(value, ELEMENT_TYPES[target])).results[0]
