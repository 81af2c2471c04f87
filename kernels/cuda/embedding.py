"""Rows of a table by id as CUDA C++, decoded on the way.

A block copies one row.  The table may be plain (any strides, or cuda_t16_v1) or packed (canonical or cuda_t16_v1); how
an element is found and decoded follows from the format's declaration, operation by operation, so that the bits are
those of `Format.decode`.  A kernel on the device has nowhere to report an id outside [0, rows): it gives a row of NaN.
"""

from __future__ import annotations

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats.base import Field, Format, Section
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.emit import signature
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, check_extent
from qcompiler.kernels.cuda.places import offset
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.layouts.panels import packed_name
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, header_comment, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, EmbeddingKernel, KernelSpec, Operand

_FLOATS = ("f32", "bf16", "f16")
_LAYOUT = "cuda_t16_v1"
_THREADS = 128
_ENTRIES = {("f", 4): "float", ("f", 2): "qc_f16", ("u", 1): "uint8_t", ("i", 1): "int8_t"}


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One embedding for any architecture. KernelSelectionError for operands that no reader fits."""
    del arch
    body = spec.body
    assert isinstance(body, EmbeddingKernel)
    _check(spec)
    ids, table, out = spec.operands
    element = _plain(spec, table) if table.format is None else _packed(spec, table)
    value = f"qk_{spec.name}_element({identifier(table.name)}, id, j)"
    place = offset(out, ["i", "(int64_t)j"])
    lines = [
        "const int64_t i = blockIdx.x;",
        f"const int64_t id = (int64_t){identifier(ids.name)}[{offset(ids, ['i'])}];",
        f"const bool there = id >= 0 && id < {body.rows};",
        f"for (int j = (int)threadIdx.x; j < {body.cols}; j += {_THREADS}) {{",
        f"    qc_store({identifier(out.name)} + {place}, there ? {value} : NAN);",
        "}",
    ]
    head = header_comment(spec, f"a block of {_THREADS} threads per id; an id out of range gives NaN")
    text = "\n".join([element, head, signature(spec, _THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry((body.count, 1, 1), (_THREADS, 1, 1)))


def _check(spec: KernelSpec) -> None:
    where = f"kernel '{spec.name}'"
    if len(spec.operands) != 3:
        raise KernelSelectionError(f"{where}: an embedding has the operands ids, table and out")
    ids, table, out = spec.operands
    check_extent(spec, table, 1)
    if ids.dtype not in ("i64", "i32"):
        raise KernelSelectionError(f"{where}: ids are {ids.dtype}; an embedding takes i64 or i32")
    for operand in (table, out):
        if operand.dtype not in _FLOATS:
            raise KernelSelectionError(f"{where}: '{operand.name}' is {operand.dtype}, not one of {_FLOATS}")
    if table.layout not in (None, "canonical", _LAYOUT):
        raise KernelSelectionError(
            f"{where}: the table lies in layout '{table.layout}'; CUDA reads '{_LAYOUT}' or 'canonical'"
        )


def _function(spec: KernelSpec, pointer: str, lines: list[str], comment: str) -> str:
    """``qk_<name>_element(table, row, column)``: one element, rounded to the table's dtype."""
    head = f"QC_DEVICE float qk_{spec.name}_element({pointer} table, int64_t row, int64_t column) {{"
    return "\n".join([f"// {comment}", head, *indent(lines), "}"])


# --- plain tables ----------------------------------------------------------------------------------------------------


def _plain(spec: KernelSpec, table: Operand) -> str:
    kind = STORAGE_TYPES[table.dtype]
    rows, cols = (int(d) for d in table.shape)
    if table.layout != _LAYOUT:
        strides = table.strides or (cols, 1)
        place = offset(
            Operand(name="t", dtype=table.dtype, access="r", shape=(rows, cols), strides=strides), ["row", "column"]
        )
        return _function(spec, f"const {kind}*", [f"return qc_load(table + {place});"], f"Plain {table.dtype}.")
    bits = 8 * ITEMSIZE[table.dtype]
    item = f"qc_tile_item<{bits}>((const uint8_t*)table, {-(-cols // tile_columns(bits))}, row, column)"
    convert = {"f32": "__uint_as_float", "bf16": "qc_f32_of_bf16", "f16": "qc_f32_of_f16"}[table.dtype]
    cast = "" if bits == 32 else "(uint16_t)"
    return _function(spec, f"const {kind}*", [f"return {convert}({cast}{item});"], f"Plain {table.dtype} in {_LAYOUT}.")


# --- packed tables ---------------------------------------------------------------------------------------------------


def _packed(spec: KernelSpec, table: Operand) -> str:
    assert table.format is not None
    fmt = formats.get(table.format.name, **table.format.params)
    declaration, (rows, cols) = fmt.declaration, (int(d) for d in table.shape)
    if declaration.interleaved or declaration.codes.bits not in (4, 8):
        raise KernelSelectionError(f"kernel '{spec.name}': no CUDA kernel decodes tables of {fmt}")
    layout = table.layout or "canonical"
    sections = {s.name: s for s in layouts.get(layout).sections(fmt, table.dtype, rows, cols)}
    lines, entries = [], {}
    for field in declaration.fields:
        name = field.name if layout == "canonical" else packed_name(fmt, field, cols)
        read = _code if field.covers == 1 else _entry
        lines.append(f"const auto {identifier(field.name)} = {read(fmt, field, sections[name], layout, cols)};")
        entries[field.name] = identifier(field.name)
    values = f"qk_{spec.name}_values"
    round_to = {"f32": "{}", "bf16": "qc_f32_of_bf16(qc_bf16_of_f32({}))", "f16": "qc_f32_of_f16(qc_f16_of_f32({}))"}
    lines.append(f"return {round_to[table.dtype].format(declaration.decode.to_c(entries, values))};")
    comment = f"{fmt} in {layout}: {declaration.decode.text}, rounded to {table.dtype}."
    text = _function(spec, "const uint8_t*", lines, comment)
    if declaration.table is None:
        return text
    literals = [float_literal(value, "f32") for value in declaration.table]
    listed = ",\n".join("    " + ", ".join(literals[k : k + 8]) for k in range(0, len(literals), 8))
    return f"__device__ const float {values}[{len(literals)}] = {{\n{listed}}};\n{text}"


def _code(fmt: Format, field: Field, section: Section, layout: str, cols: int) -> str:
    """The code of (row, column), an integer of the field's kind."""
    bits = field.bits
    start = f"table + {section.offset}"
    if layout == _LAYOUT:
        item = f"qc_tile_item<{bits}>({start}, {-(-cols // tile_columns(bits))}, row, column)"
    else:
        order = "true" if field.order == "high_first" else "false"
        # Rows of a format that blocks by rows begin at whole bytes.
        per_row = section.shape[-1] * section.dtype.itemsize * 8 // bits if len(section.shape) > 1 else cols
        item = f"qc_stream_item<{bits}, {order}>({start}, row * {per_row} + column)"
    return f"(int8_t){item}" if field.kind == "int" else item


def _entry(fmt: Format, field: Field, section: Section, layout: str, cols: int) -> str:
    """The entry of a scale or zero point that covers (row, column), as a float."""
    declaration = fmt.declaration
    covers = cols if field.covers == "row" else int(field.covers)
    per_row = cols // covers
    if cols % covers or (layout != _LAYOUT and declaration.blocking == "flat"):
        index = f"(row * {cols} + column) / {covers}"
    elif layout == _LAYOUT:
        index = f"(row / 16 * {per_row} + column / {covers}) * 16 + row % 16"
    else:
        index = f"row * {per_row} + column / {covers}"
    kind = _ENTRIES[section.dtype.kind, section.dtype.itemsize]
    return f"qc_load((const {kind}*)(table + {section.offset}) + ({index}))"
