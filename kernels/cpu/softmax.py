"""Softmax over the last dim: maximum, exponentials and their sum, division; fp32 inside, rounded once.

An f32 result holds the exponentials between the passes. For narrower results they are computed twice, so that no
scratch grows with the row. A row of -inf gives NaN, as in torch.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, load_columns, pointer, store_columns, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.softmax import SoftmaxKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: see the module's docstring."""
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """One task processes a share of the rows."""
    body = spec.body
    assert isinstance(body, SoftmaxKernel)
    x, out = spec.operands
    read = load_columns("x_row", x.strides[-1])
    exponential = f"vexp({read} - vset(top))"
    keep = out.dtype == "f32"
    again = load_columns("out_row", out.strides[-1]) if keep else exponential
    keep_line = [store_columns("out_row", out.strides[-1], "e")] if keep else []
    row = [
        f"const auto x_row = x + row * {c_dim(x.strides[0])};",
        f"const auto out_row = out + row * {c_dim(out.strides[0])};",
        f"const float top = qc_max_columns(cols, [&](int64_t j, int n) QC_BODY {{ return {read}; }});",
        "const float sum = qc_sum_columns(cols, [&](int64_t j, int n) QC_BODY {",
        *indent([f"const vf e = {exponential};", *keep_line, "return vsel(vfirst(n), e, vzero());"]),
        "});",
        "const vf scale = vset(1.0f / sum);",
        "qc_columns(cols, [&](int64_t j, int n) QC_BODY {",
        *indent([f"const vf y = {again} * scale;", store_columns("out_row", out.strides[-1], "y")]),
        "});",
    ]
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(out, 1, "out", "call->op"),
        f"const int64_t rows = {c_dim(body.rows)}, cols = {c_dim(body.cols)}, tasks = qc_tasks(rows, 16 * cols);",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent(row),
        "}",
    ]
    launch = [
        f"qc_run(ctx, op, sym, qc_tasks({c_dim(body.rows)}, 16 * {c_dim(body.cols)}), qk_{spec.name}_task);",
    ]
    return "\n".join(
        [header_comment(spec, "rows shared among tasks"), task_function(spec, task), entry_function(spec, launch)]
    )
