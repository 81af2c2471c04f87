"""Writes a loop kernel once its form is chosen: items, shared among tasks, and accesses of 16 elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.kernels.cpu.text import entry_function, pointer, symbol_declarations, task_function
from qcompiler.kernels.loop_nest import Loop, Nest
from qcompiler.kernels.text import c_dim, header_comment, indent, needed
from qcompiler.plan.dims import Expr

CHUNK = 4096
"""The most elements of the last loop in one item. With a body of 16 operations this is the work of one task."""

SCALAR_COST = 8
"""How much longer an operation takes without vector instructions."""

LANES = 16


@dataclass(frozen=True)
class LoopForm:
    """What a kernel does with one item. `outer` loops enumerate the items; `cost` is the number of operations per
    item."""

    note: str
    outer: tuple[Loop, ...]
    cost: str
    lines: tuple[str, ...]


def write(nest: Nest, form: LoopForm) -> str:
    """The task function that walks its share of the items, and the function that launches it."""
    spec = nest.spec
    run = [*_items(form), f"qc_run(ctx, op, sym, {_tasks(form)}, qk_{spec.name}_task);"]
    launch = [*needed(_limits(nest, form), run), *run]
    return "\n".join([_head_and_task(nest, form), entry_function(spec, launch)])


def write_part(nest: Nest, form: LoopForm, pointers: Sequence[str] | None = None) -> str:
    """The task function, and `qk_<spec>_tasks(sym)`, which is how many tasks the loop is worth: for a launch of several
    parts. `pointers` declare the operands, where they are others than those of the nest."""
    spec = nest.spec
    count = [*_items(form), f"return {_tasks(form)};"]
    lines = [*symbol_declarations(spec.symbols), *_limits(nest, form)]
    text = "\n".join(indent([*needed(lines, count), *count]))
    return "\n".join(
        [
            _head_and_task(nest, form, pointers),
            f"static int64_t qk_{spec.name}_tasks(const int64_t* sym) {{\n{text}\n}}\n",
        ]
    )


def _items(form: LoopForm) -> list[str]:
    return [f"const int64_t items = {' * '.join(loop.limit for loop in form.outer) or '1'};"]


def _tasks(form: LoopForm) -> str:
    return f"qc_tasks(items, {form.cost})"


def _limits(nest: Nest, form: LoopForm) -> list[str]:
    return [*nest.limits(), *_chunk_limits(nest, form)]


def _head_and_task(nest: Nest, form: LoopForm, pointers: Sequence[str] | None = None) -> str:
    spec = nest.spec
    start, advance = _odometer(form.outer)
    walk = [
        *_items(form),
        f"const int64_t tasks = {_tasks(form)};",
        "const int64_t begin = qc_share(items, task, tasks), end = qc_share(items, task + 1, tasks);",
        *_unless_empty(form.outer),
        *start,
        "for (int64_t item = begin; item < end; item++) {",
        *indent([*form.lines, *advance]),
        "}",
    ]
    task = [*(_pointers(nest) if pointers is None else pointers), *needed(_limits(nest, form), walk), *walk]
    return "\n".join([header_comment(spec, form.note), task_function(spec, task)])


def _pointers(nest: Nest) -> list[str]:
    """A typed pointer for each operand that the kernel accesses."""
    return [pointer(nest.spec.operands[i], i, nest.names[i], "call->op") for i in live_operands(nest)]


def _chunk_limits(nest: Nest, form: LoopForm) -> list[str]:
    """Extents of the loops that a form adds: over chunks or tiles of one of the nest's loops."""
    own = {loop.name for loop in nest.loops}
    return [f"const int64_t {loop.limit} = {c_dim(loop.extent)};" for loop in form.outer if loop.name not in own]


def _unless_empty(outer: Sequence[Loop]) -> list[str]:
    """Returns early from a task without items, before the odometer divides by an extent that may be zero."""
    divides = len(outer) > 1 and not all(loop.extent.is_static for loop in outer[1:])
    return ["if (begin == end) return;"] if divides else []


def _odometer(outer: Sequence[Loop]) -> tuple[list[str], list[str]]:
    """Statements that set the outer loop variables for item `begin`, and statements that advance them by one item."""
    start: list[str] = []
    behind = ""
    for position, loop in reversed(list(enumerate(outer))):
        index = f"begin / ({behind})" if behind else "begin"
        start.insert(0, f"int64_t {loop.name} = {index}{f' % {loop.limit}' if position else ''};")
        behind = f"{loop.limit} * {behind}" if behind else loop.limit
    advance: list[str] = []
    for loop in outer:
        if loop is outer[0]:
            advance = [f"{loop.name}++;"]
        else:
            advance = [f"if (++{loop.name} == {loop.limit}) {{", f"    {loop.name} = 0;", *indent(advance), "}"]
    return start, advance


def chunked(loop: Loop, size: int) -> tuple[tuple[Loop, ...], list[str]]:
    """Splits a loop into chunks: the loop over chunks (none if one is enough), and statements that declare first and
    last."""
    if loop.extent.is_static and loop.extent.value <= size:
        return (), ["const int64_t first = 0, last = " + loop.limit + ";"]
    chunks = Loop("chunk", (loop.extent + (size - 1)) // Expr.constant(size), (), None)
    first = f"const int64_t first = chunk * {size}, last = qc_min(first + {size}, {loop.limit});"
    return (chunks,), [first]


@dataclass(frozen=True)
class Columns:
    """`count` iterations of `loop`, at most 16, from `first` on."""

    loop: Loop
    first: str = "j"
    count: str = "n"


def load(nest: Nest, operand: int, columns: Columns, row: str) -> str:
    """The vector of an operand at `columns`. `row` is its address at the variables of all other loops."""
    step, first = columns.loop.steps[operand], columns.first
    if step == 0:
        return f"vset(qc_load({row}))"
    if step == 1:
        return f"vload_upto({row} + {first}, {columns.count})"
    return f"vload_s({row} + ({first}) * {c_dim(step)}, {c_dim(step)}, {columns.count})"


def store(nest: Nest, operand: int, columns: Columns, row: str, value: str) -> str:
    """The statement that writes `value` to an operand at `columns`."""
    step, first = columns.loop.steps[operand], columns.first
    if step == 1:
        return f"vstore_upto({row} + {first}, {value}, {columns.count});"
    return f"vstore_s({row} + ({first}) * {c_dim(step)}, {c_dim(step)}, {value}, {columns.count});"


def bases(nest: Nest, loops: Sequence[Loop], operands: Sequence[int]) -> tuple[list[str], dict[int, str]]:
    """Declarations of one row pointer per operand at `loops`, and the pointers' names."""
    names = {i: f"{nest.names[i]}_row" for i in operands}
    return [f"const auto {names[i]} = {nest.address(i, loops)};" for i in operands], names


def live_operands(nest: Nest) -> list[int]:
    """Inputs that the body reads, and all outputs."""
    return [i for i in range(len(nest.spec.operands)) if i >= nest.inputs or nest.used(i)]
