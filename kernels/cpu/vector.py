"""The vector form of scalar programs: 16 SIMD lanes of vec.h at once.

    arith.mulf %a, %b : f32      const vf t_2 = t_0 * t_1;

It covers f32, bf16, f16 (values in f32, rounded where the scalar form rounds them), i32, i1, and narrower integers for
conversions, comparisons and bitwise ops. It gives the same bits as the scalar form of kernels/scalar.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.text import VECTOR_TYPES
from qcompiler.kernels.scalar import (
    LIBM_UNARY,
    POWERS,
    BodyStyle,
    OpContext,
    Rule,
    Statements,
    compare_floats,
    constant_literal,
    scalar_statements,
    write_statements,
)
from qcompiler.plan.kernel import ScalarProgram

_BITS = {"i64": 64, "index": 64, "i32": 32, "i16": 16, "i8": 8, "ui8": 8, "i1": 1}


def _vector_constant(c: OpContext) -> str:
    literal = constant_literal(c)
    return f"vset((int32_t){literal})" if VECTOR_TYPES[c.op.dtype] == "vi" else f"vset({literal})"


def _vector_cmpf(c: OpContext) -> str:
    words = {
        "eq": "veq({0}, {1})", "lt": "vlt({0}, {1})", "le": "vle({0}, {1})", "gt": "vlt({1}, {0})",
        "ge": "vle({1}, {0})", "uno": "(vnan({0}) | vnan({1}))", "n": "~",
    }  # fmt: skip
    return compare_floats(c, words, "vset(true)", "vset(false)")


def _vector_cmpi(c: OpContext) -> str:
    if c.source == "i1":
        table = {"eq": "~({0} ^ {1})", "ne": "{0} ^ {1}"}
    else:
        table = {
            "eq": "veq({0}, {1})", "ne": "~veq({0}, {1})", "slt": "vlt({0}, {1})", "sgt": "vlt({1}, {0})",
            "sle": "~vlt({1}, {0})", "sge": "~vlt({0}, {1})", "ult": "vltu({0}, {1})", "ugt": "vltu({1}, {0})",
            "ule": "~vltu({1}, {0})", "uge": "~vltu({0}, {1})",
        }  # fmt: skip
    if c.op.predicate not in table:
        raise KernelSelectionError(f"arith.cmpi {c.op.predicate!r} on {c.source} has no vector form")
    return table[c.op.predicate].format(*c.args)


def _only(dtypes: tuple[str, ...], text: str) -> Rule:
    """`text`, if the result's dtype is one of `dtypes`."""

    def rule(c: OpContext) -> str:
        if c.op.dtype not in dtypes:
            raise KernelSelectionError(f"{c.op.op} on {c.op.dtype} has no vector form")
        return text.format(*c.args)

    return rule


def _vector_extend(signed: bool) -> Rule:
    def rule(c: OpContext) -> str:
        if c.source == "i1":
            return f"vmaskbits({c.args[0]})" if signed else f"vmaskbits({c.args[0]}) & vset((int32_t)1)"
        if signed or c.source == "ui8":
            if signed and c.source == "ui8":
                raise KernelSelectionError("arith.extsi of ui8 has no vector form")
            return c.args[0]
        return f"{c.args[0]} & vset((int32_t){(1 << _BITS[c.source]) - 1})"

    return rule


def _vector_truncate(c: OpContext) -> str:
    if c.op.dtype == "i1":
        return f"~veq({c.args[0]} & vset((int32_t)1), vset((int32_t)0))"
    if c.op.dtype == "ui8":
        return f"{c.args[0]} & vset((int32_t)255)"
    shift = 32 - _BITS[c.op.dtype]
    return f"vshr(vshl({c.args[0]}, {shift}), {shift})"


def _vector_int_to_float(signed: bool) -> Rule:
    def rule(c: OpContext) -> str:
        if c.source == "i1":
            return f"vsel({c.args[0]}, vset({'-' if signed else ''}1.0f), vzero())"
        if not signed and c.source in ("i32", "i16", "i8"):
            if c.source == "i32":
                raise KernelSelectionError("arith.uitofp of i32 has no vector form")
            return f"vtofloat({c.args[0]} & vset((int32_t){(1 << _BITS[c.source]) - 1}))"
        return f"vtofloat({c.args[0]})"

    return rule


def _vector_bitcast(c: OpContext) -> str:
    if (c.source, c.op.dtype) == ("f32", "i32"):
        return f"vbits({c.args[0]})"
    if (c.source, c.op.dtype) == ("i32", "f32"):
        return f"vfrombits({c.args[0]})"
    raise KernelSelectionError(f"arith.bitcast from {c.source} to {c.op.dtype} has no vector form")


def _vector_power(c: OpContext) -> str:
    exponent = c.constants[1]
    return POWERS[exponent].format(*c.args) if exponent in POWERS else f"vpow({c.args[0]}, {c.args[1]})"


def _vector_shift(function: str) -> Rule:
    """Shifts by a constant, as in bodies that decode packed bits. Other shifts have no vector form."""

    def rule(c: OpContext) -> str:
        amount = c.constants[1]
        if c.op.dtype != "i32" or amount is None or not 0 <= amount < 32:
            raise KernelSelectionError(f"{c.op.op} on {c.op.dtype} by a variable amount has no vector form")
        return f"{function}({c.args[0]}, {int(amount)})"

    return rule


_WIDE = ("f32", "bf16", "f16")
_INT32 = ("i32",)
_NARROW = ("i32", "i16", "i8", "ui8", "i1")

VECTOR_TABLE: dict[str, Rule] = {
    "arith.constant": _vector_constant,
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}", "arith.divf": "{0} / {1}",
    "arith.negf": "-{0}", "arith.remf": "vlift({0}, {1}, [](float a, float b) {{ return fmodf(a, b); }})",
    "arith.maximumf": "vmaximum({0}, {1})", "arith.minimumf": "vminimum({0}, {1})",
    "arith.maxnumf": "vmaxnum({0}, {1})", "arith.minnumf": "vminnum({0}, {1})",
    "arith.cmpf": _vector_cmpf, "arith.cmpi": _vector_cmpi, "arith.select": "vsel({0}, {1}, {2})",
    "arith.addi": _only(_INT32, "{0} + {1}"), "arith.subi": _only(_INT32, "{0} - {1}"),
    "arith.muli": _only(_INT32, "{0} * {1}"),
    "arith.andi": _only(_NARROW, "{0} & {1}"), "arith.ori": _only(_NARROW, "{0} | {1}"),
    "arith.xori": _only(_NARROW, "{0} ^ {1}"),
    "arith.shli": _vector_shift("vshl"), "arith.shrsi": _vector_shift("vshr"), "arith.shrui": _vector_shift("vshru"),
    "arith.maxsi": _only(_INT32, "vsel(vlt({1}, {0}), {0}, {1})"),
    "arith.minsi": _only(_INT32, "vsel(vlt({0}, {1}), {0}, {1})"),
    "arith.maxui": _only(_INT32, "vsel(vltu({1}, {0}), {0}, {1})"),
    "arith.minui": _only(_INT32, "vsel(vltu({0}, {1}), {0}, {1})"),
    "arith.extf": "{0}", "arith.truncf": "{0}",
    "arith.extsi": _vector_extend(True), "arith.extui": _vector_extend(False), "arith.trunci": _vector_truncate,
    "arith.sitofp": _vector_int_to_float(True), "arith.uitofp": _vector_int_to_float(False),
    "arith.fptosi": _only(_INT32, "vtoint({0})"), "arith.bitcast": _vector_bitcast,
    "math.sqrt": "vsqrt({0})", "math.rsqrt": "vrsqrt({0})", "math.absf": "vabs({0})", "math.ceil": "vceil({0})",
    "math.floor": "vfloor({0})", "math.roundeven": "vrint({0})", "math.round": "vround({0})",
    "math.trunc": "vtrunc({0})", "math.powf": _vector_power, "math.copysign": "vcopysign({0}, {1})",
    "math.fma": "vfused({0}, {1}, {2})",
    "math.atan2": "vlift({0}, {1}, [](float a, float b) {{ return atan2f(a, b); }})",
    "math.erfc": "vlift({0}, [](float a) {{ return erfcf(a); }})",
    **{f"math.{n}": f"v{n}({{0}})"
       for n in ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sin", "cos")},
    **{f"math.{n}": f"vlift({{0}}, [](float a) {{{{ return {n}f(a); }}}})" for n in LIBM_UNARY},
}  # fmt: skip

VECTOR_FORM = BodyStyle(VECTOR_TABLE, VECTOR_TYPES, "vround")


def vector_statements(
    program: ScalarProgram, inputs: Sequence[str], prefix: str = "t_", *, stored: Sequence[str] = ()
) -> Statements:
    """Writes a body for 16 elements. `inputs` are of `VECTOR_TYPES`; `stored`: as of `write_statements`.
    KernelSelectionError if `vector_obstacle` finds one."""
    for name, dtype in program.inputs:
        if dtype not in VECTOR_TYPES:
            raise KernelSelectionError(f"input '{name}' of type {dtype} has no vector form")
    return write_statements(program, inputs, (), prefix, VECTOR_FORM, stored=stored)


def vector_obstacle(program: ScalarProgram) -> str | None:
    """Why a body cannot run on 16 lanes; None if it can. Raises an error for an op without even a scalar form."""
    names = [name for name, _ in program.inputs]
    try:
        vector_statements(program, names)
    except KernelSelectionError as error:
        loops = 1 + max((op.axis or 0 for op in program.ops if op.op == "linalg.index"), default=-1)
        scalar_statements(program, names, ["0"] * loops)
        return str(error)
    return None
