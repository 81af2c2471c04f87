"""One element of a packed table as CUDA C++, from canonical bytes or from tiles.

    QC_DEVICE float qk_<name>_element(const uint8_t* table, int64_t row, int64_t k)

reads the code and the entries of (row, k) where the layout keeps them and computes the declared equation, operation by
operation, so that the bits are those of `Format.decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Format, Section
from qcompiler.formats.packing import Packing, Pieces, Trits
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.weights import (
    AS_THEY_ARE,
    ENTRIES,
    ENTRY_TYPES,
    LAYOUT,
    codes_of,
    device_table,
    entry_index,
    entry_tables,
)
from qcompiler.kernels.decoding import first_of_integers
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.layouts.panels import packed_name, plane_name, planes
from qcompiler.kernels.text import identifier, indent
from qcompiler.plan.kernel import DType


@dataclass(frozen=True)
class Table:
    """A packed table: its format, layout and sizes, and the name of the kernel that reads it."""

    name: str
    fmt: Format
    layout: str
    dtype: DType
    rows: int
    cols: int

    @property
    def sections(self) -> dict[str, Section]:
        return {s.name: s for s in layouts.get(self.layout).sections(self.fmt, self.dtype, self.rows, self.cols)}

    @property
    def in_blocks(self) -> bool:
        """Whether fields are found by block: in records, and where bits of entries are spread over a block's bytes."""
        d = self.fmt.declaration
        return self.layout != LAYOUT and (d.interleaved or any(f.packing for f in d.fields))


_ROUND = {"f32": "{}", "bf16": "qc_f32_of_bf16(qc_bf16_of_f32({}))", "f16": "qc_f32_of_f16(qc_f16_of_f32({}))"}


def element_function(table: Table) -> str:
    """C++ text: tables of values and of places, and the function."""
    d, cols = table.fmt.declaration, table.cols
    tables, looked_up = entry_tables(d, f"qk_{table.name}")
    code_table, value = _code_value(table)
    entries = [f for f in d.fields if f.covers != 1]
    names = {f.name: identifier(f.name) for f in entries}
    flat = d.blocking == "flat"
    lines: list[str] = []
    if table.in_blocks:
        size = d.block_size(cols)
        at = f"row * {cols} + k" if flat else "k"
        before = "" if flat else f"row * {-(-cols // size)} + "
        lines.append(f"const int64_t block = {before}({at}) / {size}, inside = ({at}) % {size};")
    lines += [f"const {ENTRY_TYPES[f.kind]} {names[f.name]} = {_entry(table, f)};" for f in entries]
    lines += [f"const float {g} = {eq.to_c(names, looked_up, ENTRIES)};" for g, eq in d.split.per_entry.items()]
    lines += [f"const uint32_t stored = {_code(table)};", f"const float code = {value};"]
    element = d.split.per_element.to_c({"code": "code", **{g: g for g in d.split.per_entry}}, style=AS_THEY_ARE)
    lines.append(f"return {_ROUND[table.dtype].format(element)};")
    places = [_places_table(table, f) for f in d.fields if f.packing is not None and table.in_blocks]
    head = f"QC_DEVICE float qk_{table.name}_element(const uint8_t* table, int64_t row, int64_t k) {{"
    comment = f"// {table.fmt} in {table.layout}: {d.decode.text}, rounded to {table.dtype}."
    return "".join([*code_table, *tables, *places]) + "\n".join([comment, head, *indent(lines), "}"])


def _code_value(table: Table) -> tuple[list[str], str]:
    """(definitions, expression) for what the code `stored` stands for."""
    d = table.fmt.declaration
    match codes_of(d):
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


def _code(table: Table) -> str:
    """The code of (row, k), as an unsigned integer."""
    field, sections = table.fmt.declaration.codes, table.sections
    if table.layout == LAYOUT:
        tiles = -(-table.cols // tile_columns(field.bits))
        found = []
        for shift, width in planes(field.bits):
            item = f"qc_tile_item<{width}>(table + {sections[plane_name(shift)].offset}, {tiles}, row, k)"
            found.append(f"{item} << {shift}" if shift else item)
        return " | ".join(found)
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, "inside")
    flat = table.fmt.declaration.blocking == "flat"
    per_row = table.cols if flat else _stored(sections[field.name], field)
    return _in_order(field, f"table + {sections[field.name].offset}", f"row * {per_row} + k")


def _entry(table: Table, field: Field) -> str:
    """The entry that serves (row, k), as stored."""
    fmt, cols = table.fmt, table.cols
    if table.layout == LAYOUT:
        section = table.sections[packed_name(fmt, field, cols)]
        index = entry_index(fmt, field, table.rows, cols)
        return f"((const {ENTRY_TYPES[field.kind]}*)(table + {section.offset}))[{index}]"
    covers = field.covers if isinstance(field.covers, int) else 0
    if field.offset is not None or field.packing is not None:
        return _in_block(table, field, f"inside / {covers}")
    section = table.sections[field.name]
    beside = f" + k / {covers}" if covers else ""
    if field.covers == "tensor":
        index = "0"
    elif fmt.declaration.blocking == "flat":
        index = f"(row * {cols} + k) / {covers or cols}"
    else:
        index = f"row / {field.rows} * {_stored(section, field)}{beside}"
    return _in_order(field, f"table + {section.offset}", index)


def _stored(section: Section, field: Field) -> int:
    """Entries of a row as stored: rows of blocks begin at whole bytes."""
    return section.shape[-1] * 8 * section.dtype.itemsize // field.bits


def _in_order(field: Field, base: str, index: str) -> str:
    """Entry `index` of entries that stand one behind the other from `base` on."""
    if field.covers == 1 or field.bits < 8:
        return f"qc_stream_item<{field.bits}, {str(field.order == 'high_first').lower()}>({base}, {index})"
    return f"qc_stored_entry({base}, {index}, (const {ENTRY_TYPES[field.kind]}*)0)"


def _in_block(table: Table, field: Field, index: str) -> str:
    """Entry `index` of the field in block `block`."""
    d = table.fmt.declaration
    if field.offset is not None:
        base = f"table + block * {d.record_bytes} + {field.offset}"
    else:
        assert field.packing is not None
        base = f"table + {table.sections[field.name].offset} + block * {field.packing.nbytes}"
    if field.packing is None:
        return _in_order(field, base, index)
    cast = "" if field.covers == 1 else f"({ENTRY_TYPES[field.kind]})"
    return f"{cast}qc_packed_entry({_places_name(table, field)}[{index}], {base})"


# --- where packed entries stand --------------------------------------------------------------------------------------


def _places_name(table: Table, field: Field) -> str:
    return f"qk_{table.name}_{identifier(field.name)}_at"


def _places_table(table: Table, field: Field) -> str:
    """A table with the pieces of bits of each entry of a block."""
    assert field.packing is not None
    kind, places = _places(table, field.packing)
    rows = ",\n".join("    " + ", ".join(places[i : i + 4]) for i in range(0, len(places), 4))
    name = _places_name(table, field)
    return (
        f"// {field.name}: {field.packing.describe()}\n__device__ const {kind} {name}[{len(places)}] = {{\n{rows}}};\n"
    )


def _places(table: Table, packing: Packing) -> tuple[str, list[str]]:
    """(C++ type, literals) of the places of a block's entries."""
    if isinstance(packing, Trits):
        found, first = [], 0
        for count, digits in packing.runs:
            found += [f"{{{first + byte}, {3**n}}}" for n in range(digits) for byte in range(count)]
            first += count
        return "qc_trit", found
    if not isinstance(packing, Pieces):
        raise KernelSelectionError(
            f"kernel '{table.name}': no CUDA kernel reads entries packed as {packing.describe()} in canonical bytes; "
            f"tables in '{LAYOUT}' are read whatever their packing"
        )
    most, found = max(len(entry) for entry in packing.pieces), []
    for entry in packing.pieces:
        place, pieces = 0, []
        for byte, shift, width in entry:
            pieces.append(f"{{{byte}, {shift}, {(1 << width) - 1}, {place}}}")
            place += width
        pieces += ["{0, 0, 0, 0}"] * (most - len(pieces))
        found.append(f"{{{{{', '.join(pieces)}}}}}")
    return f"qc_pieces<{most}>", found
