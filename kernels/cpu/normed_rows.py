"""A part of a launch that normalises rows and reads them in a loop: an item is a row.

    alignas(64) float normed[128];
    { … the norm kernel's code for one row, with the result in normed … }
    for (int64_t i3 = 0; i3 < i3_end; i3++)
        16 columns at a time: the loop's body

The row is written to a buffer on the stack, in the type that the norm's kernel would store, and stays in the L1 cache.
So the bits are those of the two kernels.
"""

from __future__ import annotations

import math

import msgspec

from qcompiler.kernels.cpu.loop_form import LANES, SCALAR_COST, Columns, LoopForm, bases, load, store, write_part
from qcompiler.kernels.cpu.rows import row_lines
from qcompiler.kernels.cpu.text import pointer
from qcompiler.kernels.cpu.vector import vector_obstacle, vector_statements
from qcompiler.kernels.loop_nest import Loop
from qcompiler.kernels.normed_part import NormedPart
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, indent

_LINE = 64


def emit_part(part: NormedPart) -> str:
    """The task function, and how many tasks the rows are worth: see `write_part`."""
    nest = part.nest
    obstacle = vector_obstacle(nest.program)
    inside = math.prod(loop.extent.value for loop in part.columns)
    work = part.form.cost * part.cols + nest.cost() * inside * (1 if obstacle is None else SCALAR_COST)
    # The longest loop in the row has the SIMD lanes: of a rotation of pairs that is the loop over the pairs.
    along = max(part.columns, key=lambda loop: loop.extent.value)
    around = [loop for loop in part.columns if loop is not along]
    body = _vectors(part, around, along) if obstacle is None else _elements(part, along)
    how = f"16 lanes along {along.name}" if obstacle is None else f"scalar ({obstacle})"
    for loop in reversed(around):
        body = [f"for (int64_t {loop.name} = 0; {loop.name} < {loop.limit}; {loop.name}++) {{", *indent(body), "}"]
    lines = [*part.places(), *_normalised(part), *body]
    note = f"a row at a time: {part.form.note}, then {how}"
    return write_part(nest, LoopForm(note, part.rows, str(work), tuple(lines)), _pointers(part))


def _pointers(part: NormedPart) -> list[str]:
    """A typed pointer for each operand, in the order of the part's function."""
    names = [*part.roles, *(part.nest.names[i] for i in part.others)]
    used = {*part.roles, *(part.nest.names[i] for i in part.others if i >= part.nest.inputs or part.nest.used(i))}
    given = zip(part.signature.operands, names, strict=True)
    return [pointer(operand, i, name, "call->op") for i, (operand, name) in enumerate(given) if name in used]


def _normalised(part: NormedPart) -> list[str]:
    """Statements that write the row to `normed`."""
    result = part.norm.operands[-1]
    out = msgspec.structs.replace(result, strides=(*(0 for _ in result.shape[1:]), 1))
    kind = STORAGE_TYPES[result.dtype]
    lines = row_lines(part.form, {**part.roles, "out": out})
    lines = lines[len(part.form.places()) :]
    return [
        f"alignas({_LINE}) {kind} normed[{part.cols}];",
        "{",
        f"    {kind}* const out = normed;",
        f"    const int64_t cols = {part.cols};",
        *indent(lines),
        "}",
    ]


def _addresses(part: NormedPart, around: list[Loop]) -> tuple[list[str], dict[int, str]]:
    """Declares where the operands' elements begin at the loops around the last one."""
    nest = part.nest
    reads = [i for i in part.reads if nest.used(i)]
    live = [i for i in part.others if i >= nest.inputs or nest.used(i)]
    lines, rows = bases(nest, [*part.rows, *around], live)
    begins = [f"const auto {nest.names[i]} = &normed[0];" for i in reads]
    inside, places = bases(nest, around, reads)
    return [*begins, *lines, *inside], rows | places


def _vectors(part: NormedPart, around: list[Loop], along: Loop) -> list[str]:
    """The body for 16 iterations of a loop at a time."""
    nest = part.nest
    declared, rows = _addresses(part, around)
    columns, loads, values = Columns(along), list[str](), list[str]()
    for i in range(nest.inputs):
        values.append(f"v_{nest.names[i]}" if nest.used(i) else "?")
        if nest.used(i):
            loads.append(f"const auto {values[i]} = {load(nest, i, columns, rows[i])};")
    made = vector_statements(nest.program, values + ["?"] * len(nest.outputs), stored=nest.stored)
    stores = [
        store(nest, nest.inputs + i, columns, rows[nest.inputs + i], result) for i, result in enumerate(made.results)
    ]
    return [
        *declared,
        f"for (int64_t j = 0; j < {along.limit}; j += {LANES}) {{",
        f"    const int n = (int)qc_min({LANES}, {along.limit} - j);",
        *indent([*loads, *made.lines, *stores]),
        "}",
    ]


def _elements(part: NormedPart, along: Loop) -> list[str]:
    """The body for one element at a time."""
    nest = part.nest
    around = [loop for loop in part.columns if loop is not along]
    declared, rows = _addresses(part, around)
    at = {i: f"{row}{_moved(along, i)}" for i, row in rows.items()}
    values = [f"v_{nest.names[i]}" if nest.used(i) else "?" for i in range(nest.inputs)]
    loads = [f"const auto {values[i]} = qc_load({at[i]});" for i in range(nest.inputs) if nest.used(i)]
    made = scalar_statements(nest.program, values + ["?"] * len(nest.outputs), nest.indices, stored=nest.stored)
    stores = [f"qc_store({at[nest.inputs + i]}, {result});" for i, result in enumerate(made.results)]
    return [
        *declared,
        f"for (int64_t {along.name} = 0; {along.name} < {along.limit}; {along.name}++) {{",
        *indent([*loads, *made.lines, *stores]),
        "}",
    ]


def _moved(along: Loop, i: int) -> str:
    """What a loop adds to an operand's address."""
    step = along.steps[i]
    if step == 0:
        return ""
    return f" + {along.name}" if step == 1 else f" + {along.name} * {c_dim(step)}"
