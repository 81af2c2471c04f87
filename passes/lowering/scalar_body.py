"""Converts an xDSL block of arith and math ops to a `ScalarProgram` of the plan."""

from __future__ import annotations

import math

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IndexType, IntegerAttr
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.types import dtype_of
from qcompiler.plan.kernel import DType, ScalarOp, ScalarProgram

CMPF = (
    "false",
    "oeq",
    "ogt",
    "oge",
    "olt",
    "ole",
    "one",
    "ord",
    "ueq",
    "ugt",
    "uge",
    "ult",
    "ule",
    "une",
    "uno",
    "true",
)
CMPI = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


def program_of(block: Block, path: str) -> ScalarProgram:
    """The program of a block. Arguments become the inputs `in0, in1, …`; each op becomes one `ScalarOp` with the result
    `v0, v1, …`."""
    names: dict[SSAValue, str] = {argument: f"in{i}" for i, argument in enumerate(block.args)}
    ops: list[ScalarOp] = []
    yields: tuple[str, ...] = ()
    for op in block.ops:
        if op.name in ("linalg.yield", "qc.yield"):
            yields = tuple(names[value] for value in op.operands)
            continue
        if len(op.results) != 1 or op.regions:
            raise KernelSelectionError(f"{op.name} cannot stand in a scalar body (at '{path}')")
        names[op.results[0]] = f"v{len(ops)}"
        ops.append(_scalar_op(op, names))
    return ScalarProgram(
        inputs=tuple((names[argument], dtype_of(argument.type)) for argument in block.args),
        ops=tuple(ops),
        yields=yields,
    )


def _scalar_op(op: Operation, names: dict[SSAValue, str]) -> ScalarOp:
    result = op.results[0]
    dtype: DType | str = "index" if isinstance(result.type, IndexType) else dtype_of(result.type)
    value = predicate = axis = None
    if isinstance(op, arith.ConstantOp):
        value = constant_text(op.value)
    elif isinstance(op, arith.CmpfOp):
        predicate = CMPF[op.predicate.value.data]
    elif isinstance(op, arith.CmpiOp):
        predicate = CMPI[op.predicate.value.data]
    elif isinstance(op, IndexOp):
        axis = op.dim.value.data
    return ScalarOp(
        result=names[result],
        op=op.name,
        dtype=dtype,  # type: ignore[arg-type]
        args=tuple(names[operand] for operand in op.operands),
        value=value,
        predicate=predicate,
        axis=axis,
    )


def constant_text(value: Attribute) -> str:
    """A scalar constant as the plan writes it: integers in decimal, floats as `float.hex()`, "inf", "-inf", "nan"."""
    if isinstance(value, IntegerAttr):
        return str(value.value.data)
    if isinstance(value, FloatAttr):
        number = float(value.value.data)
        return number.hex() if math.isfinite(number) else str(number)
    raise KernelSelectionError(f"a scalar body cannot hold the constant {value}")
