"""The `embedding` template: picks rows of a table by id and decodes them (lookup.h).

The table may be plain (any strides, or panels) or packed (canonical or cpu_p16_v1, any format). An id outside [0, rows)
gives a row of zeros and is reported through the context.
"""

from __future__ import annotations

from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import text
from qcompiler.kernels.cpu.linear import packed_format, used_symbols
from qcompiler.kernels.cpu.row_reader import row_function
from qcompiler.kernels.cpu.weights import PANEL_LAYOUTS
from qcompiler.kernels.packed_table import PackedTable
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("decode.h", "gemm.h", "lookup.h")


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: rows go directly from the table to the result."""
    del spec, isa
    return 0


def _plain_row(spec: KernelSpec, table: Operand, body: EmbeddingKernel) -> tuple[str, str]:
    """Like `_packed_row`, for a plain table: the call copies row `id`."""
    del spec
    kind = STORAGE_TYPES[table.dtype]
    if table.layout in PANEL_LAYOUTS:
        start = f"(const {kind}*)op[1] + id / 16 * {body.cols * 16} + id % 16"
        return "", f"ql_plain_row({start}, 16, {body.cols}, out);"
    down, right = (c_dim(s) for s in table.strides or (body.cols, 1))
    return "", f"ql_plain_row((const {kind}*)op[1] + id * {down}, {right}, {body.cols}, out);"


def _packed_row(spec: KernelSpec, table: Operand, body: EmbeddingKernel) -> tuple[str, str]:
    """(definitions, the call that decodes row `id`)."""
    assert table.format is not None and table.layout is not None
    fmt = packed_format(table.format)
    packed = PackedTable(spec.name, fmt, table.layout, table.dtype, body.rows, body.cols)
    return row_function(packed, spec.operands[2].dtype), f"qk_{spec.name}_row((const uint8_t*)op[1], id, out);"


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for a layout without a reader."""
    del isa
    body = spec.body
    assert isinstance(body, EmbeddingKernel)
    ids, table, out = spec.operands
    row = _plain_row if table.format is None else _packed_row
    definitions, call = row(spec, table, body)
    id_type, out_type = STORAGE_TYPES[ids.dtype], STORAGE_TYPES[out.dtype]
    share = [f"const int64_t count = {c_dim(body.count)};", f"const int64_t tasks = qc_tasks(count, {body.cols});"]
    lines = [
        "void* const* const op = call->op;",
        *share,
        f"const {id_type}* const ids = (const {id_type}*)op[0];",
        "for (int64_t i = qc_share(count, task, tasks); i < qc_share(count, task + 1, tasks); i++) {",
        f"    {out_type}* const out = ({out_type}*)op[2] + i * {c_dim(out.strides[-2])};",
        f"    const int64_t id = ids[i * {c_dim(ids.strides[-1])}];",
        f"    if (id < 0 || id >= {body.rows}) {{",
        f"        ql_report(call->ctx, id, {body.rows});",
        f"        ql_zero_row({body.cols}, out);",
        "        continue;",
        "    }",
        f"    {call}",
        "}",
    ]
    entry = [*used_symbols(spec, share, "sym"), *share, f"qc_run(ctx, op, sym, tasks, qk_{spec.name}_task);"]
    header = shared.header_comment(spec, "ids out of range give zeros and are reported")
    return "\n".join([header, definitions + _task(spec, lines), text.entry_function(spec, entry)])


def _task(spec: KernelSpec, lines: list[str]) -> str:
    return "\n".join(
        [
            f"static void qk_{spec.name}_task(void* arg, int64_t task, char*) {{",
            "    const qc_call* const call = (const qc_call*)arg;",
            *shared.indent([*used_symbols(spec, lines, "call->sym"), *lines]),
            "}\n",
        ]
    )
