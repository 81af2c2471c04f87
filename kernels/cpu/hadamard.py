"""The `hadamard` template: an orthogonal transform of each run of columns, over hadamard.h."""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.hadamard import HadamardKernel, scale_of


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("hadamard.h",)


def body_of(spec: KernelSpec) -> HadamardKernel:
    assert isinstance(spec.body, HadamardKernel)
    return spec.body


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The numbers of one run between two passes."""
    return 4 * body_of(spec).block


def emit(spec: KernelSpec, isa: str) -> str:
    """One task transforms a share of the runs of all rows."""
    body, (x, out) = body_of(spec), spec.operands
    runs, steps = body.cols // body.block, body.block.bit_length()
    count = f"qc_tasks(all, {body.block * steps})"
    total = f"const int64_t all = ({c_dim(body.rows)}) * {runs};"
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(out, 1, "out", "call->op"),
        total,
        f"const int64_t tasks = {count};",
        "for (int64_t run = qc_share(all, task, tasks); run < qc_share(all, task + 1, tasks); run++) {",
        *indent(
            [
                f"const int64_t row = run / {runs}, at = run % {runs} * {body.block};",
                f"qh_transform<{body.block}>(x + row * {c_dim(x.strides[0])} + at, "
                f"out + row * {c_dim(out.strides[0])} + at,",
                f"    (float*)scratch, {float_literal(scale_of(body.block), 'f32')});",
            ]
        ),
        "}",
    ]
    launch = [total, f"qc_run(ctx, op, sym, {count}, qk_{spec.name}_task);"]
    head = header_comment(spec, f"Hadamard transforms of {body.block} columns; runs shared among tasks")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
