"""Layer and RMS norm: two passes over a row for the statistics, a third to write it; fp32 throughout."""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, load_columns, pointer, store_columns, task_function
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.norm import NormKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: a row is read again instead of being kept."""
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """One task processes a share of the rows."""
    body = spec.body
    assert isinstance(body, NormKernel)
    names = ["x", *(["weight"] if body.has_weight else []), *(["bias"] if body.has_bias else []), "out"]
    operands = dict(zip(names, spec.operands, strict=True))
    pointers = [pointer(operand, i, name, "call->op") for i, (name, operand) in enumerate(operands.items())]
    task = [
        *pointers,
        f"const int64_t rows = {c_dim(body.rows)}, cols = {body.cols}, tasks = qc_tasks(rows, {4 * body.cols});",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++) {",
        *indent([*_row_pointers(operands), *_statistics(body, operands["x"]), *_write(body, operands)]),
        "}",
    ]
    launch = [
        f"qc_run(ctx, op, sym, qc_tasks({c_dim(body.rows)}, {4 * body.cols}), qk_{spec.name}_task);",
    ]
    what = "(x - mean) / sqrt(var + eps)" if body.kind == "layer" else "x / sqrt(mean(x^2) + eps)"
    head = header_comment(spec, f"{what}, eps = {body.eps:g}, rows shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])


def _row_pointers(operands: dict[str, Operand]) -> list[str]:
    return [
        f"const auto x_row = x + row * {c_dim(operands['x'].strides[0])};",
        f"const auto out_row = out + row * {c_dim(operands['out'].strides[0])};",
    ]


def _statistics(body: NormKernel, x: Operand) -> list[str]:
    read = load_columns("x_row", x.strides[-1])
    eps = float_literal(body.eps, "f32")
    if body.kind == "rms":
        return [
            "const float square = qc_sum_columns(cols, [&](int64_t j, int n) QC_BODY {",
            f"    const vf v = {read};",
            "    return v * v;",
            "});",
            f"const vf scale = vset(1.0f / sqrtf(square / (float)cols + {eps}));",
        ]
    return [
        f"const float mean = qc_sum_columns(cols, [&](int64_t j, int n) QC_BODY {{ return {read}; }}) / (float)cols;",
        "const float variance = qc_sum_columns(cols, [&](int64_t j, int n) QC_BODY {",
        f"    const vf d = {read} - vset(mean);",
        "    return vsel(vfirst(n), d * d, vzero());",
        "}) / (float)cols;",
        f"const vf center = vset(mean), scale = vset(1.0f / sqrtf(variance + {eps}));",
    ]


def _write(body: NormKernel, operands: dict[str, Operand]) -> list[str]:
    read = load_columns("x_row", operands["x"].strides[-1])
    lines = [f"vf y = {f'({read} - center)' if body.kind == 'layer' else read} * scale;"]
    if body.has_weight:
        lines.append(f"y = y * {load_columns('weight', _last(operands['weight']))};")
    if body.has_bias:
        lines.append(f"y = y + {load_columns('bias', _last(operands['bias']))};")
    lines.append(store_columns("out_row", operands["out"].strides[-1], "y"))
    return ["qc_columns(cols, [&](int64_t j, int n) QC_BODY {", *indent(lines), "});"]


def _last(operand: Operand) -> Dim:
    return operand.strides[-1]
