"""The `grouped_linear` template for int8 rows: codes times the codes of the chosen experts (grouped_int8.h).

The product with an expert's panels is that of a linear (linear_int8.py): the struct of the weight and the choice of an
instruction at run time are the same. A kernel that combines sums is for few pairs, without the matrix units; the code
around its sums is grouped_combined.py.
"""

from __future__ import annotations

from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import linear_int8, text
from qcompiler.kernels.cpu.grouped_combined import functions_of, rows_from_codes, statements_of, tile_bytes
from qcompiler.kernels.cpu.linear_int8 import ProductText
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

HEADERS = ("decode.h", "gemm.h", "few_rows.h", *linear_int8.HEADERS, "lookup.h", "grouped.h", "grouped_int8.h")


def _text(spec: KernelSpec) -> ProductText:
    body = _body(spec)
    return ProductText(spec.name, spec.operands[1], body.experts * body.n, body.k)


def _body(spec: KernelSpec) -> GroupedLinearKernel:
    assert isinstance(spec.body, GroupedLinearKernel)
    return spec.body


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread."""
    body, made = _body(spec), _text(spec)
    if not body.combines:
        return made.scratch(isa)
    return tile_bytes(spec, isa) + made.prepared(rows_from_codes(isa) if body.pairs else 1)


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for a weight without an integer product."""
    body, made, (x, _, index) = _body(spec), _text(spec), spec.operands[:3]
    out, place = spec.operands[-1], len(spec.operands) - 1
    pairs = (dim(body.rows) * body.repeat).to_dim()
    index_type, out_type = STORAGE_TYPES[index.dtype], STORAGE_TYPES[out.dtype]
    form, assertion, finish, functions = "", made.assertion(isa), [f"job.finish = qm_finish<{out_type}>;"], ""
    if body.combines:
        form, finish, functions = "_pairs" if body.pairs else "_mixed", statements_of(spec), functions_of(spec)
        needed = f"qm_int8{form}_scratch({body.k}, {made.groups})"
        assertion = f'static_assert({needed} <= {scratch_bytes(spec, isa)}, "scratch");'
    lines = [
        assertion,
        "qm_job job = {};",
        f"job.n = {made.n}, job.k = {made.k};",
        f"job.x = (const char*)op[0], job.x_row = {c_dim(x.strides[0])};",
        "const char* const w = (const char*)op[1];",
        *made.statements,
        f"job.index = op[2], job.index_step = {c_dim(index.strides[0])};",
        f"job.pairs = {c_dim(pairs)}, job.repeat = {body.repeat}, job.experts = {body.experts}, job.width = {body.n};",
        f"job.out = (char*)op[{place}], job.out_row = {c_dim(out.strides[0])};",
        *finish,
        f"qm_run_int8{form}<{made.struct}, {index_type}, {out_type}>(ctx, &job);",
    ]
    header = shared.header_comment(
        spec,
        f"codes times codes, {made.groups} group(s) of columns; {made.struct}; {scratch_bytes(spec, isa)} bytes of "
        "scratch per thread; an index out of range gives zeros and is reported",
    )
    return "\n".join([header, made.definitions, functions, text.entry_function(spec, lines)])
