"""The `quantize_rows` template: activations to int8 rows (formats/int8_rows.py), over int8.h."""

from __future__ import annotations

from qcompiler.formats.int8_rows import KINDS, clip_factors
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("decode.h", "gemm.h", "int8_rows.h")


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """None: a row is read twice."""
    return 0


def body_of(spec: KernelSpec) -> QuantizeRowsKernel:
    assert isinstance(spec.body, QuantizeRowsKernel)
    return spec.body


def factors(body: QuantizeRowsKernel) -> list[str]:
    """C literals: the multiplier and the scale of kind "tensor", and the threshold of kind "outliers"."""
    factor, fixed = clip_factors(body.value) if body.kind == "tensor" else (0.0, 0.0)
    threshold = body.value if body.kind == "outliers" else 0.0
    return [float_literal(float(number), "f32") for number in (factor, fixed, threshold)]


def emit(spec: KernelSpec, isa: str) -> str:
    """One task processes a share of the rows."""
    body, x, out = body_of(spec), spec.operands[0], spec.operands[-1]
    last = len(spec.operands) - 1
    columns = "columns" if body.kind == "outliers" else "nullptr"
    numbers, of_image = factors(body), body.kind == "image"
    if of_image:
        numbers[1] = f"largest[row / qc_max({c_dim(body.each)}, 1)]"
    count = f"qc_tasks(rows, {body.cols})"
    task = [
        pointer(x, 0, "x", "call->op"),
        *([pointer(spec.operands[1], 1, "largest" if of_image else "columns", "call->op")] if last == 2 else []),
        pointer(out, last, "out", "call->op"),
        f"const int64_t rows = {c_dim(body.rows)}, tasks = {count};",
        "for (int64_t row = qc_share(rows, task, tasks); row < qc_share(rows, task + 1, tasks); row++)",
        *indent(
            [
                f"qi_quantise_row<{KINDS.index(body.kind)}>(x + row * {c_dim(x.strides[0])}, {body.cols}, "
                f"{', '.join(numbers)}, {columns},",
                f"    out + row * {c_dim(out.strides[0])});",
            ]
        ),
    ]
    launch = [f"const int64_t rows = {c_dim(body.rows)};", f"qc_run(ctx, op, sym, {count}, qk_{spec.name}_task);"]
    head = header_comment(spec, f"rows of int8, {body.kind}; rows shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
