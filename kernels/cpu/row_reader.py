"""Reads one row of a packed table in C++: codes and entries of any declaration, from canonical bytes or from panels.

    static void qk_<name>_row(const uint8_t* table, int64_t row, <type>* out)

decodes the columns of a row in runs that share all entries. It computes the entries once per run (`Split.per_entry`),
then sixteen columns at a time (`Split.per_element`). The operations and their order are those of the format's decoder,
so the bits are the same.
"""

from __future__ import annotations

import math

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Section
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.weights import (
    ANY_PANELS,
    FLOAT_LANES,
    PANEL_LAYOUTS,
    c_table,
    code_values,
    entry_type,
)
from qcompiler.kernels.decoding import shared_columns
from qcompiler.kernels.layouts.panels import LANES, joined_bytes, packed_name, per_row, plane_name, planes
from qcompiler.kernels.packed_table import PackedTable, place_in_block, places_tables
from qcompiler.kernels.text import STORAGE_TYPES, identifier, indent
from qcompiler.plan.kernel import DType


def row_function(table: PackedTable, out: DType) -> str:
    """C++ text: tables of values, tables of bit positions, and the function. KernelSelectionError for an unknown
    layout."""
    if table.layout not in (*PANEL_LAYOUTS, "canonical"):
        raise KernelSelectionError(
            f"kernel '{table.name}': a packed table is in 'canonical' or {ANY_PANELS}, not in '{table.layout}'"
        )
    d = table.fmt.declaration
    values = code_values(table.fmt, f"qk_{table.name}_codes")
    looked_up = {n: f"qk_{table.name}_{identifier(n)}" for eq in d.split.per_entry.values() for n in eq.tables}
    definitions = [values.table or "", *(c_table(where, d.table_arrays[n]) for n, where in looked_up.items())]
    definitions += [_places_tables(table, f) for f in table.packed_fields()]
    entries = [f for f in d.fields if f.covers != 1]
    names = {f.name: identifier(f.name) for f in entries}
    reads = [f"const auto {names[f.name]} = {_entry(table, f)};" for f in entries]
    computed = [f"const vf {g} = vset({eq.to_c(names, looked_up)});" for g, eq in d.split.per_entry.items()]
    element = d.split.per_element.to_c({"code": "code", **{g: g for g in d.split.per_entry}}, style=FLOAT_LANES)
    lines = [
        f"// Row `row` of {table.fmt} in {table.layout}: {d.decode.text}, rounded to {table.dtype}.",
        f"static void qk_{table.name}_row(const uint8_t* table, int64_t row, {STORAGE_TYPES[out]}* out) {{",
        f"    for (int64_t k = 0; k < {table.cols};) {{",
        *indent([*_run(table), *reads, *computed], 2),
        "        for (int64_t c = k; c < end; c += 16) {",
        "            const int lanes = (int)qc_min(end - c, 16);",
        "            float value[16] = {};",
        "            for (int j = 0; j < lanes; j++) {",
        f"                const int32_t stored = (int32_t)({_code(table)});",
        f"                value[j] = {values.scalar.format(code='stored')};",
        "            }",
        "            const vf code = vload(value);",
        f"            qg_store_lanes(out + c, qg_round<QG_{table.dtype.upper()}>({element}), lanes);",
        "        }",
        "        k = end;",
        "    }",
        "}\n",
    ]
    return "".join(definitions) + "\n".join(lines)


def _run(table: PackedTable) -> list[str]:
    """Statements that declare the `end` of the run of columns that starts at k and, if needed, its `block` and place
    there."""
    flat = table.fmt.declaration.blocking == "flat"
    run = math.gcd(shared_columns(table.fmt), table.block)
    if not run:
        return [f"const int64_t end = {table.cols};"]
    behind = f"({table.column}) / {run} * {run} + {run}" + (f" - row * {table.cols}" if flat else "")
    lines = [f"const int64_t end = qc_min({table.cols}, {behind});  // what follows has other entries"]
    return [*lines, table.find_block()] if table.block else lines


# --- entries and codes -----------------------------------------------------------------------------------------------


def _entry(table: PackedTable, field: Field) -> str:
    """The entry that serves row `row`, column k, as a float, or as an integer for entries of few bits."""
    covers = field.covers if isinstance(field.covers, int) else 0
    if table.layout in PANEL_LAYOUTS:
        return _entry_of_panels(table, field, covers)
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, f"inside / {covers}")
    return _in_order(field, f"table + {table.sections[field.name].offset}", table.entry_index(field))


def _entry_of_panels(table: PackedTable, field: Field, covers: int) -> str:
    section = _section(table, field)
    place, count = layouts.in_panels(table.layout).place_of(table.fmt, field, table.cols), per_row(field, table.cols)
    beside = f" + k / {covers}" if covers else ""
    if place == "joined":
        rows = f"table + {section.offset} + row / {LANES} * {joined_bytes(count, field.bits) * LANES} + row % {LANES}"
        return f"qg_joined_of<{field.bits}>({rows}, k / {covers})"
    index = {
        "once": "0",
        "flat": f"(row * {table.cols} + k) / {covers}" if covers else "",
        "row_blocks": f"row / {field.rows} * {count}{beside}",
        "panels": f"(row / {LANES} * {count}{beside}) * {LANES} + row % {LANES}",
    }[place]
    return f"qg_entry((const {entry_type(field)}*)(table + {section.offset}) + {index})"


def _section(table: PackedTable, field: Field) -> Section:
    return table.sections[packed_name(table.fmt, field, table.cols)]


def _code(table: PackedTable) -> str:
    """The code of row `row`, column c + j, as an unsigned integer; of a trellis its window."""
    trellis = table.fmt.declaration.trellis
    if trellis is None:
        return _code_at(table, "c + j")
    code = f"[&](int64_t column) -> uint32_t {{ return {_code_at(table, 'column')}; }}"
    return f"qg_trellis_window<{trellis.bits}, {trellis.codes}>(c + j, {code})"


def _code_at(table: PackedTable, column: str) -> str:
    field, cols = table.fmt.declaration.codes, table.cols
    if table.layout in PANEL_LAYOUTS and table.fmt.declaration.trellis is not None:
        sections = [table.sections[plane_name(shift)] for shift, _ in planes(field.bits)]
        words = ", ".join(f"(const uint32_t*)(table + {s.offset})" for s in (sections[0], sections[-1]))
        return f"qg_sequence_code<{field.bits}>({words}, {cols}, row, {column})"
    if table.layout in PANEL_LAYOUTS:
        found = []
        for shift, width in planes(field.bits):
            section, per = table.sections[plane_name(shift)], 32 // width
            words = f"((const uint32_t*)(table + {section.offset}))"
            place = f"(row / {LANES} * {section.shape[1]} + ({column}) / {per}) * {LANES} + row % {LANES}"
            code = f"({words}[{place}] >> ({column}) % {per} * {width} & {(1 << width) - 1}u)"
            found.append(f"{code} << {shift}" if shift else code)
        return " | ".join(found)
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, "(inside + c - k + j)" if column == "c + j" else f"(inside + {column} - k)")
    section = table.sections[field.name]
    per = cols if table.fmt.declaration.blocking == "flat" else table.entries_of_a_row(field)
    return _in_order(field, f"table + {section.offset}", f"(row * {per} + {column})")


def _in_order(field: Field, base: str, index: str) -> str:
    """Entry `index` of consecutive entries from `base` on."""
    if field.covers == 1 and field.bits == 8:
        return f"({base})[{index}]"
    if field.bits >= 8:
        return f"qg_entry((const {entry_type(field)}*)({base}) + {index})"
    return f"qg_bits<{field.bits}, {str(field.order == 'high_first').lower()}>({base}, {index})"


def _in_block(table: PackedTable, field: Field, index: str) -> str:
    """Entry `index` of the field in block `block`."""
    base = table.block_base(field)
    if field.packing is None:
        return _in_order(field, base, index)
    bits = place_in_block(table, field, "qg", index, base)
    return f"qg_half({bits})" if field.kind == "f16" else bits


def _places_tables(table: PackedTable, field: Field) -> str:
    """The C++ tables with the bit positions of a block's entries."""
    reader = f"kernel '{table.name}': no CPU kernel"
    return places_tables(table, field, "qg", lambda kind, name, _: f"static const {kind} {name}[]", reader)
