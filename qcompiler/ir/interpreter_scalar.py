"""The meaning of `arith` and `math`: one NumPy rule per op, on whole arrays, in the exact types.

bf16 and f16 compute in fp32 and round once (nearest even), as the emitted code does. Transcendental functions of f32
are computed in f64 and rounded, so they are within half an ulp (plus a hair) of the true value. Undefined results
(integer division by zero, shifts past the width) are those of NumPy; a program must not depend on them.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IndexType, IntegerAttr, IntegerType, TensorType
from xdsl.ir import Attribute, Operation

from qcompiler.errors import InterpreterError
from qcompiler.ir.types import dtype_of
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
Binary = Callable[[Array, Array], Array]
Unary = Callable[[Array], Array]

_BF16, _F16, _F32, _F64, _BOOL = (NUMPY_DTYPES[d] for d in ("bf16", "f16", "f32", "f64", "i1"))
_UNROUNDED: ContextVar[bool] = ContextVar("unrounded", default=False)


class BitsError(InterpreterError):
    """A program reads or makes the bits of a 16-bit float, which is held in f32."""


@contextmanager
def unrounded() -> Iterator[None]:
    """Within it, bf16 and f16 numbers are held in f32, and no op of the IR rounds to them (torch does, where it is
    called). BitsError where a program reads their bits."""
    token = _UNROUNDED.set(True)
    try:
        yield
    finally:
        _UNROUNDED.reset(token)


def held_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype that holds numbers of an element type: its own, but f32 where `unrounded`."""
    held: np.dtype[Any] = NUMPY_DTYPES[dtype]
    return _F32 if held in (_BF16, _F16) and _UNROUNDED.get() else held


def numpy_dtype(type_: Attribute) -> np.dtype[Any]:
    """The NumPy dtype of a scalar type, or of a tensor's elements; index is int64. See `held_dtype`."""
    element = _element(type_)
    return np.dtype(np.int64) if isinstance(element, IndexType) else held_dtype(dtype_of(element))


def _element(type_: Attribute) -> Attribute:
    return type_.element_type if isinstance(type_, TensorType) else type_


# --- floats ----------------------------------------------------------------------------------------------------------


def _widened(function: Callable[..., Array], narrow: dict[np.dtype[Any], np.dtype[Any]]) -> Callable[..., Array]:
    """`function`, computed in a wider type and rounded once to the operands' type."""

    def rule(*operands: Array) -> Array:
        dtype = operands[0].dtype
        wide = narrow.get(dtype)
        if wide is None:
            return np.asarray(function(*operands))
        return np.asarray(function(*(x.astype(wide) for x in operands))).astype(dtype)

    return rule


def _exact(function: Callable[..., Array]) -> Callable[..., Array]:
    """For operations that IEEE rounds correctly: only the 16-bit types are widened, to f32."""
    return _widened(function, {_BF16: _F32, _F16: _F32})


def _precise(function: Callable[..., Array]) -> Callable[..., Array]:
    """For functions whose f32 versions err by ulps: all types are widened to f64."""
    return _widened(function, {_BF16: _F64, _F16: _F64, _F32: _F64})


def _erf(x: Array) -> Array:
    return np.fromiter(map(pymath.erf, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape)


def _erfc(x: Array) -> Array:
    return np.fromiter(map(pymath.erfc, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape)


def _round_away(x: Array) -> Array:
    return np.asarray(np.trunc(x + np.copysign(0.5, x)))


_FLOAT_BINARY: dict[str, Binary] = {
    "arith.addf": _exact(np.add),
    "arith.subf": _exact(np.subtract),
    "arith.mulf": _exact(np.multiply),
    "arith.divf": _exact(np.divide),
    "arith.maximumf": _exact(np.maximum),
    "arith.minimumf": _exact(np.minimum),
    "arith.maxnumf": _exact(np.fmax),
    "arith.minnumf": _exact(np.fmin),
    "arith.remf": _exact(np.fmod),
    "math.copysign": _exact(np.copysign),
    "math.atan2": _precise(np.arctan2),
    "math.powf": _precise(np.power),
}

_FLOAT_UNARY: dict[str, Unary] = {
    "arith.negf": _exact(np.negative),
    "math.absf": _exact(np.abs),
    "math.ceil": _exact(np.ceil),
    "math.floor": _exact(np.floor),
    "math.trunc": _exact(np.trunc),
    "math.roundeven": _exact(np.rint),
    "math.round": _precise(_round_away),
    "math.sqrt": _exact(np.sqrt),
    "math.rsqrt": _precise(lambda x: 1.0 / np.sqrt(x)),
    "math.cbrt": _precise(np.cbrt),
    "math.exp": _precise(np.exp),
    "math.exp2": _precise(np.exp2),
    "math.expm1": _precise(np.expm1),
    "math.log": _precise(np.log),
    "math.log2": _precise(np.log2),
    "math.log10": _precise(np.log10),
    "math.log1p": _precise(np.log1p),
    "math.sin": _precise(np.sin),
    "math.cos": _precise(np.cos),
    "math.tan": _precise(np.tan),
    "math.asin": _precise(np.arcsin),
    "math.acos": _precise(np.arccos),
    "math.atan": _precise(np.arctan),
    "math.sinh": _precise(np.sinh),
    "math.cosh": _precise(np.cosh),
    "math.tanh": _precise(np.tanh),
    "math.asinh": _precise(np.arcsinh),
    "math.acosh": _precise(np.arccosh),
    "math.atanh": _precise(np.arctanh),
    "math.erf": _precise(_erf),
    "math.erfc": _precise(_erfc),
}


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a * b + c  # in f64 for f32 operands: the product is exact there


# --- integers --------------------------------------------------------------------------------------------------------


def _modulo_two(function: Binary, on_bools: Binary) -> Binary:
    """Integer arithmetic, which wraps; on i1 it is modulo two."""

    def rule(a: Array, b: Array) -> Array:
        return on_bools(a, b) if a.dtype == _BOOL else function(a, b)

    return rule


def _signed(x: Array) -> Array:
    """i1 as a signed number: true is -1."""
    return -x.astype(np.int8) if x.dtype == _BOOL else x


def _unsigned(x: Array) -> Array:
    if x.dtype == _BOOL:
        return x.astype(np.uint8)
    return x.view(np.dtype(f"u{x.dtype.itemsize}")) if x.dtype.kind == "i" else x


def _as_signed(function: Binary) -> Binary:
    return lambda a, b: np.asarray(function(_signed(a), _signed(b))).astype(a.dtype)


def _as_unsigned(function: Binary) -> Binary:
    return lambda a, b: np.asarray(function(_unsigned(a), _unsigned(b))).astype(a.dtype)


def _divide_to_zero(a: Array, b: Array) -> Array:
    quotient = np.floor_divide(a, b)
    return np.asarray(quotient + ((quotient < 0) & (quotient * b != a)), a.dtype)


def _integer_power(a: Array, b: Array) -> Array:
    """Integer power, which wraps. A negative exponent gives 1, -1 or 0."""
    inverse = np.where(a == 1, 1, np.where(a == -1, np.where(b & 1, -1, 1), 0)).astype(a.dtype)
    return np.asarray(np.where(b < 0, inverse, np.power(a, np.maximum(b, 0))), a.dtype)


_INTEGER_BINARY: dict[str, Binary] = {
    "arith.addi": _modulo_two(np.add, np.logical_xor),
    "arith.subi": _modulo_two(np.subtract, np.logical_xor),
    "arith.muli": _modulo_two(np.multiply, np.logical_and),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": _as_signed(np.maximum),
    "arith.minsi": _as_signed(np.minimum),
    "arith.maxui": _as_unsigned(np.maximum),
    "arith.minui": _as_unsigned(np.minimum),
    "arith.divsi": _as_signed(_divide_to_zero),
    "arith.floordivsi": _as_signed(np.floor_divide),
    "arith.ceildivsi": _as_signed(lambda a, b: -np.floor_divide(-a, b)),
    "arith.remsi": _as_signed(np.fmod),
    "arith.divui": _as_unsigned(np.floor_divide),
    "arith.ceildivui": _as_unsigned(lambda a, b: np.floor_divide(a, b) + (np.remainder(a, b) != 0)),
    "arith.remui": _as_unsigned(np.remainder),
    "arith.shli": np.left_shift,
    "arith.shrsi": _as_signed(np.right_shift),
    "arith.shrui": _as_unsigned(np.right_shift),
    "math.ipowi": _integer_power,
}

# indexed by arith.cmpi's predicate number
_CMPI: tuple[Binary, ...] = (
    np.equal,
    np.not_equal,
    *(lambda a, b, f=f: f(_signed(a), _signed(b)) for f in (np.less, np.less_equal, np.greater, np.greater_equal)),
    *(lambda a, b, f=f: f(_unsigned(a), _unsigned(b)) for f in (np.less, np.less_equal, np.greater, np.greater_equal)),
)


def _ordered(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


def _cmpf(predicate: int, a: Array, b: Array) -> Array:
    """The comparison with this number in MLIR's order: false, oeq ogt oge olt ole one, ord, ueq ugt uge ult ule une,
    uno, true."""
    if predicate in (0, 15):
        return np.full(np.broadcast_shapes(a.shape, b.shape), predicate == 15)
    if predicate == 7:
        return _ordered(a, b)
    if predicate == 14:
        return ~_ordered(a, b)
    functions = (np.equal, np.greater, np.greater_equal, np.less, np.less_equal, np.not_equal)
    if predicate < 7:
        return functions[predicate - 1](a, b) & _ordered(a, b)
    return functions[predicate - 8](a, b) | ~_ordered(a, b)


# --- casts and the rest ----------------------------------------------------------------------------------------------


def _cast(op: Operation, x: Array) -> Array:
    target = numpy_dtype(op.results[0].type)
    match op.name:
        case "arith.extsi" | "arith.sitofp" | "arith.index_cast":
            return _signed(x).astype(target)
        case "arith.extui" | "arith.uitofp" | "arith.index_castui":
            return _unsigned(x).astype(target)
        case "arith.trunci":
            return np.asarray((x & 1).astype(_BOOL) if target == _BOOL else x.astype(target))
        case "arith.fptosi" | "arith.fptoui":
            return _float_to_int(x, target, unsigned=op.name == "arith.fptoui")
        case "arith.bitcast":
            types = {dtype_of(_element(value.type)) for value in (op.operands[0], op.results[0])}
            if _UNROUNDED.get() and types & {"bf16", "f16"}:
                raise BitsError("arith.bitcast of a 16-bit float that is held in f32")
            return np.asarray(np.ascontiguousarray(x).view(target)).reshape(x.shape)
        case _:  # extf, truncf
            return np.asarray(x.astype(target))


def _float_to_int(x: Array, target: Any, *, unsigned: bool) -> Array:
    """Truncates and saturates; NaN gives 0. So do the kernels (`qc_ftoi`) and XLA."""
    if target == _BOOL:
        return np.asarray(x != 0)
    kind = np.dtype(target)
    wanted = np.dtype(kind.str.replace("i", "u")) if unsigned else kind
    limits, whole = np.iinfo(wanted), np.trunc(x.astype(_F64))
    above, below = whole >= float(limits.max) + (wanted.itemsize < 8), whole < float(limits.min)
    made = np.where(above | below | np.isnan(whole), 0, whole).astype(wanted)
    made = np.where(above, wanted.type(limits.max), np.where(below, wanted.type(limits.min), made))
    return np.asarray(made, wanted).view(kind)


_CASTS = {
    "arith.extsi", "arith.sitofp", "arith.index_cast", "arith.extui", "arith.uitofp", "arith.index_castui",
    "arith.trunci", "arith.fptosi", "arith.fptoui", "arith.bitcast", "arith.extf", "arith.truncf",
}  # fmt: skip


def constant_value(op: arith.ConstantOp) -> Array:
    """The value of an `arith.constant`: rank 0 for a scalar, the whole array for a dense tensor."""
    dtype = numpy_dtype(op.result.type)
    match op.value:
        case IntegerAttr(value=value):
            return np.asarray(value.data & 1 if dtype == _BOOL else value.data, dtype)
        case FloatAttr(value=value):
            return np.asarray(value.data, np.float64).astype(dtype)
        case DenseIntOrFPElementsAttr() as dense:
            shape = op.result.type.get_shape() if isinstance(op.result.type, TensorType) else ()
            values = np.asarray(
                dense.get_values(), np.int64 if isinstance(dense.get_element_type(), IntegerType) else _F64
            )
            return np.broadcast_to(values.astype(dtype).reshape(shape if values.size != 1 else ()), shape)
        case _:
            raise InterpreterError(f"arith.constant of {op.value} has no meaning here")


def evaluate_scalar(op: Operation, operands: tuple[Array, ...]) -> Array | None:
    """The value of an `arith` or `math` op on arrays that broadcast together; None for any other op."""
    name = op.name
    if (unary := _FLOAT_UNARY.get(name)) is not None:
        return unary(operands[0])
    if (binary := _FLOAT_BINARY.get(name) or _INTEGER_BINARY.get(name)) is not None:
        return np.asarray(binary(operands[0], operands[1]))
    if name in _CASTS:
        return np.asarray(_cast(op, operands[0]))
    match op:
        case arith.ConstantOp():
            return constant_value(op)
        case arith.CmpfOp():
            return np.asarray(_cmpf(op.predicate.value.data, operands[0], operands[1]))
        case arith.CmpiOp():
            return np.asarray(_CMPI[op.predicate.value.data](operands[0], operands[1]))
        case arith.SelectOp():
            return np.where(operands[0], operands[1], operands[2])
        case math.FmaOp():
            return _precise(_fma)(*operands)
        case math.AbsIOp():
            return np.asarray(np.abs(operands[0]))
        case math.FPowIOp():
            return _precise(np.power)(operands[0], operands[1].astype(operands[0].dtype))
        case math.CtPopOp():
            return np.bitwise_count(_unsigned(operands[0])).astype(operands[0].dtype)
        case _:
            return None
