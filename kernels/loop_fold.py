"""Reductions that can be split: bodies of the form ``acc = combine(acc, value)``, one per output.

Such a body can run over parts of the reduction, each from the neutral element. The partial results can then be combined
in any fixed order. Every other body (argmax, accumulators that read each other) has to run in order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from qcompiler.kernels.loop_nest import Nest
from qcompiler.kernels.scalar import FLOATS, float_literal, int_literal, parse_float
from qcompiler.plan.kernel import ScalarOp, ScalarProgram

INTEGER_LIMITS = {
    "i64": (-(2**63), 2**63 - 1), "i32": (-(2**31), 2**31 - 1), "i16": (-(2**15), 2**15 - 1),
    "i8": (-(2**7), 2**7 - 1), "i1": (0, 1),
}  # fmt: skip
"""The integer types that folds support, with their smallest and largest values."""

# The neutral element of each op; -0.0 + x keeps the sign of a zero sum.
_NEUTRAL: dict[str, float] = {
    "arith.addf": -0.0, "arith.mulf": 1.0, "arith.maximumf": float("-inf"), "arith.minimumf": float("inf"),
    "arith.maxnumf": float("-inf"), "arith.minnumf": float("inf"), "arith.addi": 0, "arith.muli": 1, "arith.ori": 0,
    "arith.xori": 0, "arith.andi": -1, "arith.maxui": 0, "arith.minui": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Fold:
    """The ``acc = op(acc, value)`` of one output: the neutral element as C++ text, and the op as a program of two
    inputs."""

    dtype: str
    neutral: str
    combine: ScalarProgram


def initial(nest: Nest, output: int) -> str:
    """The C++ literal of an output's initial value."""
    dtype, text = nest.outputs[output].dtype, nest.body.init[output]
    return float_literal(parse_float(text), dtype) if dtype in FLOATS else int_literal(text, dtype)


def find_folds(nest: Nest, integers: Collection[str] = tuple(INTEGER_LIMITS)) -> list[Fold] | None:
    """The fold of each output. None if an accumulator is used in another way or is an integer type not in
    `integers`."""
    program = nest.program
    producers = {op.result: op for op in program.ops}
    folds = []
    for i, result in enumerate(program.yields):
        accumulator, dtype = program.inputs[nest.inputs + i]
        op = producers.get(result)
        if op is None or op.args.count(accumulator) != 1 or len(op.args) != 2:
            return None
        users = [each for each in program.ops if accumulator in each.args]
        if users != [op] or accumulator in program.yields or program.yields.count(result) != 1:
            return None
        if any(result in each.args for each in program.ops):
            return None
        neutral = _neutral(op.op, dtype) if dtype in FLOATS or dtype in integers else None
        if neutral is None:
            return None
        combine = ScalarProgram(
            inputs=(("a", dtype), ("b", dtype)),
            ops=(ScalarOp(result="c", op=op.op, dtype=op.dtype, args=("a", "b")),),
            yields=("c",),
        )
        folds.append(Fold(dtype, neutral, combine))
    return folds


def _neutral(op: str, dtype: str) -> str | None:
    if dtype in FLOATS:
        return float_literal(_NEUTRAL[op], dtype) if op in _NEUTRAL and op.endswith("f") else None
    if dtype not in INTEGER_LIMITS or op.endswith("f"):
        return None
    low, high = INTEGER_LIMITS[dtype]
    value = {"arith.maxsi": low, "arith.minsi": high}.get(op, _NEUTRAL.get(op))
    if value is None or (dtype == "i1" and op in ("arith.maxsi", "arith.minsi")):
        return None
    return int_literal(str(int(value)), dtype)
