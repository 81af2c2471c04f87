"""Reads one element of a packed table in CUDA C++, from canonical bytes or from tiles.

    QC_DEVICE float qk_<name>_element(const uint8_t* table, int64_t row, int64_t k)

reads the code and the entries of (row, k) and computes the declared equation, operation by operation, so that the bits
are those of `Format.decode`.
"""

from __future__ import annotations

from qcompiler.formats import Field
from qcompiler.kernels.cuda.weights import (
    AS_THEY_ARE,
    ENTRIES,
    ENTRY_TYPES,
    LAYOUT,
    codes_of,
    device_table,
    entry_index,
    entry_tables,
    hashed,
)
from qcompiler.kernels.decoding import first_of_integers
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.layouts.panels import packed_name, plane_name, planes
from qcompiler.kernels.packed_table import PackedTable, place_in_block, places_tables
from qcompiler.kernels.text import identifier, indent

_ROUND = {"f32": "{}", "bf16": "qc_f32_of_bf16(qc_bf16_of_f32({}))", "f16": "qc_f32_of_f16(qc_f16_of_f32({}))"}


def element_function(table: PackedTable) -> str:
    """C++ text: tables of values, tables of bit positions, and the function."""
    d = table.fmt.declaration
    tables, looked_up = entry_tables(d, f"qk_{table.name}")
    code_table, value = _code_value(table)
    entries = [f for f in d.fields if f.covers != 1]
    names = {f.name: identifier(f.name) for f in entries}
    lines = [table.find_block()] if table.block else []
    lines += [f"const {ENTRY_TYPES[f.kind]} {names[f.name]} = {_entry(table, f)};" for f in entries]
    lines += [f"const float {g} = {eq.to_c(names, looked_up, ENTRIES)};" for g, eq in d.split.per_entry.items()]
    lines += [f"const uint32_t stored = {_code(table)};", f"const float code = {value};"]
    element = d.split.per_element.to_c({"code": "code", **{g: g for g in d.split.per_entry}}, style=AS_THEY_ARE)
    lines.append(f"return {_ROUND[table.dtype].format(element)};")
    places = [_places_tables(table, f) for f in table.packed_fields()]
    head = f"QC_DEVICE float qk_{table.name}_element(const uint8_t* table, int64_t row, int64_t k) {{"
    comment = f"// {table.fmt} in {table.layout}: {d.decode.text}, rounded to {table.dtype}."
    return "".join([*code_table, *tables, *places]) + "\n".join([comment, head, *indent(lines), "}"])


def _code_value(table: PackedTable) -> tuple[list[str], str]:
    """(definitions, expression) for the value of the code `stored`."""
    d = table.fmt.declaration
    match codes_of(d):
        case "windows":
            return [], hashed(d, "stored")
        case "counts":
            flipped = "(stored ^ 128u)" if d.codes.kind == "int" else "stored"
            return [], f"(float)((int){flipped} + {first_of_integers(d)})"
        case "e4m3":
            return [], "qc_minifloat<3>(stored)"
        case "e5m2":
            return [], "qc_minifloat<2>(stored)"
        case _:
            name = f"qk_{table.name}_codes"
            return [device_table(name, d.code_values)], f"{name}[stored]"


# --- codes and entries -----------------------------------------------------------------------------------------------


def _code(table: PackedTable) -> str:
    """The code of (row, k), as an unsigned integer; of a trellis its window."""
    trellis = table.fmt.declaration.trellis
    if trellis is None:
        return _code_at(table, "k", "inside")
    code = f"[&](int64_t column) -> uint32_t {{ return {_code_at(table, 'column', 'inside + column - k')}; }}"
    return f"qc_trellis_window<{trellis.bits}, {trellis.codes}>(k, {code})"


def _code_at(table: PackedTable, column: str, inside: str) -> str:
    field, sections = table.fmt.declaration.codes, table.sections
    if table.layout == LAYOUT:
        tiles = -(-table.cols // tile_columns(field.bits))
        found = []
        if table.fmt.declaration.trellis is not None:
            first, *others = (f"table + {sections[plane_name(shift)].offset}" for shift, _ in planes(field.bits))
            return f"qc_sequence_code<{field.bits}>({', '.join([first, *(others or [first])])}, {tiles}, row, {column})"
        for shift, width in planes(field.bits):
            item = f"qc_tile_item<{width}>(table + {sections[plane_name(shift)].offset}, {tiles}, row, k)"
            found.append(f"{item} << {shift}" if shift else item)
        return " | ".join(found)
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, inside)
    flat = table.fmt.declaration.blocking == "flat"
    per_row = table.cols if flat else table.entries_of_a_row(field)
    return _in_order(field, f"table + {sections[field.name].offset}", f"row * {per_row} + {column}")


def _entry(table: PackedTable, field: Field) -> str:
    """The entry that serves (row, k), as stored."""
    fmt, cols = table.fmt, table.cols
    if table.layout == LAYOUT:
        section = table.sections[packed_name(fmt, field, cols)]
        index = entry_index(fmt, field, table.rows, cols)
        return f"((const {ENTRY_TYPES[field.kind]}*)(table + {section.offset}))[{index}]"
    covers = field.covers if isinstance(field.covers, int) else 0
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, f"inside / {covers}")
    return _in_order(field, f"table + {table.sections[field.name].offset}", table.entry_index(field))


def _in_order(field: Field, base: str, index: str) -> str:
    """Entry `index` of consecutive entries from `base` on."""
    if field.covers == 1 or field.bits < 8:
        return f"qc_stream_item<{field.bits}, {str(field.order == 'high_first').lower()}>({base}, {index})"
    return f"qc_stored_entry({base}, {index}, (const {ENTRY_TYPES[field.kind]}*)0)"


def _in_block(table: PackedTable, field: Field, index: str) -> str:
    """Entry `index` of the field in block `block`."""
    base = table.block_base(field)
    if field.packing is None:
        return _in_order(field, base, index)
    bits = place_in_block(table, field, "qc", index, base)
    return bits if field.covers == 1 else f"qc_from_bits({bits}, (const {ENTRY_TYPES[field.kind]}*)0)"


def _places_tables(table: PackedTable, field: Field) -> str:
    """The C++ tables with the bit positions of a block's entries."""
    reader = f"kernel '{table.name}': no CUDA kernel"
    return places_tables(table, field, "qc", lambda kind, name, n: f"__device__ const {kind} {name}[{n}]", reader)
