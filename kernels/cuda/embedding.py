"""Picks rows of a table by id and decodes them, as CUDA C++.

A block copies a piece of one row, so that a single id keeps several blocks busy. The table may be plain (any strides,
or cuda_t16_v1) or packed (canonical or cuda_t16_v1, any format): see element.py. A kernel on the device cannot report
an id outside [0, rows); such an id gives a row of NaN.
"""

from __future__ import annotations

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.element import element_function
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, check_extent
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.packed_table import PackedTable
from qcompiler.kernels.text import STORAGE_TYPES, header_comment, identifier, indent, offset
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel

ENGINES = CUDA_CORES

_LAYOUT = "cuda_t16_v1"
_THREADS = 128
_COLUMNS = 2 * _THREADS
"""Of a block."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """One embedding for any architecture. KernelSelectionError for operands without a reader."""
    del arch
    body = spec.body
    assert isinstance(body, EmbeddingKernel)
    _check(spec)
    ids, table, out = spec.operands
    element = _plain(spec, table) if table.format is None else _packed(spec, table)
    value = f"qk_{spec.name}_element({identifier(table.name)}, id, j)"
    place = offset(out, ["i", "j"])
    parts = -(-body.cols // _COLUMNS)
    lines = [
        f"const int64_t i = blockIdx.x / {parts};",
        f"const int64_t begin = (int64_t)(blockIdx.x % {parts}) * {_COLUMNS};",
        f"const int64_t id = (int64_t){identifier(ids.name)}[{offset(ids, ['i'])}];",
        f"const bool there = id >= 0 && id < {body.rows};",
        f"for (int64_t j = begin + threadIdx.x; j < qc_min({body.cols}, begin + {_COLUMNS}); j += {_THREADS}) {{",
        f"    qc_store({identifier(out.name)} + {place}, there ? {value} : NAN);",
        "}",
    ]
    note = f"a block of {_THREADS} threads per id and {_COLUMNS} columns; an id out of range gives NaN"
    head = header_comment(spec, note)
    text = "\n".join([element, head, signature(spec, _THREADS), *indent(lines), "}\n"])
    return CudaKernel(text, Geometry(((dim(body.count) * parts).to_dim(), 1, 1), (_THREADS, 1, 1)))


def _check(spec: KernelSpec) -> None:
    table = spec.operands[1]
    check_extent(spec, table, 1)
    if table.layout not in (None, "canonical", _LAYOUT):
        raise KernelSelectionError(
            f"kernel '{spec.name}': the table lies in layout '{table.layout}'; CUDA reads '{_LAYOUT}' or 'canonical'"
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


def _packed(spec: KernelSpec, table: Operand) -> str:
    assert table.format is not None
    fmt = formats.get(table.format.name, **table.format.params)
    rows, cols = (int(d) for d in table.shape)
    return element_function(PackedTable(spec.name, fmt, table.layout or "canonical", table.dtype, rows, cols))
