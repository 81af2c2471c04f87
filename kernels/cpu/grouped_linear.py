"""The `grouped_linear` template: products with the weights of the chosen MoE experts (grouped.h).

One kernel serves any number of (row, expert) pairs. The number of rows per expert is known only at run time, so
grouped.h decides for each expert whether to decode its codes in registers (few rows) or to panels (more rows). Weights
are read like those of linears (linear.py), packed or plain.

Rows of int8 are multiplied as integers (grouped_int8.py). Where weights decode to bf16, rows are rounded to it and
multiplied by `vdpbf16ps`, if the processor has that (grouped_bf16.h).

A kernel that combines pairs of rows, or the experts of a row, is for few pairs and multiplies straight from codes; the
code around its sums is grouped_combined.py.
"""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import grouped_int8, text
from qcompiler.kernels.cpu.grouped_combined import functions_of, rows_from_codes, statements_of, tile_bytes
from qcompiler.kernels.cpu.linear import (
    MOST_BF16,
    block_bf16,
    block_of,
    most_totals,
    multiplies_bf16,
    product_scratch,
    rounds_to_bf16,
    tile_of,
    weight_of,
)
from qcompiler.kernels.cpu.weights import PANEL_LAYOUTS
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    if _body(spec).codes:
        return grouped_int8.HEADERS
    words = (
        "bf16.h",
        "gemm_bf16.h",
        "bf16_blocks.h",
        "amx.h",
        "bf16_tiles.h",
        "bf16_kept.h",
        "bf16_run.h",
        "grouped_bf16.h",
    )
    in_bf16 = spec.operands[1].dtype == "bf16"
    return ("decode.h", "gemm.h", "few_rows.h", "lookup.h", "grouped.h", *(words if in_bf16 else ()))


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread: the maximum over the two ways, few rows and many rows."""
    body = _body(spec)
    if body.codes:
        return grouped_int8.scratch_bytes(spec, isa)
    tile, block, row, totals = tile_of(isa), block_of(body.k), -(-body.k // 16) * 16, most_totals(body.k)
    few = rows_from_codes(isa)
    if body.pairs:
        words = block_bf16(body.k, few, tile.panels, rounds=True) if multiplies_bf16(spec, isa) else 0
        return tile_bytes(spec, isa) + max(4 * (few * row + totals), words)
    if body.top:
        return tile_bytes(spec, isa) + 4 * (row + totals)
    straight = 4 * (few * (16 * tile.panels + row) + totals)
    words = block_bf16(body.k, MOST_BF16, tile.panels, rounds=True) if multiplies_bf16(spec, isa) else 0
    return max(straight, words, product_scratch(isa, block, whole=block >= body.k))


def _body(spec: KernelSpec) -> GroupedLinearKernel:
    assert isinstance(spec.body, GroupedLinearKernel)
    return spec.body


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for operands without a decoder."""
    body = _body(spec)
    if body.codes:
        return grouped_int8.emit(spec, isa)
    x, w, index, out = *spec.operands[:3], spec.operands[-1]
    weight = weight_of(spec.name, w)
    in_panels = w.format is not None or w.layout in PANEL_LAYOUTS
    x_type, index_type, out_type = (STORAGE_TYPES[operand.dtype] for operand in (x, index, out))
    load = "qm_round_rows" if rounds_to_bf16(spec) else "qm_load_rows"
    pairs = (dim(body.rows) * body.repeat).to_dim()
    if body.combines and not in_panels:
        raise KernelSelectionError(f"kernel '{spec.name}': experts are combined where their weights are in panels")
    lines = [
        "qm_job job = {};",
        f"job.n = {body.experts * body.n}, job.k = {body.k};",
        f"job.x = (const char*)op[0], job.x_row = {c_dim(x.strides[0])}, job.load_x = {load}<{x_type}>;",
        "const char* const w = (const char*)op[1];",
        *weight.statements,
        f"job.index = op[2], job.index_step = {c_dim(index.strides[0])};",
        f"job.pairs = {c_dim(pairs)}, job.repeat = {body.repeat}, job.experts = {body.experts}, job.width = {body.n};",
        f"job.out = (char*)op[{len(spec.operands) - 1}], job.out_row = {c_dim(out.strides[0])};",
    ]
    types, functions = f"{weight.decoder}, {index_type}, {out_type}", ""
    in_words = f"{weight.decoder}, {x_type}, {index_type}, {out_type}"
    dots = multiplies_bf16(spec, isa) and weight.group % 2 == 0
    if body.combines:
        form, functions = "pairs" if body.pairs else "mixed", functions_of(spec)
        needed = f"qm_{form}_scratch({body.k})"
        run = f"qm_run_{form}<{types}>(ctx, &job);"
        if dots and body.pairs:
            needed = f"{needed} <= {scratch_bytes(spec, isa)} && qm_bf16_pairs_scratch({body.k})"
            run = f"qm_run_bf16_pairs<{in_words}>(ctx, &job);"
        lines += [*statements_of(spec), run]
    else:
        needed = f"qg_scratch({body.k}) <= {scratch_bytes(spec, isa)} && qm_few_scratch({body.k})"
        run = f"qm_run<{types}, {str(in_panels).lower()}>(ctx, &job);"
        if dots:
            few = tile_of(isa).few if in_panels else 0
            needed = f"{needed} <= {scratch_bytes(spec, isa)} && qm_bf16_scratch({body.k}, {few})"
            run = f"qm_run_bf16<{in_words}, {few}>(ctx, &job);"
        lines += [
            f"job.finish = qm_finish<{out_type}>;",
            *([] if weight.in_place else [f"job.decode = qg_decode_panel<{weight.decoder}>;"]),
            run,
        ]
    lines.insert(0, f'static_assert({needed} <= {scratch_bytes(spec, isa)}, "scratch");')
    header = shared.header_comment(spec, f"{weight.decoder}; an index out of range gives zeros and is reported")
    return "\n".join([header, weight.definitions, functions, text.entry_function(spec, lines)])
