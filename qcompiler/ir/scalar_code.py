"""Scalar code of a loop body, written as Python expressions: each operator appends one `arith` op.

    i = code.index(0) * 32 + code.index(1)         # arith.muli, arith.addi on linalg.index
    value = where(i < 4, low, high).to("f32")      # arith.cmpi, arith.select, arith.sitofp

Integers compare and convert as signed numbers. `//` and `%` are unsigned: no operand of theirs may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xdsl.builder import Builder
from xdsl.dialects import arith, math, tensor
from xdsl.dialects.builtin import AnyFloat, IndexType, IntegerType, TensorType
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Attribute, Operation, SSAValue

from qcompiler.ir import build
from qcompiler.ir.types import ELEMENT_TYPES, dtype_of
from qcompiler.plan.kernel import DType

Number = int | float

_INTEGER = {
    "+": arith.AddiOp, "-": arith.SubiOp, "*": arith.MuliOp, "//": arith.DivUIOp, "%": arith.RemUIOp,
    "&": arith.AndIOp, "|": arith.OrIOp, "^": arith.XOrIOp, "<<": arith.ShLIOp, ">>": arith.ShRUIOp,
    "max": arith.MaxSIOp, "min": arith.MinSIOp,
}  # fmt: skip
_FLOAT = {
    "+": arith.AddfOp, "-": arith.SubfOp, "*": arith.MulfOp, "/": arith.DivfOp,
    "max": arith.MaximumfOp, "min": arith.MinimumfOp,
}  # fmt: skip
_COMPARISONS = {"<": ("slt", "olt"), "<=": ("sle", "ole"), ">": ("sgt", "ogt"), ">=": ("sge", "oge"),
                "==": ("eq", "oeq"), "!=": ("ne", "une")}  # fmt: skip
_FUNCTIONS = {
    "exp": math.ExpOp, "sqrt": math.SqrtOp, "tanh": math.TanhOp, "abs": math.AbsFOp, "log1p": math.Log1pOp,
    "roundeven": math.RoundEvenOp, "floor": math.FloorOp, "negative": arith.NegfOp,
}  # fmt: skip
_BYTE = ELEMENT_TYPES["ui8"]
"""The one type of integers that `arith` does not compute with: it is read as bits, and widened."""

Function = Literal["exp", "sqrt", "tanh", "abs", "log1p", "roundeven", "floor", "negative"]


@dataclass(frozen=True, eq=False)
class Scalar:
    """One value of a loop body. Operators take another one of its type, or a Python number."""

    b: Builder
    value: SSAValue

    @property
    def type(self) -> Attribute:
        return self.value.type

    @property
    def floats(self) -> bool:
        return isinstance(self.type, AnyFloat)

    # --- arithmetic ---

    def of(self, other: Scalar | Number) -> Scalar:
        """`other` in the type of this value."""
        return other if isinstance(other, Scalar) else self._literal(other)

    def _literal(self, number: Number) -> Scalar:
        if isinstance(self.type, IndexType):
            return Scalar(self.b, build.index_constant(self.b, int(number)))
        return Scalar(self.b, build.scalar(self.b, number, dtype_of(self.type)))

    def _do(self, operator: str, left: Scalar | Number, right: Scalar | Number) -> Scalar:
        table: dict[str, Any] = _FLOAT if self.floats else _INTEGER
        return self._made(table[operator](self.of(left).value, self.of(right).value))

    def _made(self, op: Operation) -> Scalar:
        return Scalar(self.b, self.b.insert(op).results[0])

    def __add__(self, other: Scalar | Number) -> Scalar:
        return self._do("+", self, other)

    def __sub__(self, other: Scalar | Number) -> Scalar:
        return self._do("-", self, other)

    def __rsub__(self, other: Number) -> Scalar:
        return self._do("-", other, self)

    def __mul__(self, other: Scalar | Number) -> Scalar:
        return self._do("*", self, other)

    def __truediv__(self, other: Scalar | Number) -> Scalar:
        return self._do("/", self, other)

    def __rtruediv__(self, other: Number) -> Scalar:
        return self._do("/", other, self)

    def __floordiv__(self, other: Scalar | Number) -> Scalar:
        return self._do("//", self, other)

    def __mod__(self, other: Scalar | Number) -> Scalar:
        return self._do("%", self, other)

    def __and__(self, other: Scalar | Number) -> Scalar:
        return self._do("&", self, other)

    def __or__(self, other: Scalar | Number) -> Scalar:
        return self._do("|", self, other)

    def __xor__(self, other: Scalar | Number) -> Scalar:
        return self._do("^", self, other)

    def __lshift__(self, other: Scalar | Number) -> Scalar:
        return self._do("<<", self, other)

    def __rshift__(self, other: Scalar | Number) -> Scalar:
        return self._do(">>", self, other)

    def maximum(self, other: Scalar | Number) -> Scalar:
        """The larger one; NaN if one of them is NaN."""
        return self._do("max", self, other)

    def minimum(self, other: Scalar | Number) -> Scalar:
        """The smaller one; NaN if one of them is NaN."""
        return self._do("min", self, other)

    def apply(self, function: Function) -> Scalar:
        """A function of `math`, or the negative."""
        make: Any = _FUNCTIONS[function]
        return self._made(make(self.value))

    # --- comparisons ---

    def _compare(self, operator: str, other: Scalar | Number) -> Scalar:
        whole, floating = _COMPARISONS[operator]
        right = self.of(other).value
        if self.floats:
            return self._made(arith.CmpfOp(self.value, right, floating))
        return self._made(arith.CmpiOp(self.value, right, whole))

    def __lt__(self, other: Scalar | Number) -> Scalar:
        return self._compare("<", other)

    def __le__(self, other: Scalar | Number) -> Scalar:
        return self._compare("<=", other)

    def __gt__(self, other: Scalar | Number) -> Scalar:
        return self._compare(">", other)

    def __ge__(self, other: Scalar | Number) -> Scalar:
        return self._compare(">=", other)

    def equals(self, other: Scalar | Number) -> Scalar:
        return self._compare("==", other)

    def differs(self, other: Scalar | Number) -> Scalar:
        return self._compare("!=", other)

    def is_nan(self) -> Scalar:
        return self._made(arith.CmpfOp(self.value, self.value, "uno"))

    def negated(self) -> Scalar:
        """The opposite of a boolean."""
        return self ^ 1

    # --- types ---

    def to(self, target: DType | Literal["index"]) -> Scalar:
        """The value in another type: integers as signed numbers (booleans as 0 and 1), floats cut to integers."""
        wanted = IndexType() if target == "index" else ELEMENT_TYPES[target]
        if wanted == self.type:
            return self
        if self.type == _BYTE:
            return self.bits("i8").unsigned("i32").to(target)
        if wanted == _BYTE:
            return self.to("i32").to("i8").bits("ui8")
        if isinstance(wanted, IndexType) or isinstance(self.type, IndexType):
            if isinstance(wanted, AnyFloat):
                return self.to("i64").to(target)
            return self._made(arith.IndexCastOp(self.value, wanted))
        return self._made(self._cast(wanted))

    def _cast(self, wanted: Attribute) -> Operation:
        if isinstance(wanted, AnyFloat):
            if isinstance(self.type, AnyFloat):
                if wanted.bitwidth == self.type.bitwidth:  # bf16 and f16
                    return arith.TruncFOp(self.to("f32").value, wanted)
                wider = wanted.bitwidth > self.type.bitwidth
                return arith.ExtFOp(self.value, wanted) if wider else arith.TruncFOp(self.value, wanted)
            bit = self.type == ELEMENT_TYPES["i1"]
            return arith.UIToFPOp(self.value, wanted) if bit else arith.SIToFPOp(self.value, wanted)
        assert isinstance(wanted, IntegerType)
        if isinstance(self.type, AnyFloat):
            return arith.FPToSIOp(self.value, wanted)
        assert isinstance(self.type, IntegerType)
        if wanted.width.data < self.type.width.data:
            return arith.TruncIOp(self.value, wanted)
        bit = self.type.width.data == 1
        return arith.ExtUIOp(self.value, wanted) if bit else arith.ExtSIOp(self.value, wanted)

    def unsigned(self, target: DType = "i32") -> Scalar:
        """An integer, whose bits are a number that is not negative, in a wider type."""
        wanted = ELEMENT_TYPES[target]
        assert isinstance(wanted, IntegerType)
        return self if wanted == self.type else self._made(arith.ExtUIOp(self.value, wanted))

    def bits(self, target: DType) -> Scalar:
        """The same bits as another type of that size."""
        return self._made(arith.BitcastOp(self.value, ELEMENT_TYPES[target]))


def where(condition: Scalar, yes: Scalar, no: Scalar | Number) -> Scalar:
    """`arith.select`: both sides are computed."""
    value = condition.b.insert(arith.SelectOp(condition.value, yes.value, yes.of(no).value)).result
    return Scalar(condition.b, value)


@dataclass(frozen=True)
class Code:
    """A loop body that is being built."""

    b: Builder

    def index(self, axis: int) -> Scalar:
        """The loop's index."""
        return Scalar(self.b, self.b.insert(IndexOp(axis)).result)

    def constant(self, number: Number, dtype: DType | Literal["index"]) -> Scalar:
        """A number."""
        if dtype == "index":
            return Scalar(self.b, build.index_constant(self.b, int(number)))
        return Scalar(self.b, build.scalar(self.b, number, dtype))

    def scalar(self, value: SSAValue) -> Scalar:
        return Scalar(self.b, value)

    def read(self, source: SSAValue, *indices: Scalar) -> Scalar:
        """An element of a tensor outside of the loop."""
        assert isinstance(source.type, TensorType)
        op = tensor.ExtractOp(source, [i.value for i in indices], source.type.element_type)
        return Scalar(self.b, self.b.insert(op).result)


def all_of(conditions: Sequence[Scalar]) -> Scalar:
    """Whether all conditions hold."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = found & condition
    return found
