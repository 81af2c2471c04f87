"""Reads and writes a module's metadata: entry points, ranges of symbols, argument names, op paths.

    func.func @main(%x: tensor<?x384xf32, #qc.dims<["s", 384]>> {qc.name = "x"}) -> …
        attributes {qc.ranges = {s = array<i64: 1, 512>}}
    func.func @init() -> (…) attributes {qc.results = ["init.0"]}

`qc.path` on an op is the path of the module in the user's model that the op came from.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, Block, Operation

from qcompiler.errors import QCompilerError
from qcompiler.ir.types import shape_of
from qcompiler.plan.dims import Range, dim

PATH = "qc.path"
RANGES = "qc.ranges"
RESULTS = "qc.results"
ARG_NAME = "qc.name"
INIT = "init"


# --- functions -------------------------------------------------------------------------------------------------------


def functions(module: ModuleOp) -> Iterator[func.FuncOp]:
    """Every function with a body, in order."""
    for op in module.body.block.ops:
        if isinstance(op, func.FuncOp) and op.body.blocks:
            yield op


def find_func(module: ModuleOp, name: str) -> func.FuncOp | None:
    """The function of that name, or None."""
    return next((f for f in functions(module) if f.sym_name.data == name), None)


def main_func(module: ModuleOp) -> func.FuncOp:
    """`@main`, which frontends create and `specialize` splits into entry points."""
    found = find_func(module, "main")
    if found is None:
        names = ", ".join(f"@{f.sym_name.data}" for f in functions(module)) or "none"
        raise QCompilerError(f"the module has no function @main (functions: {names})")
    return found


def entry_funcs(module: ModuleOp) -> list[func.FuncOp]:
    """The entry points: every function but `@init`."""
    return [f for f in functions(module) if f.sym_name.data != INIT]


def init_func(module: ModuleOp) -> func.FuncOp | None:
    """`@init`, which computes what depends on no input, once per device; None if there is none."""
    return find_func(module, INIT)


def body_of(function: func.FuncOp) -> Block:
    """The single block of a function."""
    return function.body.block


def return_op(function: func.FuncOp) -> func.ReturnOp:
    """The function's terminator."""
    last = function.body.block.last_op
    if not isinstance(last, func.ReturnOp):
        raise QCompilerError(f"@{function.sym_name.data} does not end in func.return")
    return last


def update_function_type(function: func.FuncOp) -> None:
    """Updates the signature to match the block arguments and the returned values."""
    results = [value.type for value in return_op(function).operands]
    function.function_type = FunctionType.from_lists([a.type for a in function.body.block.args], results)


# --- ranges of symbols -----------------------------------------------------------------------------------------------


def ranges_of(function: func.FuncOp) -> dict[str, Range]:
    """`qc.ranges`: the inclusive bounds of every symbol. Empty for a static function."""
    attribute = function.attributes.get(RANGES)
    if attribute is None:
        return {}
    ranges: dict[str, Range] = {}
    entries = attribute.data.items() if isinstance(attribute, DictionaryAttr) else ()
    for name, bounds in entries:
        values = bounds.get_values() if isinstance(bounds, DenseArrayBase) else ()
        if len(values) != 2:
            raise QCompilerError(f"{RANGES} of symbol '{name}' must be array<i64: min, max>")
        ranges[name] = (int(values[0]), int(values[1]))
    return ranges


def set_ranges(function: func.FuncOp, ranges: Mapping[str, Range]) -> None:
    """Writes `qc.ranges`; removes the attribute if there are no symbols."""
    if not ranges:
        function.attributes.pop(RANGES, None)
        return
    entries = {name: DenseArrayBase.from_list(i64, list(bounds)) for name, bounds in sorted(ranges.items())}
    function.attributes[RANGES] = DictionaryAttr(entries)


def symbols_of(function: func.FuncOp) -> tuple[str, ...]:
    """The symbols in the argument types, sorted."""
    found: set[str] = set()
    for argument in function.body.block.args:
        if isinstance(argument.type, TensorType):
            for entry in shape_of(argument.type):
                found |= dim(entry).symbols()
    return tuple(sorted(found))


# --- names -----------------------------------------------------------------------------------------------------------


def arg_names(function: func.FuncOp) -> tuple[str, ...]:
    """`qc.name` of every argument; `argN` for arguments without one."""
    entries = function.arg_attrs.data if function.arg_attrs is not None else ()
    names: list[str] = []
    for index in range(len(function.body.block.args)):
        name = entries[index].data.get(ARG_NAME) if index < len(entries) else None
        names.append(name.data if isinstance(name, StringAttr) else f"arg{index}")
    return tuple(names)


def set_arg_names(function: func.FuncOp, names: Sequence[str]) -> None:
    """Writes `qc.name` of every argument and keeps its other attributes."""
    count = len(function.body.block.args)
    if len(names) != count:
        raise QCompilerError(f"@{function.sym_name.data} has {count} arguments, not {len(names)}")
    old = function.arg_attrs.data if function.arg_attrs is not None else ()
    entries: list[DictionaryAttr] = []
    for index, name in enumerate(names):
        attributes: dict[str, Attribute] = dict(old[index].data) if index < len(old) else {}
        attributes[ARG_NAME] = StringAttr(name)
        entries.append(DictionaryAttr(attributes))
    function.arg_attrs = ArrayAttr(entries)


def result_keys(function: func.FuncOp) -> tuple[str, ...]:
    """`qc.results` of `@init`: the constant keys under which its results are read."""
    attribute = function.attributes.get(RESULTS)
    if not isinstance(attribute, ArrayAttr):
        return ()
    return tuple(entry.data for entry in attribute if isinstance(entry, StringAttr))


def set_result_keys(function: func.FuncOp, keys: Sequence[str]) -> None:
    """Writes `qc.results`."""
    function.attributes[RESULTS] = ArrayAttr([StringAttr(key) for key in keys])


_PATHLESS = ("linalg.transpose", "linalg.broadcast", "tensor.empty")
"""Ops whose syntax has no place for attributes. Their path is that of the value they read."""


def is_named(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the globs `patterns` matches a module path. Case counts."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def path_of(op: Operation) -> str:
    """The module path an op came from (for a view: that of its source); empty if it is not known."""
    path = op.attributes.get(PATH)
    while path is None and op.name in _PATHLESS and op.operands and isinstance(op.operands[0].owner, Operation):
        op = op.operands[0].owner
        path = op.attributes.get(PATH)
    return path.data if isinstance(path, StringAttr) else ""


def set_path(op: Operation, path: str) -> None:
    """Writes `qc.path`; an empty path removes it. Transposes, broadcasts and empty tensors carry none (see
    `path_of`)."""
    if path and op.name not in _PATHLESS:
        op.attributes[PATH] = StringAttr(path)
    else:
        op.attributes.pop(PATH, None)
