"""The types that each op of a scalar body takes and gives. Plans are checked against this list before emission.

`RULES` has every op that emitters print (kernels/scalar.py); a test compares the two lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from qcompiler.errors import PlanError
from qcompiler.plan.operands import ScalarOp, ScalarProgram

MAX_OPS = 4096
"""The most ops of a body."""

FLOATS = frozenset({"f64", "f32", "f16", "bf16"})
BITS = {
    "f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i64": 64, "index": 64, "i32": 32, "i16": 16, "i8": 8, "ui8": 8,
    "i1": 1,
}  # fmt: skip
INTEGERS = frozenset(BITS) - FLOATS
_NUMBERS = INTEGERS - {"index"}

_ORDERINGS = ("eq", "gt", "ge", "lt", "le", "ne")
_CMPF = frozenset(("false", "ord", "uno", "true", *(f"{kind}{each}" for kind in "ou" for each in _ORDERINGS)))
_CMPI = frozenset(("eq", "ne", *(f"{kind}{each}" for kind in "su" for each in _ORDERINGS[1:5])))

Rule = Callable[[ScalarOp, tuple[str, ...]], bool]


def _same(kinds: frozenset[str], count: int) -> Rule:
    """`count` arguments of the result's type, which is one of `kinds`."""
    return lambda op, args: op.dtype in kinds and args == (op.dtype,) * count


def _from_to(source: frozenset[str], target: frozenset[str]) -> Rule:
    return lambda op, args: len(args) == 1 and args[0] in source and op.dtype in target


def _wider(kinds: frozenset[str]) -> Rule:
    """To a type of the same kind with more bits, as MLIR requires."""
    return lambda op, args: len(args) == 1 and {args[0], op.dtype} <= kinds and BITS[args[0]] < BITS[op.dtype]


def _narrower(kinds: frozenset[str]) -> Rule:
    return lambda op, args: len(args) == 1 and {args[0], op.dtype} <= kinds and BITS[args[0]] > BITS[op.dtype]


def _casts_index(op: ScalarOp, args: tuple[str, ...]) -> bool:
    """From "index" to an integer, or back."""
    return len(args) == 1 and {args[0], op.dtype} <= INTEGERS and (args[0] == "index") != (op.dtype == "index")


def _compares(kinds: frozenset[str], predicates: frozenset[str]) -> Rule:
    def rule(op: ScalarOp, args: tuple[str, ...]) -> bool:
        return op.dtype == "i1" and len(args) == 2 and args[0] == args[1] in kinds and op.predicate in predicates

    return rule


def _selects(op: ScalarOp, args: tuple[str, ...]) -> bool:
    return args == ("i1", op.dtype, op.dtype)


def _reinterprets(op: ScalarOp, args: tuple[str, ...]) -> bool:
    """Between types of the same width, without bf16, f16 and i1: kernels compute these in other types."""
    return len(args) == 1 and BITS[args[0]] == BITS[op.dtype] and not {args[0], op.dtype} & {"bf16", "f16", "i1"}


def _constant(op: ScalarOp, args: tuple[str, ...]) -> bool:
    """A number of the type. An integer may be signed or unsigned."""
    text = op.value
    if args or text is None:
        return False
    if op.dtype in FLOATS:
        return is_float(text)
    if text in ("true", "false"):
        return True
    try:
        value = int(text) if len(text) <= 40 else None
    except ValueError:
        return False
    if value is None:
        return False
    wide = op.dtype in ("i64", "index")
    most = (1 << 63) - 1 if wide else (1 << BITS[op.dtype]) - 1
    return -(1 << max(BITS[op.dtype] - 1, 1)) <= value <= most


def is_float(text: str) -> bool:
    """Whether this is the text of a float constant: `float.hex()`, inf, -inf or nan."""
    try:
        value = float(text) if text.lstrip("+-") in ("inf", "nan") else float.fromhex(text)
    except (ValueError, OverflowError):
        return False
    return math.isnan(value) or math.isfinite(value) or math.isinf(value)


_F1, _F2, _F3 = (_same(FLOATS, count) for count in (1, 2, 3))
_I2 = _same(INTEGERS, 2)
_WIDE = INTEGERS - {"i1"}  # division, shifts and powers of truth values have no meaning
_W1, _W2 = (_same(_WIDE, count) for count in (1, 2))
_UNARY = """
sqrt rsqrt absf ceil floor roundeven round trunc erfc exp exp2 expm1 log log2 log1p tanh erf sin cos log10 tan sinh cosh
asin acos atan asinh acosh atanh cbrt
"""
_INTEGER_PAIRS = "addi subi muli andi ori xori maxsi minsi maxui minui"
_DIVISIONS_AND_SHIFTS = "divsi floordivsi ceildivsi remsi divui remui shli shrsi shrui"
RULES: Mapping[str, Rule] = {
    "arith.constant": _constant,
    "linalg.index": lambda op, args: not args and op.dtype == "index" and op.axis is not None and op.axis >= 0,
    "arith.negf": _F1,
    **dict.fromkeys(
        (f"arith.{n}" for n in ("addf", "subf", "mulf", "divf", "remf", "maximumf", "minimumf", "maxnumf", "minnumf")),
        _F2,
    ),
    "arith.cmpf": _compares(FLOATS, _CMPF),
    "arith.cmpi": _compares(INTEGERS, _CMPI),
    "arith.select": _selects,
    **dict.fromkeys((f"arith.{name}" for name in _INTEGER_PAIRS.split()), _I2),
    **dict.fromkeys((f"arith.{name}" for name in _DIVISIONS_AND_SHIFTS.split()), _W2),
    "arith.extf": _wider(FLOATS),
    "arith.truncf": _narrower(FLOATS),
    **dict.fromkeys(("arith.extsi", "arith.extui"), _wider(_NUMBERS)),
    "arith.trunci": _narrower(_NUMBERS),
    **dict.fromkeys(("arith.index_cast", "arith.index_castui"), _casts_index),
    **dict.fromkeys(("arith.sitofp", "arith.uitofp"), _from_to(INTEGERS, FLOATS)),
    **dict.fromkeys(("arith.fptosi", "arith.fptoui"), _from_to(FLOATS, INTEGERS)),
    "arith.bitcast": _reinterprets,
    **dict.fromkeys((f"math.{name}" for name in _UNARY.split()), _F1),
    **dict.fromkeys(("math.powf", "math.copysign", "math.atan2"), _F2),
    "math.fma": _F3,
    "math.absi": _W1,
    "math.ipowi": _W2,
}  # fmt: skip


def check_program(program: ScalarProgram, axes: int) -> dict[str, str]:
    """The type of every value of a body inside `axes` loops. PlanError names an op that is unknown, uses an undefined
    value, has the wrong types, or has a constant that its type cannot hold."""
    if len(program.ops) > MAX_OPS:
        raise PlanError(f"a body has {len(program.ops)} operations; the limit is {MAX_OPS}")
    types: dict[str, str] = {}
    for name, dtype in program.inputs:
        if name in types:
            raise PlanError(f"two values of a body are called '{name}'")
        types[name] = dtype
    for op in program.ops:
        rule = RULES.get(op.op)
        missing = [name for name in op.args if name not in types]
        if rule is None or missing or op.result in types:
            why = "is unknown" if rule is None else f"uses '{missing[0]}'" if missing else "gives a value once more"
            raise PlanError(f"the operation '{op.op}' that gives '{op.result}' {why}")
        args = tuple(types[name] for name in op.args)
        if not rule(op, args) or (op.op == "linalg.index" and (op.axis or 0) >= axes):
            given = ", ".join(args)
            more = "".join(f", {what}" for what in (op.value, op.predicate, op.axis) if what is not None)
            raise PlanError(f"'{op.op}' does not give {op.dtype} '{op.result}' from ({given}){more}")
        types[op.result] = op.dtype
    for name in program.yields:
        if name not in types:
            raise PlanError(f"a body yields '{name}', which it does not compute")
    return types
