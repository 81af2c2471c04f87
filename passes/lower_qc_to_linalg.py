"""lower-qc-to-linalg: lowers `qc` ops to plain linalg, so that any MLIR can compile the program.

    func.func @main(%x) {                         func.func @main(%x, %w_codes, %w_scales) attributes
      %w = qc.const @w : !qc.qtensor<…>               {qc.constants = ["w:codes", "w:scales"]} {
      %y = qc.linear %x, %w                 ->      %w = linalg.generic ins(%w_codes, %w_scales)   // decode
    }                                               %y = linalg.generic ins(%x, %w)                // multiply-add

Constants become arguments after the function's own, in the order of `qc.constants`: `key` for a plain tensor and
`key:section` for each section of a packed one. States become arguments in front of them (`qc.states`), and their new
values results behind the function's own (`qc.updates`). `qc.dim` becomes `tensor.dim` of an argument and arithmetic.
The pass is not a stage of the pipeline. `qcompiler.ir.mlir_oracle` compiles its output with upstream MLIR and compares
the results, and `Program.to_mlir` writes it down for other compilers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import arith, func, tensor
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, qc, types
from qcompiler.ir.effects import erase_dead
from qcompiler.ir.linalg_formats import sections_of
from qcompiler.ir.linalg_lowering import CONSTANTS, STATES, UPDATES, LinalgLowering, lower
from qcompiler.ir.module import arg_names, functions, path_of, return_op, set_arg_names, update_function_type
from qcompiler.ir.types import QTensorType, shape_of
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.plan.dims import dim


@dataclass(frozen=True)
class LowerQcToLinalgPass(ModulePass):
    """Lowers every qc op of every function."""

    name = "lower-qc-to-linalg"
    numerics: ClassVar[Numerics] = Reordered(1e-4)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            _lower_function(function)


def _lower_function(function: func.FuncOp) -> None:
    block, names = function.body.block, list(arg_names(function))
    inputs = list(block.args)
    states = _states_to_arguments(block)
    updates = _updates_to_results(function)
    keys: list[str] = []
    sections: dict[SSAValue, Mapping[str, SSAValue]] = {}
    decoded: dict[tuple[SSAValue, bool], SSAValue] = {}
    for op in list(block.ops):
        if not isinstance(op, qc.QCOp):
            continue
        builder = build.with_path(InsertPoint.before(op), path_of(op))
        if isinstance(op, qc.ConstOp):
            keys += _argument_for(op, block, sections)
            continue
        if isinstance(op, qc.DimOp):
            continue  # the rules insert more of them; all are lowered below
        results = lower(op, LinalgLowering(builder, sections, decoded))
        _replace(op, list(results))
    for op in [op for op in block.walk() if isinstance(op, qc.DimOp)]:
        expression = ast.parse(op.expr.data, mode="eval").body
        _replace(op, [_size(Builder(InsertPoint.before(op)), expression, inputs)])
    for op in reversed([op for op in block.ops if isinstance(op, qc.ConstOp)]):
        block.erase_op(op)
    erase_dead(block)
    for attribute, listed in ((CONSTANTS, keys), (STATES, states), (UPDATES, updates)):
        if listed or attribute == CONSTANTS:
            function.attributes[attribute] = ArrayAttr([StringAttr(key) for key in listed])
    update_function_type(function)
    set_arg_names(function, [*names, *states, *keys])


def _states_to_arguments(block: Block) -> list[str]:
    """Adds an argument for each state that is read. Returns their keys."""
    arguments: dict[str, SSAValue] = {}
    for op in [op for op in block.ops if isinstance(op, qc.StateOp)]:
        if op.key not in arguments:
            arguments[op.key] = block.insert_arg(op.result.type, len(block.args))
        _replace(op, [arguments[op.key]])
    return list(arguments)


def _updates_to_results(function: func.FuncOp) -> list[str]:
    """Adds a result for each state that is written. Returns their keys."""
    block, keys = function.body.block, list[str]()
    returned = return_op(function)
    values = list(returned.operands)
    for op in [op for op in block.ops if isinstance(op, qc.StateUpdateOp)]:
        values.append(op.value)
        keys.append(op.key)
        block.erase_op(op)
    if keys:
        block.insert_op_before(func.ReturnOp(*values), returned)
        block.erase_op(returned)
    return keys


def _replace(op: Operation, values: list[SSAValue]) -> None:
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    assert op.parent is not None
    op.parent.erase_op(op)


def _argument_for(op: qc.ConstOp, block: Block, sections: dict[SSAValue, Mapping[str, SSAValue]]) -> list[str]:
    """Adds arguments for a constant, one for each section of a packed one. Returns their keys."""
    if not isinstance(op.result.type, QTensorType):
        op.result.replace_all_uses_with(block.insert_arg(op.result.type, len(block.args)))
        return [op.key]
    found: dict[str, SSAValue] = {}
    for name, _, count, dtype in sections_of(op.result.type):
        type_: TensorType[Attribute] = types.tensor((count,), dtype)
        found[name] = block.insert_arg(type_, len(block.args))
    sections[op.result] = found
    return [f"{op.key}:{name}" for name in found]


def _size(b: Builder, expression: ast.expr, inputs: Sequence[SSAValue]) -> SSAValue:
    """The value of a dim expression, from the shapes of the function's arguments."""
    match expression:
        case ast.Constant(value=int() as value):
            return build.index_constant(b, value)
        case ast.Name(id=name):
            return _symbol(b, name, inputs)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return b.insert(arith.SubiOp(build.index_constant(b, 0), _size(b, operand, inputs))).result
        case ast.BinOp(left=left, op=operator, right=right):
            kinds = {ast.Add: arith.AddiOp, ast.Sub: arith.SubiOp, ast.Mult: arith.MuliOp,
                     ast.FloorDiv: arith.FloorDivSIOp, ast.Mod: arith.RemSIOp}  # fmt: skip
            made = kinds[type(operator)](_size(b, left, inputs), _size(b, right, inputs))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            extreme = arith.MaxSIOp if name == "max" else arith.MinSIOp
            made = extreme(_size(b, left, inputs), _size(b, right, inputs))
        case _:
            raise QCompilerError(f"the dimension expression {ast.unparse(expression)!r} cannot be lowered")
    result: SSAValue = b.insert(made).results[0]
    return result


def _symbol(b: Builder, name: str, inputs: Sequence[SSAValue]) -> SSAValue:
    """The value of a symbol: the size of an argument, or what makes `3*name + 2` the size of one."""
    linear: list[tuple[int, int, SSAValue, int]] = []
    for argument in inputs:
        for axis, entry in enumerate(shape_of(argument.type) if isinstance(argument.type, TensorType) else ()):
            if dim(entry).symbols() == {name}:
                at = [dim(entry).evaluate({name: value}) for value in (0, 1, 2)]
                if at[1] > at[0] and at[2] - at[1] == at[1] - at[0]:
                    linear.append((at[1] - at[0], at[0], argument, axis))
    if not linear:
        raise QCompilerError(
            f"no argument has the dimension '{name}' as one of its sizes, nor one from which it follows; name the "
            "dimension of an input so, or a multiple of it"
        )
    factor, offset, argument, axis = min(linear, key=lambda found: found[:2])
    size: SSAValue = b.insert(tensor.DimOp(argument, build.index_constant(b, axis))).result
    if offset:
        size = b.insert(arith.SubiOp(size, build.index_constant(b, offset))).result
    return size if factor == 1 else b.insert(arith.FloorDivSIOp(size, build.index_constant(b, factor))).result
