"""The position of the first maximum along the middle dim; the first NaN counts as the maximum."""

from __future__ import annotations

from qcompiler.kernels.cpu.gather import offset
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.argmax import ArgmaxKernel


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("order.h",)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return 0


def emit(spec: KernelSpec, isa: str) -> str:
    """Items are (outer, inner) pairs; each walks its elements in order."""
    body = spec.body
    assert isinstance(body, ArgmaxKernel)
    x, out = spec.operands
    items = f"{c_dim(body.outer)} * {c_dim(body.inner)}"
    cost = f"2 * {c_dim(body.length)}"
    kind = f"qc_order<{STORAGE_TYPES[x.dtype]}, true>"
    task = [
        pointer(x, 0, "x", "call->op"),
        pointer(out, 1, "out", "call->op"),
        f"const int64_t items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        f"    const int64_t o = item / {c_dim(body.inner)}, n = item % {c_dim(body.inner)};",
        "    (void)o;",
        "    (void)n;",
        f"    const auto from = x + {offset(x, ['o', '0', 'n'])};",
        f"    const {kind} row{{from, {c_dim(x.strides[1])}, nullptr, 0}};",
        "    int64_t at = 0;",
        f"    for (int64_t i = 1; i < {c_dim(body.length)}; i++)",
        "        if (row.precedes(i, at)) at = i;",
        f"    out[{offset(out, ['o', 'n'])}] = at;",
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);"]
    head = header_comment(spec, "a row at a time, in order")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
