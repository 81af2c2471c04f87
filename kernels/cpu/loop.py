"""Loop kernels: pointwise nests here, reductions in `loop_reduce`.

    for each item of the outer loops, shared among tasks:
        for j in steps of 16 along the last loop: load, body, store

The operands' steps along the last loop decide among three forms of a pointwise nest. *vector*: steps are 0 or 1, or
elements are loaded one by one. *tile*: an input is contiguous along another loop (a transposition), so blocks of 16 x
16 pass through a small buffer. *scalar*: the body or an element type has no 16-lane form.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cpu import loop_reduce
from qcompiler.kernels.cpu.loop_form import (
    CHUNK,
    LANES,
    SCALAR_COST,
    Columns,
    LoopForm,
    bases,
    chunked,
    live_operands,
    load,
    store,
    write,
    write_part,
)
from qcompiler.kernels.cpu.vector import vector_obstacle, vector_statements
from qcompiler.kernels.loop_nest import Loop, Nest, build_nest
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import c_dim, indent
from qcompiler.plan.dims import Expr
from qcompiler.plan.kernel import KernelSpec

TILE = LANES


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: accumulators and tiles are on the stack."""
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    return write(*_formed(spec))


def emit_part(spec: KernelSpec) -> str:
    """The text without the function that launches it: see `write_part`."""
    return write_part(*_formed(spec))


def _formed(spec: KernelSpec) -> tuple[Nest, LoopForm]:
    nest = build_nest(spec)
    obstacle = vector_obstacle(nest.program)
    if "reduction" in nest.body.iterators:
        form = loop_reduce.choose(nest, obstacle)
    elif obstacle is not None:
        form = _scalar(nest, f"scalar ({obstacle})")
    elif not nest.parallel:
        form = _scalar(nest, "one element")
    else:
        partner = _transposed_loop(nest)
        form = _vector(nest) if partner is None else _tile(nest, partner)
    return nest, form


# --- vector ----------------------------------------------------------------------------------------------------------


def _vector_body(nest: Nest, inner: Loop, rows: dict[int, str], tiled: dict[int, str] | None = None) -> list[str]:
    """Loads, statements and stores for the columns [j, j + n). Inputs in `tiled` come from a buffer instead."""
    lines, values = [], []
    for i in range(nest.inputs):
        if not nest.used(i):
            values.append("?")
            continue
        name = f"v_{nest.names[i]}"
        source = (tiled or {}).get(i) or load(nest, i, Columns(inner), rows[i])
        lines.append(f"const auto {name} = {source};")
        values.append(name)
    statements = vector_statements(nest.program, values + ["?"] * len(nest.outputs), stored=nest.stored)
    lines += statements.lines
    for i, result in enumerate(statements.results):
        lines.append(store(nest, nest.inputs + i, Columns(inner), rows[nest.inputs + i], result))
    return lines


def _vector(nest: Nest) -> LoopForm:
    inner, outer = nest.parallel[-1], nest.parallel[:-1]
    declarations, rows = bases(nest, outer, live_operands(nest))
    chunks, span = chunked(inner, CHUNK)
    lines = [
        *declarations,
        *span,
        "const auto step = [&](int64_t j, int n) QC_BODY {",
        *indent(_vector_body(nest, inner, rows)),
        "};",
        "int64_t j = first;",
        f"for (; j + {TILE} <= last; j += {TILE}) step(j, {TILE});",
        "if (j < last) step(j, (int)(last - j));",
    ]
    cost = f"{nest.cost()} * qc_min({CHUNK}, {inner.limit})"
    return LoopForm(f"16 lanes along {inner.name}", (*outer, *chunks), cost, tuple(lines))


# --- tile ------------------------------------------------------------------------------------------------------------


def _transposed_loop(nest: Nest) -> int | None:
    """A loop along which some floating-point input is contiguous while its step along the last loop is larger; else
    None."""
    inner = nest.parallel[-1]
    for i in range(nest.inputs):
        if not nest.used(i) or inner.steps[i] in (0, 1) or nest.spec.operands[i].dtype not in ("f32", "bf16", "f16"):
            continue
        for position, loop in enumerate(nest.parallel[:-1]):
            if loop.steps[i] == 1:
                return position
    return None


def _tile(nest: Nest, position: int) -> LoopForm:
    """Blocks of 16 iterations of the partner loop by 16 of the last. Transposed inputs pass through `<name>_tile`."""
    partner, inner = nest.parallel[position], nest.parallel[-1]
    rest = (*nest.parallel[:position], *nest.parallel[position + 1 : -1])
    tiles = Loop("tile", (partner.extent + (TILE - 1)) // Expr.constant(TILE), (), None)
    transposed = [
        i
        for i in range(nest.inputs)
        if nest.used(i)
        and partner.steps[i] == 1
        and inner.steps[i] not in (0, 1)
        and nest.spec.operands[i].dtype in ("f32", "bf16", "f16")
    ]
    plain = [i for i in live_operands(nest) if i not in transposed]
    fill = [line for i in transposed for line in _fill_tile(nest, i, rest, partner, inner)]
    declarations, rows = bases(nest, (*rest, partner), plain)
    tiled = {i: f"vload({nest.names[i]}_tile + row * {TILE})" for i in transposed}
    lines = [
        f"const int64_t first = tile * {TILE}, height = qc_min({TILE}, {partner.limit} - first);",
        f"for (int64_t j = 0; j < {inner.limit}; j += {TILE}) {{",
        f"    const int n = (int)qc_min({TILE}, {inner.limit} - j);",
        *indent(fill),
        "    for (int64_t row = 0; row < height; row++) {",
        f"        const int64_t {partner.name} = first + row;",
        *indent([*declarations, *_vector_body(nest, inner, rows, tiled)], 2),
        "    }",
        "}",
    ]
    cost = f"{nest.cost() * TILE} * {inner.limit}"
    note = f"16 x 16 tiles of {partner.name} and {inner.name}"
    return LoopForm(note, (*rest, tiles), cost, tuple(lines))


def _fill_tile(nest: Nest, i: int, rest: Sequence[Loop], partner: Loop, inner: Loop) -> list[str]:
    """``x_tile[row][lane] = x[first + row, j + lane]``, where x is contiguous along the row's loop."""
    name, step = nest.names[i], c_dim(inner.steps[i])
    at = {partner.name: "first", inner.name: "j"}
    element = f"{name}_corner + row + lane * {step}"
    return [
        f"float {name}_tile[{TILE * TILE}];",
        f"const auto {name}_corner = {nest.address(i, (*rest, partner, inner), at)};",
        f"if (height == {TILE} && n == {TILE}) {{",
        f"    vtranspose({name}_corner, {step}, {name}_tile, {TILE});",
        "} else {",
        "    for (int64_t row = 0; row < height; row++)",
        f"        for (int lane = 0; lane < {TILE}; lane++)",
        f"            {name}_tile[row * {TILE} + lane] = lane < n ? qc_load({element}) : 0.0f;",
        "}",
    ]


# --- scalar ----------------------------------------------------------------------------------------------------------


def _scalar(nest: Nest, note: str) -> LoopForm:
    """One element at a time. The last loop is split into chunks as in the vector form."""
    inner, outer = (nest.parallel[-1], nest.parallel[:-1]) if nest.parallel else (None, ())
    statements_in = [f"qc_load({nest.address(i, nest.parallel)})" if nest.used(i) else "?" for i in range(nest.inputs)]
    loads = [f"const auto v_{nest.names[i]} = {text};" for i, text in enumerate(statements_in) if nest.used(i)]
    values = [f"v_{nest.names[i]}" for i in range(nest.inputs)] + ["?"] * len(nest.outputs)
    statements = scalar_statements(nest.program, values, nest.indices, stored=nest.stored)
    body = [*loads, *statements.lines]
    for i, result in enumerate(statements.results):
        body.append(f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, {result});")
    if inner is None:
        return LoopForm(note, (), str(nest.cost()), tuple(body))
    chunks, span = chunked(inner, CHUNK)
    lines = [*span, f"for (int64_t {inner.name} = first; {inner.name} < last; {inner.name}++) {{", *indent(body), "}"]
    cost = f"{nest.cost() * SCALAR_COST} * qc_min({CHUNK}, {inner.limit})"
    return LoopForm(note, (*outer, *chunks), cost, tuple(lines))
