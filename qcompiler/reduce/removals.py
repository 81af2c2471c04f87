"""What can be taken out of a module: each reduction has a count of things, and makes the module without some of them.

    functions     whole functions, and ops of the module such as an rt.kernel
    ops           ops of function bodies; a result that is still read becomes an argument of the function
    last ops      the same; where such a result is returned, the operands of the op are returned instead
    bypassed ops  the same; such a result becomes an operand of the op, of the same type
    inner ops     ops in regions (epilogues, bodies of linalg.generic, steps of an rt.entry); such a result becomes an
                  operand, an argument of the block, or a constant
    regions       all blocks of a region, where the op does without them
    results       values that a function returns
    arguments     arguments that nothing reads
    attributes    attributes by name, in the whole module
    passes        passes of the list

None of them asks whether the result is valid: the verifier says so, when the candidate runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from xdsl.dialects import arith, func
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    TensorType,
)
from xdsl.ir import Block, Operation, OpResult, Region, SSAValue
from xdsl.traits import IsTerminator

from qcompiler.ir.module import functions, return_op, update_function_type
from qcompiler.reduce.case import Case

Substitute = Callable[[Operation, SSAValue], SSAValue | None]


@dataclass(frozen=True)
class Removal:
    """`count` counts the things of a case; `without` makes the case without those of these numbers, or None."""

    name: str
    count: Callable[[Case], int]
    without: Callable[[Case, Set[int]], Case | None]


# --- ops -------------------------------------------------------------------------------------------------------------


def _is_removable(op: Operation) -> bool:
    return not op.has_trait(IsTerminator)


def _outer(module: ModuleOp) -> list[Operation]:
    """The ops in the bodies of functions."""
    return [op for function in functions(module) for op in function.body.ops if _is_removable(op)]


def _inner(module: ModuleOp) -> list[Operation]:
    """The ops in regions, but for the bodies of functions."""
    found = []
    for op in module.walk():
        parent = op.parent_op()
        if parent is not None and not isinstance(parent, ModuleOp | func.FuncOp) and _is_removable(op):
            found.append(op)
    return found


def _top(module: ModuleOp) -> list[Operation]:
    return list(module.body.block.ops)


def _without_last_ops(case: Case, numbers: Set[int]) -> Case | None:
    module = case.module.clone()
    ops = _outer(module)
    for number in sorted(numbers, reverse=True):
        _return_operands_of(ops[number])
        if not _erase(ops[number], _an_argument):
            return None
    for function in functions(module):
        update_function_type(function)
    return case.of(module)


def _return_operands_of(op: Operation) -> None:
    """Where a function returns results of the op, it returns what the op computes them from."""
    function = op.parent_op()
    if not isinstance(function, func.FuncOp) or not isinstance(function.body.block.last_op, func.ReturnOp):
        return
    last = return_op(function)
    if not any(value.owner is op for value in last.operands):
        return
    computed = [value for value in op.operands if isinstance(value, OpResult) and isinstance(value.type, TensorType)]
    kept = [value for value in last.operands if value.owner is not op]
    last.operands = list(dict.fromkeys([*kept, *computed]))
    function.res_attrs = None


def _ops(name: str, listed: Callable[[ModuleOp], list[Operation]], instead: Substitute) -> Removal:
    def without(case: Case, numbers: Set[int]) -> Case | None:
        module = case.module.clone()
        ops = listed(module)
        for number in sorted(numbers, reverse=True):
            if not _erase(ops[number], instead):
                return None
        for function in functions(module):
            update_function_type(function)
        return case.of(module)

    return Removal(name, lambda case: len(listed(case.module)), without)


def _erase(op: Operation, instead: Substitute) -> bool:
    """Erases an op, with substitutes for the results that are read. False if there is none for one of them."""
    if op.parent is None:  # went with the op that it was in
        return True
    for result in op.results:
        if not result.uses:
            continue
        value = instead(op, result)
        if value is None:
            return False
        result.replace_all_uses_with(value)
    op.parent.erase_op(op, safe_erase=False)
    return True


def _an_argument(op: Operation, result: SSAValue) -> SSAValue | None:
    function = op.parent_op()
    if not isinstance(function, func.FuncOp):
        return None
    block = function.body.block
    if function.arg_attrs is not None:
        function.arg_attrs = ArrayAttr([*function.arg_attrs.data, DictionaryAttr({})])
    return block.insert_arg(result.type, len(block.args))


def _an_operand(op: Operation, result: SSAValue) -> SSAValue | None:
    return next((operand for operand in op.operands if operand.type == result.type), None)


def _the_last_operand(op: Operation, result: SSAValue) -> SSAValue | None:
    return next((operand for operand in reversed(op.operands) if operand.type == result.type), None)


def _anything_near(op: Operation, result: SSAValue) -> SSAValue | None:
    """An operand, an argument of the block, or a constant, of the type of the result."""
    if (operand := _an_operand(op, result)) is not None:
        return operand
    block = op.parent
    assert isinstance(block, Block)
    if (argument := next((each for each in block.args if each.type == result.type), None)) is not None:
        return argument
    constant = _constant(result)
    if constant is None or isinstance(op, arith.ConstantOp):
        return None
    block.insert_op_before(constant, op)
    return constant.result


def _constant(value: SSAValue) -> arith.ConstantOp | None:
    """One, as a constant of the type of a scalar."""
    if isinstance(value.type, AnyFloat):
        return arith.ConstantOp(FloatAttr(1.0, value.type))
    if isinstance(value.type, IntegerType | IndexType):
        return arith.ConstantOp(IntegerAttr(1, value.type))
    return None


# --- regions, results, arguments -------------------------------------------------------------------------------------


def _regions(module: ModuleOp) -> list[Region]:
    """The regions of ops that hold something, but for the module's and the functions' own."""
    return [
        region
        for op in module.walk()
        if not isinstance(op, ModuleOp | func.FuncOp)
        for region in op.regions
        if region.blocks
    ]


def _without_regions(case: Case, numbers: Set[int]) -> Case | None:
    module = case.module.clone()
    for number, region in enumerate(_regions(module)):
        if number in numbers and region.parent is not None:
            for block in list(region.blocks):
                region.erase_block(block, safe_erase=False)
    return case.of(module)


def _returned(module: ModuleOp) -> list[tuple[func.FuncOp, int]]:
    return [
        (function, place)
        for function in functions(module)
        if isinstance(function.body.block.last_op, func.ReturnOp)
        for place in range(len(return_op(function).operands))
    ]


def _without_results(case: Case, numbers: Set[int]) -> Case | None:
    module = case.module.clone()
    dropped: dict[func.FuncOp, set[int]] = {}
    for number, (function, place) in enumerate(_returned(module)):
        if number in numbers:
            dropped.setdefault(function, set()).add(place)
    for function, places in dropped.items():
        old = return_op(function)
        old.operands = [value for place, value in enumerate(old.operands) if place not in places]
        function.res_attrs = _without_places(function.res_attrs, places)
        update_function_type(function)
    return case.of(module)


def _unread(module: ModuleOp) -> list[tuple[func.FuncOp, int]]:
    return [
        (function, argument.index)
        for function in functions(module)
        for argument in function.body.block.args
        if not argument.uses
    ]


def _without_arguments(case: Case, numbers: Set[int]) -> Case | None:
    module = case.module.clone()
    dropped: dict[func.FuncOp, set[int]] = {}
    for number, (function, place) in enumerate(_unread(module)):
        if number in numbers:
            dropped.setdefault(function, set()).add(place)
    for function, places in dropped.items():
        for place in sorted(places, reverse=True):
            function.body.block.erase_arg(function.body.block.args[place])
        function.arg_attrs = _without_places(function.arg_attrs, places)
        update_function_type(function)
    return case.of(module)


def _without_places(attributes: ArrayAttr[DictionaryAttr] | None, places: Set[int]) -> ArrayAttr[DictionaryAttr] | None:
    if attributes is None:
        return None
    return ArrayAttr([each for place, each in enumerate(attributes.data) if place not in places])


# --- attributes and passes -------------------------------------------------------------------------------------------


def _attributes(module: ModuleOp) -> list[str]:
    """The names of attributes that stand beside what the ops define, and of those of arguments."""
    names = {name for op in module.walk() for name in op.attributes}
    for function in functions(module):
        for each in function.arg_attrs.data if function.arg_attrs is not None else ():
            names.update(each.data)
    return sorted(names)


def _without_attributes(case: Case, numbers: Set[int]) -> Case | None:
    module = case.module.clone()
    gone = {name for number, name in enumerate(_attributes(module)) if number in numbers}
    for op in module.walk():
        for name in gone.intersection(op.attributes):
            del op.attributes[name]
    for function in functions(module):
        if function.arg_attrs is not None:
            kept = [{k: v for k, v in each.data.items() if k not in gone} for each in function.arg_attrs.data]
            function.arg_attrs = ArrayAttr(map(DictionaryAttr, kept)) if any(kept) else None
    return case.of(module)


def _without_passes(case: Case, numbers: Set[int]) -> Case | None:
    left = tuple(each for number, each in enumerate(case.passes) if number not in numbers)
    return replace(case, passes=left) if left else None


REMOVALS: Sequence[Removal] = (
    Removal("passes", lambda case: len(case.passes), _without_passes),
    _ops("functions", _top, lambda _, __: None),
    _ops("ops", _outer, _an_argument),
    Removal("results", lambda case: len(_returned(case.module)), _without_results),
    Removal("arguments", lambda case: len(_unread(case.module)), _without_arguments),
    Removal("last ops", lambda case: len(_outer(case.module)), _without_last_ops),
    _ops("bypassed ops", _outer, _an_operand),
    Removal("regions", lambda case: len(_regions(case.module)), _without_regions),
    _ops("inner ops", _inner, _anything_near),
    _ops("inner ops, by the last operand", _inner, _the_last_operand),
    Removal("attributes", lambda case: len(_attributes(case.module)), _without_attributes),
)
"""In the order in which they are tried: those that take most away come first."""

__all__ = ["REMOVALS", "Removal"]
