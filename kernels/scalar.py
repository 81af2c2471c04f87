"""Scalar programs (bodies of loops, epilogues) as C++ statements for one element, one statement per op.

    arith.mulf %a, %b : f32      const float t_2 = t_0 * t_1;

Every C++ target uses this text. The helpers it calls (qc_add, qc_ftoi, qc_exp, …) have the same meaning in
kernels/cpu/scalar.h, kernels/cpu/vmath.h and kernels/cuda/scalar.cuh. All dtypes are covered; bf16 and f16 values are
floats that are rounded after each op of the narrow type, or by a store if nothing else reads them (`stored`). An op
without a table entry raises a KernelSelectionError that names it. A target may add its own `BodyStyle`:
kernels/cpu/vector.py writes 16 SIMD lanes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.text import VALUE_TYPES, identifier
from qcompiler.plan.kernel import ScalarOp, ScalarProgram

FLOATS = ("f64", "f32", "f16", "bf16")
"""Floating-point dtypes. All others are integers or booleans."""


@dataclass(frozen=True)
class Statements:
    """C++ statements without indentation, and the expression of each yielded value."""

    lines: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class OpContext:
    """What a table entry needs to know about one op."""

    op: ScalarOp
    args: tuple[str, ...]
    dtypes: tuple[str, ...]
    constants: tuple[float | None, ...]  # the value of each argument that is a float constant
    indices: tuple[str, ...]  # loop variables, for linalg.index

    @property
    def source(self) -> str:
        """The dtype of the first argument."""
        return self.dtypes[0]


Rule = str | Callable[[OpContext], str]


# --- constants -------------------------------------------------------------------------------------------------------


def float_literal(value: float, dtype: str) -> str:
    """A C++ literal of exactly `value` rounded to `dtype`; of type double for f64, else float."""
    suffix = "" if dtype == "f64" else "f"
    with np.errstate(over="ignore"):
        if dtype in ("bf16", "f16"):
            narrow = ml_dtypes.bfloat16 if dtype == "bf16" else np.float16
            value = float(np.float64(value).astype(narrow))
        rounded = value if dtype == "f64" else float(np.float32(value))
    if math.isnan(rounded):
        return "(double)NAN" if dtype == "f64" else "NAN"
    if rounded in (float("inf"), float("-inf")):
        text = "(double)INFINITY" if dtype == "f64" else "INFINITY"
        return text if rounded > 0 else f"-{text}"
    text = repr(rounded) if dtype == "f64" else str(np.float32(rounded))
    return text + suffix if any(c in text for c in ".e") else f"{text}.0{suffix}"


def parse_float(text: str) -> float:
    """The value of a float constant's text: the form of `float.hex()`, or inf, -inf, nan."""
    return float(text) if text.lstrip("+-") in ("inf", "nan") else float.fromhex(text)


def int_literal(text: str, dtype: str) -> str:
    """A C++ literal of an integer, index or boolean constant."""
    if text in ("true", "false"):
        return text if dtype == "i1" else str(int(text == "true"))
    value = int(text)
    if dtype == "i1":
        return "true" if value else "false"
    if value == -(2**63):
        return "INT64_MIN"
    if dtype in ("i64", "index"):
        return f"INT64_C({value})"
    return str(value) if value != -(2**31) else "INT32_MIN"


def constant_literal(c: OpContext) -> str:
    """The C++ literal of an `arith.constant`."""
    assert c.op.value is not None
    if c.op.dtype in FLOATS:
        return float_literal(parse_float(c.op.value), c.op.dtype)
    return int_literal(c.op.value, c.op.dtype)


# --- shared by all forms ----------------------------------------------------------------------------------------------

POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}"}
"""Constant exponents for which products are cheaper and equally exact (torch's CPU kernel does the same)."""

LIBM_UNARY = ("log10", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "cbrt")

# cmpf predicates over `lt`, `le`, `eq` and `unordered`; {n} negates.
_CMPF = {
    "oeq": "{eq}", "ogt": "{gt}", "oge": "{ge}", "olt": "{lt}", "ole": "{le}", "one": "({lt} | {gt})",
    "ord": "{n}{uno}", "uno": "{uno}", "une": "{n}{eq}", "ugt": "{n}{le}", "uge": "{n}{lt}", "ult": "{n}{ge}",
    "ule": "{n}{gt}", "ueq": "{n}({lt} | {gt})",
}  # fmt: skip


def compare_floats(c: OpContext, words: dict[str, str], true: str, false: str) -> str:
    """A float comparison, composed of the `words` of a form (eq, lt, le, gt, ge, uno; n negates)."""
    predicate = c.op.predicate or ""
    if predicate in ("true", "false"):
        return true if predicate == "true" else false
    if predicate not in _CMPF:
        raise KernelSelectionError(f"arith.cmpf has no predicate {predicate!r}")
    a, b = c.args
    return _CMPF[predicate].format(**{key: text.format(a, b) for key, text in words.items()})


# --- scalar form -----------------------------------------------------------------------------------------------------


def _scalar_cmpf(c: OpContext) -> str:
    words = {
        "eq": "({0} == {1})", "lt": "({0} < {1})", "le": "({0} <= {1})", "gt": "({0} > {1})", "ge": "({0} >= {1})",
        "uno": "({0} != {0} || {1} != {1})", "n": "!",
    }  # fmt: skip
    return compare_floats(c, words, "true", "false")


def _scalar_cmpi(c: OpContext) -> str:
    operators = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    predicate = c.op.predicate or ""
    sign, word = ("s", predicate) if predicate in ("eq", "ne") else (predicate[:1], predicate[1:])
    if word not in operators or sign not in "su":
        raise KernelSelectionError(f"arith.cmpi has no predicate {predicate!r}")
    a, b = c.args
    if sign == "u" and c.source != "i1":
        cast = f"(qc_unsigned<{VALUE_TYPES[c.source]}>)"
        a, b = cast + a, cast + b
    elif c.source == "i1" and sign == "s" and predicate not in ("eq", "ne"):
        a, b = f"-(int){a}", f"-(int){b}"  # a signed 1-bit true is -1
    return f"{a} {operators[word]} {b}"


def _integer(name: str, boolean: str | None = None) -> Rule:
    """Calls a helper template of scalar.h at the result's type. `boolean` is the text for i1."""

    def rule(c: OpContext) -> str:
        if c.op.dtype == "i1":
            if boolean is None:
                raise KernelSelectionError(f"{c.op.op} is not defined for i1")
            return boolean.format(*c.args)
        return f"{name}<{VALUE_TYPES[c.op.dtype]}>({', '.join(c.args)})"

    return rule


def _unsigned_extreme(operator: str) -> Rule:
    def rule(c: OpContext) -> str:
        cast = "" if c.op.dtype == "i1" else f"(qc_unsigned<{VALUE_TYPES[c.op.dtype]}>)"
        return f"{cast}{c.args[0]} {operator} {cast}{c.args[1]} ? {c.args[0]} : {c.args[1]}"

    return rule


def _unsigned_value(c: OpContext) -> str:
    return c.args[0] if c.source == "i1" else f"(qc_unsigned<{VALUE_TYPES[c.source]}>){c.args[0]}"


def _signed_value(c: OpContext) -> str:
    if c.source == "i1":
        return f"-(int){c.args[0]}"
    return f"(int8_t){c.args[0]}" if c.source == "ui8" else c.args[0]


def _cast(inner: Callable[[OpContext], str]) -> Rule:
    return lambda c: f"({VALUE_TYPES[c.op.dtype]})({inner(c)})"


def _first(c: OpContext) -> str:
    return c.args[0]


def _truncate_integer(c: OpContext) -> str:
    return f"{c.args[0]} & 1" if c.op.dtype == "i1" else f"({VALUE_TYPES[c.op.dtype]}){c.args[0]}"


def _float_to_int(unsigned: bool) -> Rule:
    def rule(c: OpContext) -> str:
        if c.op.dtype == "i1":
            return f"{c.args[0]} != 0"
        target = VALUE_TYPES[c.op.dtype]
        if unsigned:
            return f"({target})qc_ftoi<qc_unsigned<{target}>>({c.args[0]})"
        return f"qc_ftoi<{target}>({c.args[0]})"

    return rule


def _scalar_math(single: str, double: str) -> Rule:
    """A function of one or more floats: `single` for f32 and narrower, `double` for f64."""
    return lambda c: f"{double if c.op.dtype == 'f64' else single}({', '.join(c.args)})"


def _scalar_power(c: OpContext) -> str:
    exponent = c.constants[1]
    if exponent in POWERS:
        return POWERS[exponent].format(*c.args)
    return f"{'pow' if c.op.dtype == 'f64' else 'qc_pow'}({c.args[0]}, {c.args[1]})"


def _index(c: OpContext) -> str:
    assert c.op.axis is not None
    if c.op.axis >= len(c.indices):
        raise KernelSelectionError(f"linalg.index {c.op.axis} in a body with {len(c.indices)} loops")
    return c.indices[c.op.axis]


def _scalar_bitcast(c: OpContext) -> str:
    if {c.source, c.op.dtype} & {"bf16", "f16", "i1"}:
        raise KernelSelectionError(f"arith.bitcast from {c.source} to {c.op.dtype}")
    return f"qc_bitcast<{VALUE_TYPES[c.op.dtype]}>({c.args[0]})"


def _signed_extreme(operator: str) -> Rule:
    def rule(c: OpContext) -> str:
        if c.op.dtype == "i1":  # signed true is -1: max is `and`, min is `or`
            return f"{c.args[0]} {'&' if operator == '>' else '|'} {c.args[1]}"
        return f"{c.args[0]} {operator} {c.args[1]} ? {c.args[0]} : {c.args[1]}"

    return rule


def _scalar_rsqrt(c: OpContext) -> str:
    return f"1.0 / sqrt({c.args[0]})" if c.op.dtype == "f64" else f"1.0f / sqrtf({c.args[0]})"


def _scalar_absi(c: OpContext) -> str:
    kind = VALUE_TYPES[c.op.dtype]
    return f"{c.args[0]} < 0 ? qc_sub<{kind}>(0, {c.args[0]}) : {c.args[0]}"


SCALAR_TABLE: dict[str, Rule] = {
    "arith.constant": constant_literal,
    "linalg.index": _index,
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}", "arith.divf": "{0} / {1}",
    "arith.negf": "-{0}", "arith.remf": _scalar_math("fmodf", "fmod"),
    "arith.maximumf": "qc_maximum({0}, {1})", "arith.minimumf": "qc_minimum({0}, {1})",
    "arith.maxnumf": "qc_maxnum({0}, {1})", "arith.minnumf": "qc_minnum({0}, {1})",
    "arith.cmpf": _scalar_cmpf, "arith.cmpi": _scalar_cmpi, "arith.select": "{0} ? {1} : {2}",
    "arith.addi": _integer("qc_add", "{0} ^ {1}"), "arith.subi": _integer("qc_sub", "{0} ^ {1}"),
    "arith.muli": _integer("qc_mul", "{0} & {1}"),
    "arith.divsi": _integer("qc_divsi"), "arith.floordivsi": _integer("qc_floordivsi"),
    "arith.ceildivsi": _integer("qc_ceildivsi"), "arith.remsi": _integer("qc_remsi"),
    "arith.divui": _integer("qc_divui"), "arith.remui": _integer("qc_remui"),
    "arith.andi": "{0} & {1}", "arith.ori": "{0} | {1}", "arith.xori": "{0} ^ {1}",
    "arith.shli": _integer("qc_shl"), "arith.shrsi": _integer("qc_shr"), "arith.shrui": _integer("qc_shru"),
    "arith.maxsi": _signed_extreme(">"), "arith.minsi": _signed_extreme("<"),
    "arith.maxui": _unsigned_extreme(">"), "arith.minui": _unsigned_extreme("<"),
    "arith.extf": _cast(_first), "arith.truncf": _cast(_first),
    "arith.extsi": _cast(_signed_value), "arith.extui": _cast(_unsigned_value), "arith.trunci": _truncate_integer,
    "arith.sitofp": _cast(_signed_value), "arith.uitofp": _cast(_unsigned_value),
    "arith.fptosi": _float_to_int(False), "arith.fptoui": _float_to_int(True),
    "arith.index_cast": _cast(_signed_value), "arith.index_castui": _cast(_unsigned_value),
    "arith.bitcast": _scalar_bitcast,
    "math.sqrt": _scalar_math("sqrtf", "sqrt"), "math.rsqrt": _scalar_rsqrt,
    "math.absf": _scalar_math("fabsf", "fabs"), "math.absi": _scalar_absi,
    "math.ceil": _scalar_math("ceilf", "ceil"), "math.floor": _scalar_math("floorf", "floor"),
    "math.roundeven": _scalar_math("rintf", "rint"), "math.round": _scalar_math("roundf", "round"),
    "math.trunc": _scalar_math("truncf", "trunc"), "math.powf": _scalar_power,
    "math.copysign": _scalar_math("copysignf", "copysign"), "math.fma": _scalar_math("fmaf", "fma"),
    "math.ipowi": _integer("qc_ipow"),
    "math.atan2": _scalar_math("atan2f", "atan2"), "math.erfc": _scalar_math("erfcf", "erfc"),
    **{f"math.{n}": _scalar_math(f"qc_{n}", n)
       for n in ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sin", "cos")},
    **{f"math.{n}": _scalar_math(f"{n}f", n) for n in LIBM_UNARY},
}  # fmt: skip

# --- programs --------------------------------------------------------------------------------------------------------

# Ops whose result fits a narrow float type if the operands do, so that it needs no rounding.
_EXACT = frozenset({
    "arith.constant", "arith.select", "arith.negf", "arith.maximumf", "arith.minimumf", "arith.maxnumf",
    "arith.minnumf", "arith.extf", "math.absf", "math.ceil", "math.floor", "math.roundeven", "math.round",
    "math.trunc", "math.copysign",
})  # fmt: skip


@dataclass(frozen=True)
class BodyStyle:
    """One way to write a body: its table of ops, its C++ types, and its function that rounds to a narrow float."""

    table: dict[str, Rule]
    types: dict[str, str]
    rounding: str


SCALAR_FORM = BodyStyle(SCALAR_TABLE, VALUE_TYPES, "qc_round")


def write_statements(
    program: ScalarProgram,
    inputs: Sequence[str],
    indices: Sequence[str],
    prefix: str,
    form: BodyStyle,
    *,
    stored: Sequence[str] = (),
) -> Statements:
    """Writes a body in one form, op by op. KernelSelectionError for an op that the form cannot write.

    `stored`: the caller does nothing with the results but store them, in these types. A store rounds, so a result that
    is stored in its own type, and that no op reads, is not rounded before.
    """
    if len(inputs) != len(program.inputs):
        raise KernelSelectionError(f"a body of {len(program.inputs)} inputs was given {len(inputs)} values")
    text = {name: given for (name, _), given in zip(program.inputs, inputs, strict=True)}
    dtypes: dict[str, str] = dict(program.inputs)
    constants: dict[str, float] = {}
    lines: list[str] = []
    read = {name for op in program.ops for name in op.args}
    stores = tuple(zip(program.yields, stored, strict=True)) if stored else ()
    for op in program.ops:
        rule = form.table.get(op.op)
        if rule is None:
            raise KernelSelectionError(f"'{op.op}' has no C++ form in a loop body (kernels/scalar.py)")
        if op.dtype not in form.types:
            raise KernelSelectionError(f"'{op.op}' on {op.dtype} has no vector form")
        if op.op == "arith.constant" and op.value not in (None, "true", "false"):
            assert op.value is not None
            constants[op.result] = parse_float(op.value) if op.dtype in FLOATS else float(int(op.value))
        context = OpContext(
            op,
            tuple(text[a] for a in op.args),
            tuple(dtypes[a] for a in op.args),
            tuple(constants.get(a) for a in op.args),
            tuple(indices),
        )
        expression = rule.format(*context.args) if isinstance(rule, str) else rule(context)
        store_rounds = op.result not in read and {dtype for name, dtype in stores if name == op.result} == {op.dtype}
        if op.dtype in ("bf16", "f16") and op.op not in _EXACT and not store_rounds:
            expression = f"{form.rounding}_{op.dtype}({expression})"
        name = f"{prefix}{identifier(op.result)}"
        lines.append(f"const {form.types[op.dtype]} {name} = {expression};")
        text[op.result], dtypes[op.result] = name, op.dtype
    return Statements(tuple(lines), tuple(text[y] for y in program.yields))


def scalar_statements(
    program: ScalarProgram,
    inputs: Sequence[str],
    indices: Sequence[str] = (),
    prefix: str = "t_",
    *,
    stored: Sequence[str] = (),
) -> Statements:
    """Writes a body for one element. `inputs` are expressions of `VALUE_TYPES`; `indices` are the loop variables;
    `stored`: as of `write_statements`."""
    return write_statements(program, inputs, indices, prefix, SCALAR_FORM, stored=stored)


# --- folds and orders of kernels that are no loops --------------------------------------------------------------------


def fold_text(fold: str, dtype: str, before: str, value: str) -> str:
    """C++ text that folds ``value`` into ``before``, in the value type of `dtype`. Integers wrap; NaN wins."""
    kind = VALUE_TYPES[dtype]
    if fold == "none":
        return value
    if dtype in FLOATS:
        text = {"add": "{0} + {1}", "mul": "{0} * {1}", "max": "qc_maximum({0}, {1})", "min": "qc_minimum({0}, {1})"}
    elif dtype == "i1":
        text = {"add": "{0} | {1}", "mul": "{0} & {1}", "max": "{0} | {1}", "min": "{0} & {1}"}
    else:
        text = {
            "add": f"qc_add<{kind}>({{0}}, {{1}})", "mul": f"qc_mul<{kind}>({{0}}, {{1}})",
            "max": "{0} < {1} ? {1} : {0}", "min": "{1} < {0} ? {1} : {0}",
        }  # fmt: skip
    if fold not in text:
        raise KernelSelectionError(f"'{fold}' does not fold values of type {dtype}")
    return text[fold].format(before, value)


def comes_first(kind: str, dtype: str, other: str, own: str) -> str:
    """C++ text: whether the value `other` comes before `own` in an order of `kind` ("less" or "greater"). NaN is the
    largest value."""
    low, high = (other, own) if kind == "less" else (own, other)
    if dtype not in FLOATS:
        return f"({low} < {high})"
    return f"({low} == {low} && ({high} != {high} || {low} < {high}))"


def precedes(kind: str, dtype: str, other: str, own: str, other_at: str, own_at: str) -> str:
    """C++ text: as `comes_first`, and equal values by their positions."""
    second = comes_first("greater" if kind == "less" else "less", dtype, other, own)
    return f"{comes_first(kind, dtype, other, own)} || (!{second} && {other_at} < {own_at})"
